/* What the C files share and nobody else sees. */
#pragma once

#include <float.h>
#include <stddef.h>
#include <stdint.h>

#include "zoffload.h"

#if FLT_EVAL_METHOD != 0
#error "arithmetic must be done in the operands' own precision (on 32-bit x86: -mfpmath=sse)"
#endif

/* A double kept as the sum of two floats, to about 48 bits. */
struct zo_pair {
  float high, low;
};

/* The constants of one step, made once from the hyper-parameters in double. See adam.inc.h. */
struct zo_adam_constants {
  double scale, clip, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps;
  struct {
    struct zo_pair scale, l2, beta1, first, beta2, second;
    float clip, eps, minus_decay, step_size, step_size_residue;
    float one_minus_beta1, one_minus_beta1_exact, one_minus_beta2, first_rest;
  } f32;
  int common; /* the scale is part of `first` and `second`; see adam.inc.h */
};

/* The kernels of one instruction set, by dtype. */
struct zo_kernels {
  const char *name;
  void (*adam[ZO_DTYPE_COUNT])(const struct zo_adam_constants *constants, int64_t n, float *master,
                               float *exp_avg, float *exp_avg_sq, void *exchange);
  double (*sum_of_squares[ZO_DTYPE_COUNT])(int64_t n, const void *exchange);
};

extern const struct zo_kernels zo_scalar;
extern const struct zo_kernels zo_avx2;
extern const struct zo_kernels zo_avx512;

/* cpu.c: whether this CPU has the instructions and the operating system saves the registers. */
int zo_cpu_has_avx2(void);
int zo_cpu_has_avx512(void);

/* Kernels cut their work in tiles of this many elements, whatever the number of threads. A tile of
 * every stream (fp32 master and moments, exchange) fits in the second-level cache. */
enum { ZO_TILE = 16384 };

static inline size_t zo_size_of(enum zo_dtype dtype) { return dtype == ZO_F32 ? 4 : 2; }

/* adam.c: the constants, and the formula in fp64 for the elements that the fp32 kernels cannot do.
 */
struct zo_adam_constants zo_adam_constants(const struct zo_adam *hyper);
void zo_adam_element(const struct zo_adam_constants *constants, float gradient, float *master,
                     float *exp_avg, float *exp_avg_sq);

/* threads.c: calls work(context, first, last) on ranges that together are [0, tiles), at most
 * `threads` of them at a time, each with the default floating-point environment. */
typedef void zo_work(void *context, int64_t first, int64_t last);
void zo_parallel(zo_work *work, void *context, int64_t tiles, int threads);
