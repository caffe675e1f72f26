/* The kernels' vocabulary in AVX2 with FMA and F16C: 8 lanes. See scalar.h for what each word
 * means. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define LANES 8

typedef __m256 vec;
typedef struct {
  __m256d low, high;
} squares;

#define VEC_OP static inline __attribute__((always_inline))

VEC_OP vec v_set(float x) { return _mm256_set1_ps(x); }
VEC_OP vec v_load(const float *p) { return _mm256_loadu_ps(p); }
VEC_OP void v_store(float *p, vec x) { _mm256_storeu_ps(p, x); }

VEC_OP vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
VEC_OP vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
VEC_OP vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
VEC_OP vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
VEC_OP vec v_sqrt(vec a) { return _mm256_sqrt_ps(a); }
VEC_OP vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
VEC_OP vec v_fms(vec a, vec b, vec c) { return _mm256_fmsub_ps(a, b, c); }
VEC_OP vec v_fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
VEC_OP vec v_min(vec a, vec b) { return _mm256_min_ps(a, b); }
VEC_OP vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }

VEC_OP vec v_zero_unless_equal(vec x, vec a, vec b) {
  return _mm256_and_ps(x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}

VEC_OP int v_all_finite(vec x) {
  const vec zero_or_nan = _mm256_sub_ps(x, x);
  return _mm256_movemask_ps(_mm256_cmp_ps(zero_or_nan, zero_or_nan, _CMP_UNORD_Q)) == 0;
}

VEC_OP vec v_load_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

VEC_OP void v_store_f16(uint16_t *p, vec x) {
  const __m256 quiet = _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)),
                                        _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT));
}

VEC_OP vec v_load_bf16(const uint16_t *p) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

VEC_OP void v_store_bf16(uint16_t *p, vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(result),
                                                  _mm256_extracti128_si256(result, 1)));
}

VEC_OP squares squares_none(void) { return (squares){_mm256_setzero_pd(), _mm256_setzero_pd()}; }

VEC_OP squares squares_add(squares sum, vec x) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
  return (squares){_mm256_fmadd_pd(low, low, sum.low), _mm256_fmadd_pd(high, high, sum.high)};
}

VEC_OP void squares_store(double *p, squares sum) {
  _mm256_storeu_pd(p, sum.low);
  _mm256_storeu_pd(p + 4, sum.high);
}
