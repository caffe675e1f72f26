/* The kernels' vocabulary in NEON of 64-bit ARM: 8 lanes. See scalar.h for what each word means. */
#pragma once

#include <arm_neon.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define LANES 8

/* Two registers, so that two dependency chains run side by side. */
typedef struct {
  float32x4_t a, b;
} vec;

typedef struct {
  uint32x4_t a, b;
} uvec;

typedef struct {
  float64x2_t sums[4];
} squares;

#define VEC_OP static inline __attribute__((always_inline))

VEC_OP vec v_set(float x) { return (vec){vdupq_n_f32(x), vdupq_n_f32(x)}; }
VEC_OP vec v_load(const float *p) { return (vec){vld1q_f32(p), vld1q_f32(p + 4)}; }
VEC_OP void v_store(float *p, vec x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}

VEC_OP vec v_add(vec x, vec y) { return (vec){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
VEC_OP vec v_sub(vec x, vec y) { return (vec){vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
VEC_OP vec v_mul(vec x, vec y) { return (vec){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
VEC_OP vec v_div(vec x, vec y) { return (vec){vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
VEC_OP vec v_sqrt(vec x) { return (vec){vsqrtq_f32(x.a), vsqrtq_f32(x.b)}; }

/* The intrinsics have the addend first. */
VEC_OP vec v_fma(vec x, vec y, vec z) {
  return (vec){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)};
}
VEC_OP vec v_fms(vec x, vec y, vec z) {
  return (vec){vfmaq_f32(vnegq_f32(z.a), x.a, y.a), vfmaq_f32(vnegq_f32(z.b), x.b, y.b)};
}
VEC_OP vec v_fnma(vec x, vec y, vec z) {
  return (vec){vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b)};
}

/* By comparison: ARM's own minimum is NaN where either operand is. */
VEC_OP vec v_min(vec x, vec y) {
  return (vec){vbslq_f32(vcltq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcltq_f32(x.b, y.b), x.b, y.b)};
}
VEC_OP vec v_max(vec x, vec y) {
  return (vec){vbslq_f32(vcgtq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcgtq_f32(x.b, y.b), x.b, y.b)};
}

VEC_OP float32x4_t masked(uint32x4_t mask, float32x4_t x) {
  return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(x)));
}

VEC_OP vec v_zero_unless_equal(vec x, vec y, vec z) {
  return (vec){masked(vceqq_f32(y.a, z.a), x.a), masked(vceqq_f32(y.b, z.b), x.b)};
}

VEC_OP int v_all_finite(vec x) { /* x - x is 0 or NaN */
  const vec zero = v_sub(x, x);
  return vminvq_u32(vandq_u32(vceqzq_f32(zero.a), vceqzq_f32(zero.b))) != 0;
}

VEC_OP float32x4_t sign_of(float32x4_t x) {
  const float32x4_t one = vdupq_n_f32(1.0f);
  return vsubq_f32(masked(vcgtzq_f32(x), one), masked(vcltzq_f32(x), one));
}

VEC_OP vec v_sign(vec x) { return (vec){sign_of(x.a), sign_of(x.b)}; }

VEC_OP float32x4_t quiet(float32x4_t x) { return vbslq_f32(vceqq_f32(x, x), x, vdupq_n_f32(NAN)); }

VEC_OP vec v_quiet(vec x) { return (vec){quiet(x.a), quiet(x.b)}; }

VEC_OP uvec u_set(uint32_t x) { return (uvec){vdupq_n_u32(x), vdupq_n_u32(x)}; }

VEC_OP uvec u_count_from(uint32_t first) {
  static const uint32_t count[4] = {0, 1, 2, 3};
  return (uvec){vaddq_u32(vdupq_n_u32(first), vld1q_u32(count)),
                vaddq_u32(vdupq_n_u32(first + 4), vld1q_u32(count))};
}

VEC_OP uvec u_bits(vec x) { return (uvec){vreinterpretq_u32_f32(x.a), vreinterpretq_u32_f32(x.b)}; }
VEC_OP uvec u_add(uvec x, uvec y) { return (uvec){vaddq_u32(x.a, y.a), vaddq_u32(x.b, y.b)}; }
VEC_OP uvec u_mul(uvec x, uvec y) { return (uvec){vmulq_u32(x.a, y.a), vmulq_u32(x.b, y.b)}; }
VEC_OP uvec u_xor(uvec x, uvec y) { return (uvec){veorq_u32(x.a, y.a), veorq_u32(x.b, y.b)}; }
VEC_OP uvec u_and(uvec x, uvec y) { return (uvec){vandq_u32(x.a, y.a), vandq_u32(x.b, y.b)}; }
VEC_OP uvec u_shift_right(uvec x, int n) {
  const int32x4_t left = vdupq_n_s32(-n);
  return (uvec){vshlq_u32(x.a, left), vshlq_u32(x.b, left)};
}

VEC_OP vec v_load_f16(const uint16_t *p) {
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
  return (vec){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}

VEC_OP void v_store_f16(uint16_t *p, vec x) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}

VEC_OP vec v_load_bf16(const uint16_t *p) {
  const uint16x8_t halves = vld1q_u16(p);
  return (vec){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
               vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
}

VEC_OP void u_store_high(uint16_t *p, uvec x) {
  vst1q_u16(p, vshrn_high_n_u32(vshrn_n_u32(x.a, 16), x.b, 16));
}

VEC_OP squares squares_none(void) {
  const float64x2_t none = vdupq_n_f64(0.0);
  return (squares){{none, none, none, none}};
}

VEC_OP float64x2_t square_add(float64x2_t sum, float64x2_t x) { return vfmaq_f64(sum, x, x); }

VEC_OP squares squares_add(squares s, vec x) {
  return (squares){{square_add(s.sums[0], vcvt_f64_f32(vget_low_f32(x.a))),
                    square_add(s.sums[1], vcvt_high_f64_f32(x.a)),
                    square_add(s.sums[2], vcvt_f64_f32(vget_low_f32(x.b))),
                    square_add(s.sums[3], vcvt_high_f64_f32(x.b))}};
}

VEC_OP void squares_store(double *p, squares s) {
  for (int i = 0; i < 4; i++) {
    vst1q_f64(p + 2 * (ptrdiff_t)i, s.sums[i]);
  }
}
