/* Statistics, accumulation and casts: the only text of these kernels. A file of isa/ includes it
 * after a vocabulary.
 *
 * Element i of a tile is added to lane i % 32 in fp64, and the lanes are summed as a fixed tree, so
 * a sum of squares is the same whatever the width of the registers. */
#pragma once

#include <string.h>

#include "access.inc.h"

enum { SUM_LANES = 32, SUM_REGISTERS = SUM_LANES / LANES };

VEC_OP double total_of(const squares sums[SUM_REGISTERS]) {
  double lanes[SUM_LANES];
  for (int j = 0; j < SUM_REGISTERS; j++) {
    squares_store(lanes + (ptrdiff_t)j * LANES, sums[j]);
  }
  for (int width = SUM_LANES / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; j++) {
      lanes[j] += lanes[j + width];
    }
  }
  return lanes[0];
}

/* SUM_LANES elements: adds them to the accumulator, if there is one, and squares the sum. */
VEC_OP void sum_block(squares sums[SUM_REGISTERS], enum zo_dtype dtype, const char *gradient,
                      float *accumulator) {
  for (int j = 0; j < SUM_REGISTERS; j++) {
    vec x = load_as(dtype, gradient + (size_t)j * LANES * zo_size_of(dtype));
    if (accumulator != NULL) {
      float *at = accumulator + (ptrdiff_t)j * LANES;
      x = v_quiet(v_add(v_load(at), x));
      v_store(at, x);
    }
    sums[j] = squares_add(sums[j], x);
  }
}

VEC_OP double sum_tile(enum zo_dtype dtype, int64_t n, const char *gradient, float *accumulator) {
  squares sums[SUM_REGISTERS];
  for (int j = 0; j < SUM_REGISTERS; j++) {
    sums[j] = squares_none();
  }
  const size_t size = zo_size_of(dtype);
  int64_t i = 0;
  for (; i + SUM_LANES <= n; i += SUM_LANES) {
    sum_block(sums, dtype, gradient + (size_t)i * size, accumulator ? accumulator + i : NULL);
  }
  if (i < n) { /* the tail, padded: zeros add nothing */
    const size_t rest = (size_t)(n - i);
    float tail[SUM_LANES] = {0}, sum[SUM_LANES] = {0};
    memcpy(tail, gradient + (size_t)i * size, rest * size);
    if (accumulator != NULL) {
      memcpy(sum, accumulator + i, rest * sizeof(float));
    }
    sum_block(sums, dtype, (const char *)tail, accumulator ? sum : NULL);
    if (accumulator != NULL) {
      memcpy(accumulator + i, sum, rest * sizeof(float));
    }
  }
  return total_of(sums);
}

VEC_OP void cast_block(enum zo_dtype from, const char *source, enum zo_dtype to,
                       char *destination) {
  store_as(to, destination, v_quiet(load_as(from, source)));
}

VEC_OP void cast_tile(int64_t n, enum zo_dtype from, const char *source, enum zo_dtype to,
                      char *destination) {
  const size_t source_size = zo_size_of(from), destination_size = zo_size_of(to);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    cast_block(from, source + (size_t)i * source_size, to,
               destination + (size_t)i * destination_size);
  }
  if (i < n) {
    const size_t rest = (size_t)(n - i);
    float before[LANES] = {0}, after[LANES];
    memcpy(before, source + (size_t)i * source_size, rest * source_size);
    cast_block(from, (const char *)before, to, (char *)after);
    memcpy(destination + (size_t)i * destination_size, after, rest * destination_size);
  }
}

#define PASSES_FOR(suffix, dtype)                                                                  \
  static double sum_of_squares_##suffix(int64_t n, const void *exchange) {                         \
    return sum_tile(dtype, n, exchange, NULL);                                                     \
  }                                                                                                \
  static double accumulate_##suffix(int64_t n, float *accumulator, const void *gradient) {         \
    return sum_tile(dtype, n, gradient, accumulator);                                              \
  }                                                                                                \
  static void widen_##suffix(int64_t n, const void *source, float *destination) {                  \
    cast_tile(n, dtype, source, ZO_F32, (char *)destination);                                      \
  }                                                                                                \
  static void narrow_##suffix(int64_t n, const float *source, void *destination) {                 \
    cast_tile(n, ZO_F32, (const char *)source, dtype, destination);                                \
  }

PASSES_FOR(f16, ZO_F16)
PASSES_FOR(bf16, ZO_BF16)
PASSES_FOR(f32, ZO_F32)

#define PASS_TABLE(name) {name##_f16, name##_bf16, name##_f32}
