/* The kernels' vocabulary in plain C: one lane. This file is the definition: every other header of
 * this folder has the same words with the same results, bit for bit, in each of its lanes. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 1

typedef float vec;
typedef uint32_t uvec;
typedef double squares;

#define VEC_OP static inline __attribute__((always_inline))

VEC_OP vec v_set(float x) { return x; }
VEC_OP vec v_load(const float *p) { return *p; }
VEC_OP void v_store(float *p, vec x) { *p = x; }

VEC_OP vec v_add(vec a, vec b) { return a + b; }
VEC_OP vec v_sub(vec a, vec b) { return a - b; }
VEC_OP vec v_mul(vec a, vec b) { return a * b; }
VEC_OP vec v_div(vec a, vec b) { return a / b; }
VEC_OP vec v_sqrt(vec a) { return sqrtf(a); }

/* a * b + c, rounded once. Without an instruction for it the C library would call a function that
 * saves and restores the floating-point environment. The product of two floats is exact in double;
 * rounding the sum to odd keeps the second rounding, to float, right. */
VEC_OP vec v_fma(vec a, vec b, vec c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  const double product = (double)a * b;
  const double addend = c;
  const double sum = product + addend;
  const double part = sum - product;
  const double lost = (product - (sum - part)) + (addend - part);
  int64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  if (lost == lost && lost != 0.0 && (bits & 1) == 0) {
    bits += (lost > 0.0) == (sum > 0.0) ? 1 : -1; /* towards what was lost: odd and nearest */
  }
  double odd;
  memcpy(&odd, &bits, sizeof odd);
  return (float)odd;
#endif
}

VEC_OP vec v_fms(vec a, vec b, vec c) { return v_fma(a, b, -c); }
VEC_OP vec v_fnma(vec a, vec b, vec c) { return v_fma(-a, b, c); }

/* The second operand where one is NaN, as x86's instructions have it. */
VEC_OP vec v_min(vec a, vec b) { return a < b ? a : b; }
VEC_OP vec v_max(vec a, vec b) { return a > b ? a : b; }

/* x in the lanes where a == b, else 0. */
VEC_OP vec v_zero_unless_equal(vec x, vec a, vec b) { return a == b ? x : 0.0f; }

VEC_OP int v_all_finite(vec x) { return x - x == 0.0f; }

/* 1, -1, or 0 for both zeros and NaN. */
VEC_OP vec v_sign(vec x) { return (x > 0.0f ? 1.0f : 0.0f) - (x < 0.0f ? 1.0f : 0.0f); }

/* One bit pattern for all NaNs: which operand's payload survives differs between CPUs. */
VEC_OP vec v_quiet(vec x) { return x == x ? x : NAN; }

VEC_OP uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Unsigned integers of 32 bits, mod 2^32. */
VEC_OP uvec u_set(uint32_t x) { return x; }
VEC_OP uvec u_count_from(uint32_t first) { return first; } /* first, first + 1, ... */
VEC_OP uvec u_bits(vec x) { return bits_of(x); }
VEC_OP uvec u_add(uvec a, uvec b) { return a + b; }
VEC_OP uvec u_mul(uvec a, uvec b) { return a * b; }
VEC_OP uvec u_xor(uvec a, uvec b) { return a ^ b; }
VEC_OP uvec u_and(uvec a, uvec b) { return a & b; }
VEC_OP uvec u_shift_right(uvec a, int n) { return a >> n; }

VEC_OP float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Halves are moved as bytes: a tail is a buffer of floats that holds halves. */
VEC_OP uint32_t load_half(const uint16_t *p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return bits;
}

VEC_OP void store_half(uint16_t *p, uint32_t half) {
  const uint16_t bits = (uint16_t)half;
  memcpy(p, &bits, sizeof bits);
}

VEC_OP vec v_load_f16(const uint16_t *p) {
  const uint32_t half = load_half(p);
  const uint32_t sign = (half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7FFF;
  if (magnitude >= 0x7C00) { /* infinity; a NaN becomes quiet */
    return float_of(sign | 0x7F800000 | (magnitude & 0x3FF) << 13 |
                    (magnitude > 0x7C00 ? 0x400000 : 0));
  }
  if (magnitude < 0x400) { /* subnormal: a multiple of 2^-24 */
    return float_of(sign | bits_of((float)magnitude * 0x1p-24f));
  }
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

/* To nearest even. A NaN must be the one of v_quiet: it becomes 0x7E00. */
VEC_OP void v_store_f16(uint16_t *p, vec x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const uint32_t magnitude = bits_of(x) & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {
    store_half(p, 0x7E00);
  } else if (magnitude >= 0x477FF000) { /* 65520 and more round to infinity */
    store_half(p, sign | 0x7C00);
  } else if (magnitude < 0x38800000) { /* adding 0.5 makes the FPU round to multiples of 2^-24 */
    store_half(p, sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  } else {
    const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    store_half(p, sign | (rounded - (112u << 23)) >> 13);
  }
}

VEC_OP vec v_load_bf16(const uint16_t *p) { return float_of(load_half(p) << 16); }

/* The upper halves of the integers. */
VEC_OP void u_store_high(uint16_t *p, uvec x) { store_half(p, x >> 16); }

/* Running sums of squares in fp64, one for each lane. The squares are exact, so that it does not
 * matter whether multiplication and addition are fused. */
VEC_OP squares squares_none(void) { return 0.0; }
VEC_OP squares squares_add(squares sum, vec x) { return sum + (double)x * (double)x; }
VEC_OP void squares_store(double *p, squares sum) { *p = sum; }
