/* The kernels' vocabulary in AVX2 with FMA and F16C: 16 lanes. See scalar.h for what each word
 * means. */
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define LANES 16

/* Two registers, so that two dependency chains run side by side: one chain of the Adam kernel fills
 * most of the window in which a CPU looks for independent work. */
typedef struct {
  __m256 a, b;
} vec;

typedef struct {
  __m256i a, b;
} uvec;

typedef struct {
  __m256d sums[4];
} squares;

#define VEC_OP static inline __attribute__((always_inline))

VEC_OP vec v_set(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
VEC_OP vec v_load(const float *p) { return (vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
VEC_OP void v_store(float *p, vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}

VEC_OP vec v_add(vec x, vec y) { return (vec){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
VEC_OP vec v_sub(vec x, vec y) { return (vec){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
VEC_OP vec v_mul(vec x, vec y) { return (vec){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
VEC_OP vec v_div(vec x, vec y) { return (vec){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
VEC_OP vec v_sqrt(vec x) { return (vec){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
VEC_OP vec v_fma(vec x, vec y, vec z) {
  return (vec){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
VEC_OP vec v_fms(vec x, vec y, vec z) {
  return (vec){_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
VEC_OP vec v_fnma(vec x, vec y, vec z) {
  return (vec){_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
VEC_OP vec v_min(vec x, vec y) { return (vec){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
VEC_OP vec v_max(vec x, vec y) { return (vec){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }

VEC_OP vec v_zero_unless_equal(vec x, vec y, vec z) {
  return (vec){_mm256_and_ps(x.a, _mm256_cmp_ps(y.a, z.a, _CMP_EQ_OQ)),
               _mm256_and_ps(x.b, _mm256_cmp_ps(y.b, z.b, _CMP_EQ_OQ))};
}

VEC_OP int v_all_finite(vec x) { /* x - x is 0 or NaN */
  const vec zero = v_sub(x, x);
  return _mm256_movemask_ps(_mm256_cmp_ps(zero.a, zero.b, _CMP_UNORD_Q)) == 0;
}

VEC_OP __m256 sign_of(__m256 x) {
  const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
  return _mm256_sub_ps(_mm256_and_ps(one, _mm256_cmp_ps(x, zero, _CMP_GT_OQ)),
                       _mm256_and_ps(one, _mm256_cmp_ps(x, zero, _CMP_LT_OQ)));
}

VEC_OP vec v_sign(vec x) { return (vec){sign_of(x.a), sign_of(x.b)}; }

VEC_OP __m256 quiet(__m256 x) {
  return _mm256_blendv_ps(_mm256_set1_ps(NAN), x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
}

VEC_OP vec v_quiet(vec x) { return (vec){quiet(x.a), quiet(x.b)}; }

VEC_OP uvec u_count_from(uint32_t first) {
  const __m256i count = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return (uvec){_mm256_add_epi32(_mm256_set1_epi32((int)first), count),
                _mm256_add_epi32(_mm256_set1_epi32((int)(first + 8)), count)};
}

VEC_OP uvec u_set(uint32_t x) {
  return (uvec){_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)};
}

VEC_OP uvec u_bits(vec x) { return (uvec){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
VEC_OP uvec u_add(uvec x, uvec y) {
  return (uvec){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
VEC_OP uvec u_mul(uvec x, uvec y) {
  return (uvec){_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
VEC_OP uvec u_xor(uvec x, uvec y) {
  return (uvec){_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
VEC_OP uvec u_and(uvec x, uvec y) {
  return (uvec){_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
VEC_OP uvec u_shift_right(uvec x, int n) {
  return (uvec){_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}

VEC_OP __m256 load_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

VEC_OP vec v_load_f16(const uint16_t *p) { return (vec){load_f16(p), load_f16(p + 8)}; }

VEC_OP void store_f16(uint16_t *p, __m256 x) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

VEC_OP void v_store_f16(uint16_t *p, vec x) {
  store_f16(p, x.a);
  store_f16(p + 8, x.b);
}

VEC_OP __m256 load_bf16(const uint16_t *p) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

VEC_OP vec v_load_bf16(const uint16_t *p) { return (vec){load_bf16(p), load_bf16(p + 8)}; }

VEC_OP void u_store_high(uint16_t *p, uvec x) {
  const __m256i a = _mm256_srli_epi32(x.a, 16), b = _mm256_srli_epi32(x.b, 16);
  const __m256i packed = _mm256_packus_epi32(a, b); /* within each half of 128 bits */
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}

VEC_OP __m256d low_half(__m256 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
VEC_OP __m256d high_half(__m256 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
VEC_OP __m256d square_add(__m256d sum, __m256d x) { return _mm256_fmadd_pd(x, x, sum); }

VEC_OP squares squares_none(void) {
  const __m256d none = _mm256_setzero_pd();
  return (squares){{none, none, none, none}};
}

VEC_OP squares squares_add(squares s, vec x) {
  return (squares){{square_add(s.sums[0], low_half(x.a)), square_add(s.sums[1], high_half(x.a)),
                    square_add(s.sums[2], low_half(x.b)), square_add(s.sums[3], high_half(x.b))}};
}

VEC_OP void squares_store(double *p, squares s) {
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_pd(p + 4 * (ptrdiff_t)i, s.sums[i]);
  }
}
