/* The kernels' vocabulary in AVX-512 (F, BW, VL): 16 lanes. See scalar.h for what each word means.
 */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define LANES 16

typedef __m512 vec;
typedef struct {
  __m512d low, high;
} squares;

#define VEC_OP static inline __attribute__((always_inline))

VEC_OP vec v_set(float x) { return _mm512_set1_ps(x); }
VEC_OP vec v_load(const float *p) { return _mm512_loadu_ps(p); }
VEC_OP void v_store(float *p, vec x) { _mm512_storeu_ps(p, x); }

VEC_OP vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
VEC_OP vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
VEC_OP vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
VEC_OP vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
VEC_OP vec v_sqrt(vec a) { return _mm512_sqrt_ps(a); }
VEC_OP vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
VEC_OP vec v_fms(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }
VEC_OP vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
VEC_OP vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
VEC_OP vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }

VEC_OP vec v_zero_unless_equal(vec x, vec a, vec b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), x);
}

VEC_OP int v_all_finite(vec x) {
  const vec zero_or_nan = _mm512_sub_ps(x, x);
  return _mm512_cmp_ps_mask(zero_or_nan, zero_or_nan, _CMP_UNORD_Q) == 0;
}

VEC_OP vec v_load_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

VEC_OP void v_store_f16(uint16_t *p, vec x) {
  const __m512 quiet = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                          _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT));
}

VEC_OP vec v_load_bf16(const uint16_t *p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

/* Not vcvtneps2bf16: that one flushes subnormal numbers. */
VEC_OP void v_store_bf16(uint16_t *p, vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __m512i result = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                               _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(result));
}

VEC_OP squares squares_none(void) { return (squares){_mm512_setzero_pd(), _mm512_setzero_pd()}; }

VEC_OP squares squares_add(squares sum, vec x) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  const __m512d high =
      _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  return (squares){_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
}

VEC_OP void squares_store(double *p, squares sum) {
  _mm512_storeu_pd(p, sum.low);
  _mm512_storeu_pd(p + 8, sum.high);
}
