/* One step of Adam: the only text of the kernel.
 *
 * With a = gradient * scale, clamped (and + l2 * p), all of it for each element:
 *
 *   m = beta1 m + (1 - beta1) a            v = beta2 v + (1 - beta2) a^2
 *   p = decay p - step_size m / (sqrt(v) + eps)
 *
 * which is torch.optim.Adam(W)'s formula with the bias corrections folded into the constants:
 * step_size = lr sqrt(1 - beta2^t) / (1 - beta1^t), eps = the given one * sqrt(1 - beta2^t).
 *
 * Every result is within 2 ulp of that formula computed exactly, or 2 ulp of the larger term where
 * terms cancel. A plain fp32 chain is not; fp64 would cost more than the memory traffic that bounds
 * this kernel. So fp32 pairs (high, low) carry what rounding loses, where it is worth most: m is
 * off by u / 7 (both products and their sum are exact, but for beta1's rounding), v by two
 * roundings and beta2's, 16/7 u; with the quotient's (see descend_by_root) less than 1.5 u for any
 * x. */
#pragma once

#include "gradient.inc.h"

/* The new moments as they are stored, and for the update the first one as an exact pair, times what
 * rounding took from the step size. */
typedef struct {
  vec m, v;
  pair m_exact;
} adam_moments;

/* For the usual hyper-parameters: no L2 penalty, no clamping, betas of 7/8 and more, so that
 * 1 - beta rounds to fp32 at little cost. The gradient's scale is part of the constants: the
 * gradient is exact as it was read, and so is its square if it is `short`, fp16 or bf16. */
VEC_OP adam_moments moments_common(const struct zo_constants *k, int raw_is_short, vec raw,
                                   lanes old) {
  const vec old_m = old.s0, old_v = old.s1;
  const vec decayed = v_fnma(v_set(k->f32.one_minus_beta1), old_m, old_m);
  const vec decayed_low = v_fnma(v_set(k->f32.one_minus_beta1_exact), old_m, v_sub(old_m, decayed));
  const vec first = v_set(k->f32.first.high);
  const vec share = v_mul(first, raw);
  const vec share_low = v_fma(v_set(k->f32.first_rest), raw, v_fms(first, raw, share));
  const pair m = two_sum(decayed, share);

  const vec second = v_set(k->f32.second.high);
  const vec square = v_mul(raw, raw);
  vec v = v_fnma(v_set(k->f32.one_minus_beta2), old_v, old_v);
  if (!raw_is_short) {
    v = v_fma(second, v_fms(raw, raw, square), v);
  }
  v = v_fma(second, square, v);
  return (adam_moments){v_fma(v_set(k->f32.first.low), raw, m.high),
                        v,
                        {m.high, v_add(m.low, v_add(decayed_low, share_low))}};
}

/* For all others. */
VEC_OP adam_moments moments_general(const struct zo_constants *k, vec raw, lanes old) {
  const pair a = gradient_of(k, raw, old.p);
  const pair m = pair_combine(pair_set(k->f32.beta1), old.s0, pair_set(k->f32.first), a);

  const pair beta2 = pair_set(k->f32.beta2);
  const pair c_a = pair_mul(pair_set(k->f32.second), a.high); /* (1 - beta2) a, to times by a */
  vec small = v_fma(c_a.low, a.high, v_mul(beta2.low, old.s1));
  small = v_fma(v_add(c_a.high, c_a.high), a.low, small);
  const vec v = v_fma(c_a.high, a.high, v_fma(beta2.high, old.s1, small));
  return (adam_moments){
      v_add(m.high, m.low), v, {m.high, v_fma(v_set(k->f32.step_size_residue), m.high, m.low)}};
}

VEC_OP lanes adam_lanes(const struct zo_constants *k, enum zo_rule rule, int raw_is_short, vec raw,
                        lanes old) {
  const adam_moments new = rule == ZO_ADAM_COMMON ? moments_common(k, raw_is_short, raw, old)
                                                  : moments_general(k, raw, old);
  /* If v is NaN it is the maximum. */
  const vec largest = rule == ZO_AMSGRAD ? v_max(old.s2, new.v) : new.v;
  const vec p = descend_by_root(k, old.p, new.m_exact, largest);
  return (lanes){.p = p, .s0 = new.m, .s1 = new.v, .s2 = largest, .check = p};
}
