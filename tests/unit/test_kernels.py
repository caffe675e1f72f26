"""The Python face of the kernels: what it accepts, and what it says to what it refuses."""

from __future__ import annotations

import builtins
import importlib
import math
import sys
from typing import Any

import pytest
import torch

from lightning_zoffload import kernels
from lightning_zoffload.kernels import SegmentSteps

HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "step": 1,
}
STATE = ["master", "exp_avg", "exp_avg_sq"]


def tensors(n: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {name: torch.ones(n) for name in STATE} | {"exchange": torch.ones(n, dtype=dtype)}


def step(**changes: Any) -> dict[str, Any]:
    arguments = tensors() | HYPER | changes
    kernels.adam_step(**arguments)
    return arguments


def test_isas_end_with_the_active_one() -> None:
    assert kernels.available_isas()[0] == "scalar"
    assert kernels.isa() in kernels.available_isas()


def test_forced_isa_is_put_back() -> None:
    before = kernels.isa()
    with kernels._forced_isa("scalar"):
        assert kernels.isa() == "scalar"
    assert kernels.isa() == before


def test_known_but_unsupported_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldCpu:
        ZO_OK, ZO_UNSUPPORTED = 0, 2

        def zo_isa_use(self, number: int) -> int:
            return self.ZO_UNSUPPORTED

        def zo_isa_supported(self, number: int) -> bool:
            return number == 0

    monkeypatch.setattr(kernels, "_lib", OldCpu())
    monkeypatch.setattr(kernels, "_ISAS", ("scalar", "avx2"))
    with pytest.raises(RuntimeError, match=r"ZOFFLOAD_ISA=avx2 needs .* Available here: scalar"):
        kernels._use_isa("avx2")


def test_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning_zoffload.kernels")
    real_import = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "lightning_zoffload._native":
            raise ImportError("no such file")
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"cannot be loaded \(no such file\).*`pip install \.`"):
        importlib.import_module("lightning_zoffload.kernels")


def test_one_step_by_hand() -> None:
    after = step(exchange=torch.full((8,), 4.0), grad_scale=0.5, weight_decay=0.0)
    m, v = 0.9 + 0.1 * 2, 0.999 + 0.001 * 4
    update = 1e-3 * (m / 0.1) / (math.sqrt(v / 0.001) + 1e-8)
    assert after["exp_avg"].tolist() == pytest.approx([m] * 8, rel=1e-6)
    assert after["exp_avg_sq"].tolist() == pytest.approx([v] * 8, rel=1e-6)
    assert after["master"].tolist() == pytest.approx([1 - update] * 8, rel=1e-6)
    assert torch.equal(after["exchange"], after["master"])


def test_parameters_that_require_grad_are_welcome() -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    step(master=parameter)
    assert float(parameter.detach()[0]) != 1.0


def test_empty_tensors_are_welcome() -> None:
    kernels.adam_step(**tensors(0), **HYPER)
    assert kernels.grad_stats(torch.ones(0)) == (0.0, False)


@pytest.mark.parametrize("name", [*STATE, "exchange"])
def test_dtype_and_type_are_checked(name: str) -> None:
    with pytest.raises(TypeError, match=rf"`{name}` must be of dtype .*, got torch\.float64"):
        step(**{name: torch.ones(8, dtype=torch.float64)})
    with pytest.raises(TypeError, match=f"`{name}` must be a tensor, got list"):
        step(**{name: [1.0] * 8})


