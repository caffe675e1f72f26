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

/* The formulas. Adam has two texts, see adam.inc.h. */
enum zo_rule {
  ZO_ADAM_COMMON,
  ZO_ADAM,
  ZO_AMSGRAD,
  ZO_SGD,
  ZO_MOMENTUM,
  ZO_ADAGRAD,
  ZO_LION,
  ZO_RULE_COUNT,
};

static inline int zo_state_count(enum zo_rule rule) {
  static const int counts[ZO_RULE_COUNT] = {
      [ZO_ADAM_COMMON] = 2, [ZO_ADAM] = 2,    [ZO_AMSGRAD] = 3, [ZO_SGD] = 0,
      [ZO_MOMENTUM] = 1,    [ZO_ADAGRAD] = 1, [ZO_LION] = 1,
  };
  return counts[rule];
}

/* The constants of one step of any rule, made once from the hyper-parameters in double. `first` and
 * `second` multiply what enters the first and the second moment: 1 - beta1, 1 - beta2. */
struct zo_constants {
  enum zo_rule rule;
  int nesterov;
  double scale, clip, l2, decay, beta1, first, beta2, second, step_size, eps;
  struct {
    struct zo_pair scale, l2, beta1, first, beta2, second, step_size;
    float clip, eps, minus_decay, step_size_residue;
    /* of ZO_ADAM_COMMON, where the gradient's scale is part of `first` and `second` */
    float one_minus_beta1, one_minus_beta1_exact, one_minus_beta2, first_rest;
  } f32;
};

/* n elements that share a step: of one segment, if the state is bf16. `first` is the number of the
 * first one in its segment, mod 2^32; `keys` choose the random numbers of its segment and step. */
struct zo_slice {
  int64_t n;
  float *master;
  void *state[3];
  void *exchange;
  uint32_t first;
  uint32_t keys[2];
};

typedef void zo_update(const struct zo_constants *constants, const struct zo_slice *slice);

enum { ZO_STATE_DTYPE_COUNT = 2 }; /* fp32, bf16 */

/* The kernels of one instruction set. */
struct zo_kernels {
  const char *name;
  zo_update *update[ZO_RULE_COUNT][ZO_DTYPE_COUNT][ZO_STATE_DTYPE_COUNT];
  double (*sum_of_squares[ZO_DTYPE_COUNT])(int64_t n, const void *exchange);
  double (*accumulate[ZO_DTYPE_COUNT])(int64_t n, float *accumulator, const void *gradient);
  void (*widen[ZO_DTYPE_COUNT])(int64_t n, const void *source, float *destination);
  void (*narrow[ZO_DTYPE_COUNT])(int64_t n, const float *source, void *destination);
};

extern const struct zo_kernels zo_scalar;
extern const struct zo_kernels zo_avx2;
extern const struct zo_kernels zo_avx512;
extern const struct zo_kernels zo_neon;

/* dispatch.c: the kernels in use. */
const struct zo_kernels *zo_kernels_active(void);

/* cpu.c: whether this CPU has the instructions and the operating system saves the registers. */
int zo_cpu_has_avx2(void);
int zo_cpu_has_avx512(void);

/* Kernels cut their work in tiles of this many elements, whatever the number of threads. A tile of
 * every stream (fp32 master and moments, exchange) fits in the second-level cache. */
enum { ZO_TILE = 16384 };

/* Where the tiles before number `tile` end, of n elements: the last tile may be short. */
static inline int64_t zo_tiles_end(int64_t tile, int64_t n) {
  return tile * ZO_TILE < n ? tile * ZO_TILE : n;
}

static inline size_t zo_size_of(enum zo_dtype dtype) { return dtype == ZO_F32 ? 4 : 2; }

/* constants.c: the constants of a step from an optimizer's hyper-parameters. */
struct zo_constants zo_adam_constants(const struct zo_adam *hyper, int64_t step);
struct zo_constants zo_sgd_constants(const struct zo_sgd *hyper, int64_t step);
struct zo_constants zo_adagrad_constants(const struct zo_adagrad *hyper, int64_t step);
struct zo_constants zo_lion_constants(const struct zo_lion *hyper, int64_t step);

/* element.c: the formula in fp64, for the elements that the fp32 kernels cannot do. */
void zo_update_element(const struct zo_constants *constants, float gradient, float *master,
                       float state[3]);

/* threads.c: calls work(context, first, last) on ranges that together are [0, tiles), at most
 * `threads` of them at a time, each with the default floating-point environment, whatever the
 * caller's is (torch.set_flush_denormal changes it). */
typedef void zo_work(void *context, int64_t first, int64_t last);
void zo_parallel(zo_work *work, void *context, int64_t tiles, int threads);

/* The same on n elements cut in tiles; the last one may be short. */
void zo_parallel_elements(zo_work *work, void *context, int64_t n, int threads);
