/* The kernels' vocabulary in AVX-512 (F, BW, VL): 32 lanes. See scalar.h for what each word means.
 */
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define LANES 32

/* Two registers, so that two dependency chains run side by side: one chain of the Adam kernel fills
 * most of the window in which a CPU looks for independent work. */
typedef struct {
  __m512 a, b;
} vec;

typedef struct {
  __m512i a, b;
} uvec;

typedef struct {
  __m512d sums[4];
} squares;

#define VEC_OP static inline __attribute__((always_inline))

VEC_OP vec v_set(float x) { return (vec){_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
VEC_OP vec v_load(const float *p) { return (vec){_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)}; }
VEC_OP void v_store(float *p, vec x) {
  _mm512_storeu_ps(p, x.a);
  _mm512_storeu_ps(p + 16, x.b);
}

VEC_OP vec v_add(vec x, vec y) { return (vec){_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)}; }
VEC_OP vec v_sub(vec x, vec y) { return (vec){_mm512_sub_ps(x.a, y.a), _mm512_sub_ps(x.b, y.b)}; }
VEC_OP vec v_mul(vec x, vec y) { return (vec){_mm512_mul_ps(x.a, y.a), _mm512_mul_ps(x.b, y.b)}; }
VEC_OP vec v_div(vec x, vec y) { return (vec){_mm512_div_ps(x.a, y.a), _mm512_div_ps(x.b, y.b)}; }
VEC_OP vec v_sqrt(vec x) { return (vec){_mm512_sqrt_ps(x.a), _mm512_sqrt_ps(x.b)}; }
VEC_OP vec v_fma(vec x, vec y, vec z) {
  return (vec){_mm512_fmadd_ps(x.a, y.a, z.a), _mm512_fmadd_ps(x.b, y.b, z.b)};
}
VEC_OP vec v_fms(vec x, vec y, vec z) {
  return (vec){_mm512_fmsub_ps(x.a, y.a, z.a), _mm512_fmsub_ps(x.b, y.b, z.b)};
}
VEC_OP vec v_fnma(vec x, vec y, vec z) {
  return (vec){_mm512_fnmadd_ps(x.a, y.a, z.a), _mm512_fnmadd_ps(x.b, y.b, z.b)};
}
VEC_OP vec v_min(vec x, vec y) { return (vec){_mm512_min_ps(x.a, y.a), _mm512_min_ps(x.b, y.b)}; }
VEC_OP vec v_max(vec x, vec y) { return (vec){_mm512_max_ps(x.a, y.a), _mm512_max_ps(x.b, y.b)}; }

VEC_OP vec v_zero_unless_equal(vec x, vec y, vec z) {
  return (vec){_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y.a, z.a, _CMP_EQ_OQ), x.a),
               _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y.b, z.b, _CMP_EQ_OQ), x.b)};
}

VEC_OP int v_all_finite(vec x) { /* x - x is 0 or NaN */
  const vec zero = v_sub(x, x);
  return _mm512_cmp_ps_mask(zero.a, zero.b, _CMP_UNORD_Q) == 0;
}

VEC_OP __m512 sign_of(__m512 x) {
  const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1.0f);
  return _mm512_sub_ps(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), one),
                       _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), one));
}

VEC_OP vec v_sign(vec x) { return (vec){sign_of(x.a), sign_of(x.b)}; }

VEC_OP __m512 quiet(__m512 x) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(NAN), _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
}

VEC_OP vec v_quiet(vec x) { return (vec){quiet(x.a), quiet(x.b)}; }

VEC_OP uvec u_count_from(uint32_t first) {
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (uvec){_mm512_add_epi32(_mm512_set1_epi32((int)first), count),
                _mm512_add_epi32(_mm512_set1_epi32((int)(first + 16)), count)};
}

VEC_OP uvec u_set(uint32_t x) {
  return (uvec){_mm512_set1_epi32((int)x), _mm512_set1_epi32((int)x)};
}

VEC_OP uvec u_bits(vec x) { return (uvec){_mm512_castps_si512(x.a), _mm512_castps_si512(x.b)}; }
VEC_OP uvec u_add(uvec x, uvec y) {
  return (uvec){_mm512_add_epi32(x.a, y.a), _mm512_add_epi32(x.b, y.b)};
}
VEC_OP uvec u_mul(uvec x, uvec y) {
  return (uvec){_mm512_mullo_epi32(x.a, y.a), _mm512_mullo_epi32(x.b, y.b)};
}
VEC_OP uvec u_xor(uvec x, uvec y) {
  return (uvec){_mm512_xor_si512(x.a, y.a), _mm512_xor_si512(x.b, y.b)};
}
VEC_OP uvec u_and(uvec x, uvec y) {
  return (uvec){_mm512_and_si512(x.a, y.a), _mm512_and_si512(x.b, y.b)};
}
VEC_OP uvec u_shift_right(uvec x, int n) {
  return (uvec){_mm512_srli_epi32(x.a, (unsigned)n), _mm512_srli_epi32(x.b, (unsigned)n)};
}

VEC_OP __m512 load_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

VEC_OP vec v_load_f16(const uint16_t *p) { return (vec){load_f16(p), load_f16(p + 16)}; }

VEC_OP void store_f16(uint16_t *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

VEC_OP void v_store_f16(uint16_t *p, vec x) {
  store_f16(p, x.a);
  store_f16(p + 16, x.b);
}

VEC_OP __m512 load_bf16(const uint16_t *p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

VEC_OP vec v_load_bf16(const uint16_t *p) { return (vec){load_bf16(p), load_bf16(p + 16)}; }

VEC_OP void u_store_high(uint16_t *p, uvec x) {
  /* Halfwords 1, 3, 5, ... of x.a, then of x.b, which are numbered from 32. */
  const __m512i first = _mm512_set1_epi32(1 << 16 | 1);
  const __m512i odd = _mm512_add_epi16(
      first, _mm512_set_epi32(62 << 16 | 60, 58 << 16 | 56, 54 << 16 | 52, 50 << 16 | 48,
                              46 << 16 | 44, 42 << 16 | 40, 38 << 16 | 36, 34 << 16 | 32,
                              30 << 16 | 28, 26 << 16 | 24, 22 << 16 | 20, 18 << 16 | 16,
                              14 << 16 | 12, 10 << 16 | 8, 6 << 16 | 4, 2 << 16 | 0));
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(x.a, odd, x.b));
}

VEC_OP __m512d low_half(__m512 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }

VEC_OP __m512d high_half(__m512 x) {
  return _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
}

VEC_OP __m512d square_add(__m512d sum, __m512d x) { return _mm512_fmadd_pd(x, x, sum); }

VEC_OP squares squares_none(void) {
  const __m512d none = _mm512_setzero_pd();
  return (squares){{none, none, none, none}};
}

VEC_OP squares squares_add(squares s, vec x) {
  return (squares){{square_add(s.sums[0], low_half(x.a)), square_add(s.sums[1], high_half(x.a)),
                    square_add(s.sums[2], low_half(x.b)), square_add(s.sums[3], high_half(x.b))}};
}

VEC_OP void squares_store(double *p, squares s) {
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_pd(p + 8 * (ptrdiff_t)i, s.sums[i]);
  }
}