def test_master_must_be_fp32() -> None:
    with pytest.raises(TypeError, match=r"`master` .* torch\.float32, got torch\.bfloat16"):
        step(master=torch.ones(8, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", STATE[1:])
def test_moments_are_fp32_or_bf16_and_have_one_dtype(name: str) -> None:
    with pytest.raises(TypeError, match=rf"`{name}` must be of dtype .*, got torch\.float16"):
        step(**{name: torch.ones(8, dtype=torch.float16)})
    with pytest.raises(TypeError, match="`exp_avg`, `exp_avg_sq` must have one dtype, got"):
        step(**{name: torch.ones(8, dtype=torch.bfloat16)})


@pytest.mark.parametrize("name", [*STATE, "exchange"])
@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(2, 4),
        torch.tensor(1.0),
        torch.ones(16)[::2],
        torch.ones(8).to_sparse(),
    ],
    ids=["2-D", "0-D", "strided", "sparse"],
)
def test_layout_is_checked(name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be one-dimensional and contiguous"):
        step(**{name: wrong})


@pytest.mark.parametrize("name", [*STATE, "exchange"])
def test_device_is_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be on the CPU, got device meta"):
        step(**{name: torch.ones(8, device="meta")})


@pytest.mark.parametrize("name", [*STATE[1:], "exchange"])
def test_length_is_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` .* expected 8 elements, got 7"):
        step(**{name: torch.ones(7)})


def test_maximum_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"`max_exp_avg_sq` .* expected 8 elements, got 7"):
        step(max_exp_avg_sq=torch.ones(7))


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (SegmentSteps(int64(4, 9), int64(1, 1)), ValueError, "`step.ends` must ascend .* to 8"),
        (SegmentSteps(int64(4, 3), int64(1, 1)), ValueError, "`step.ends` must ascend"),
        (SegmentSteps(int64(-1, 3), int64(1, 1)), ValueError, "`step.ends` must ascend"),
        (SegmentSteps(int64(4, 8), int64(1, -1)), ValueError, "`step.steps` must be 0 or more"),
        (SegmentSteps(int64(4, 8), int64(1)), ValueError, "`step.steps` must be as long as"),
        (SegmentSteps(int64(8), int64(1), int64(1, 2)), ValueError, "`step.seeds` must be as lo"),
        (SegmentSteps(int64(8), torch.ones(1)), TypeError, "`step.steps` .*int64, got torch.flo"),
    ],
)
def test_segments_are_checked(steps: SegmentSteps, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        step(step=steps)


@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [
        *(("sgd", name, -0.1) for name in ("lr", "momentum", "weight_decay")),
        ("sgd", "dampening", math.nan),
        *(("adagrad", name, -0.1) for name in ("lr", "lr_decay", "weight_decay", "eps")),
        *(("lion", name, math.inf) for name in ("lr", "weight_decay")),
        ("lion", "betas", (0.9, 1.0)),
        *((optimizer, "clip_value", -1.0) for optimizer in ("sgd", "adagrad", "lion")),
        *((optimizer, "step", 0) for optimizer in ("sgd", "adagrad", "lion")),
    ],
)
def test_numbers_of_the_others_are_checked(optimizer: str, name: str, value: Any) -> None:
    hypers: dict[str, dict[str, Any]] = {
        "sgd": {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        "adagrad": {"lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10},
        "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
    }
    arguments = {"lr": 0.1, "step": 1} | hypers[optimizer] | {name: value}
    master, state, exchange = torch.ones(3, 8)
    with pytest.raises(ValueError, match=f"`{name}` must be .*, got"):
        getattr(kernels, f"{optimizer}_step")(master, state, exchange, **arguments)


@pytest.mark.parametrize(("momentum", "buffer"), [(0.9, None), (0.0, torch.ones(8))])
def test_momentum_and_its_buffer_come_together(momentum: float, buffer: Any) -> None:
    with pytest.raises(ValueError, match="`momentum_buffer` must be a tensor where"):
        kernels.sgd_step(
            torch.ones(8),
            buffer,
            torch.ones(8),
            lr=0.1,
            momentum=momentum,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            step=1,
        )


def test_accumulate_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match=r"`accumulator` must be of dtype torch.float32, got"):
        kernels.accumulate(torch.ones(8, dtype=torch.float16), torch.ones(8))
    with pytest.raises(ValueError, match="`gradient` must be as long as `accumulator`"):
        kernels.accumulate(torch.ones(8), torch.ones(7))
    both = torch.ones(8)
    with pytest.raises(ValueError, match="must not overlap"):
        kernels.accumulate(both, both)


def test_cast_checks_its_arguments() -> None:
    half = torch.ones(8, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"`destination` must be of dtype torch.float32, got"):
        kernels.cast(half, half.clone())
    with pytest.raises(TypeError, match="`source` must be of dtype"):
        kernels.cast(torch.ones(8, dtype=torch.float64), half)
    with pytest.raises(ValueError, match="`destination` must be as long as `source`"):
        kernels.cast(half, torch.ones(7))


def test_overlap_is_refused_and_touching_is_not() -> None:
    buffer = torch.ones(32)
    with pytest.raises(ValueError, match="`master` and `exp_avg` must not overlap"):
        step(master=buffer[:8], exp_avg=buffer[7:15])
    with pytest.raises(ValueError, match="must not overlap"):
        step(exp_avg_sq=buffer[:8], exchange=buffer[:8])
    rows = dict(zip([*STATE, "exchange"], buffer.view(4, 8), strict=True))
    step(**rows)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, bad) for name in ("lr", "eps", "weight_decay") for bad in (-1e-9, math.nan)),
        ("lr", math.inf),
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, -0.1)),
        ("betas", (0.9, math.nan)),
        ("step", 0),
        ("clip_value", 0.0),
        ("clip_value", math.nan),
        ("num_threads", 0),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: Any) -> None:
    arguments = tensors()
    with pytest.raises(ValueError, match=f"`{name}` must be .*, got"):
        kernels.adam_step(**arguments, **(HYPER | {name: value}))
    assert all(torch.equal(tensor, torch.ones(8)) for tensor in arguments.values())


@pytest.mark.parametrize("name", ["step", "num_threads"])
def test_counts_must_be_integers(name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be an integer, got float"):
        step(**{name: 2.0})


def test_default_number_of_threads_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked.append(True) or 1)
    step()
    kernels.grad_stats(torch.ones(8))
    assert len(asked) == 2
    step(num_threads=2)
    assert len(asked) == 2


def test_grad_stats() -> None:
    assert kernels.grad_stats(torch.tensor([3.0, 4.0])) == (25.0, False)
    assert kernels.grad_stats(torch.tensor([3.0, math.inf])) == (math.inf, True)


def test_grad_stats_checks_its_argument() -> None:
    with pytest.raises(TypeError, match=r"`exchange` .* got torch\.int32"):
        kernels.grad_stats(torch.ones(8, dtype=torch.int32))
    with pytest.raises(ValueError, match="`exchange` must be one-dimensional"):
        kernels.grad_stats(torch.ones(2, 4))
    with pytest.raises(ValueError, match="`num_threads` must be 1 or more, got -1"):
        kernels.grad_stats(torch.ones(8), num_threads=-1)


def test_grad_stats_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory:
        ZO_OK = 0

        def zo_grad_stats(self, *arguments: Any) -> int:
            return 1

    monkeypatch.setattr(kernels, "_lib", NoMemory())
    with pytest.raises(MemoryError, match="partial sums"):
        kernels.grad_stats(torch.ones(8))
