"""The memory that contestants of one size share, and the machine's own speed on it."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lightning_zoffload.host_memory import HostBuffer

#: Three fp32 streams and one of 16 bit, read and written in place: what a fused step must move.
LOOP = """
#include <pthread.h>
#include <stdint.h>

struct share { int64_t begin, end; float *a, *b, *c; uint16_t *d; };

static void *run(void *argument) {
  const struct share *s = argument;
  for (int64_t i = s->begin; i < s->end; i++) {
    s->a[i] += 1.0f;
    s->b[i] += 1.0f;
    s->c[i] += 1.0f;
    s->d[i] += 1;
  }
  return 0;
}

void read_modify_write(int64_t n, float *a, float *b, float *c, uint16_t *d, int threads) {
  pthread_t workers[64];
  struct share shares[64];
  for (int t = 0; t < threads; t++) {
    shares[t] = (struct share){n * t / threads, n * (t + 1) / threads, a, b, c, d};
    if (t > 0) pthread_create(&workers[t], 0, run, &shares[t]);
  }
  run(&shares[0]);
  for (int t = 1; t < threads; t++) pthread_join(workers[t], 0);
}
"""


@cache
def _loop() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    (folder / "loop.c").write_text(LOOP)
    options = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    library = folder / "loop.so"
    subprocess.run(["cc", *options, "-o", library, folder / "loop.c"], check=True)
    return ctypes.CDLL(str(library))


@dataclass
class Buffers:
    """Masters, moments and a gradient in 16 bit, of numbers as training has them."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exchange: Tensor
    gradient: Tensor
    threads: int

    @classmethod
    def of(cls, numel: int, threads: int) -> Buffers:
        """All on huge pages, where the system has them."""

        def host(dtype: torch.dtype) -> Tensor:
            return HostBuffer(numel, dtype, num_threads=threads).flat

        fp32 = [host(torch.float32) for _ in range(3)]
        buffers = cls(*fp32, host(torch.bfloat16), host(torch.bfloat16), threads)
        generator = torch.Generator().manual_seed(0)
        some = torch.randn(2**20, generator=generator) * 1e-2
        for part in buffers.gradient.split(2**20):
            part.copy_(some[: len(part)])
        buffers.reset()
        return buffers

    def reset(self) -> None:
        """Ordinary numbers again, whatever the last run made of them."""
        self.master.fill_(0.1)
        self.exp_avg.fill_(1e-3)
        self.exp_avg_sq.fill_(1e-4)
        self.exchange.copy_(self.gradient)

    def read_modify_write(self) -> None:
        """The machine's own bandwidth for the access pattern of a step."""
        tensors = (self.master, self.exp_avg, self.exp_avg_sq, self.exchange)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        _loop().read_modify_write(ctypes.c_int64(len(self.master)), *pointers, self.threads)
