/* What all rules share: the elements they work on, and the gradient they start from. */
#pragma once

#include "pair.inc.h"

/* One register of elements: parameter and state. `check` is finite unless the formula is done again
 * in fp64 (see update.inc.h): where residues meet infinities they are NaN, even where the formula
 * is not. */
typedef struct {
  vec p, s0, s1, s2, check;
} lanes;

/* The scaled, clamped and L2-penalised gradient. */
VEC_OP pair gradient_of(const struct zo_constants *k, vec raw, vec p) {
  pair a = pair_mul(pair_set(k->f32.scale), raw);
  const vec limit = v_set(k->f32.clip);
  const vec clamped = v_max(v_sub(v_set(0.0f), limit), v_min(limit, a.high));
  a = (pair){clamped, v_zero_unless_equal(a.low, clamped, a.high)};
  if (k->l2 == 0.0) {
    return a;
  }
  const pair penalty = pair_mul(pair_set(k->f32.l2), p);
  const pair sum = two_sum(a.high, penalty.high);
  /* Where the two cancel the low part may be as large as the high one: divide them anew. */
  return two_sum(sum.high, v_add(sum.low, v_add(a.low, penalty.low)));
}

/* decay p - step_size numerator / (sqrt(v) + eps). The numerator is an exact pair, times what
 * rounding took from the step size. With u = 2^-24 and x = sqrt(v) / (sqrt(v) + eps), the quotient
 * is off, relatively, by
 *
 *   v              its error, times x / 2
 *   square root    u x (1 - x)    its residue is divided by the sum instead of by itself
 *   eps            u (1 - x)      rounded to fp32
 *   quotient       0              corrected by its residue
 *
 * to first order. Then the decayed parameter and the result round once each, and weight decay
 * rounds to fp32 what it takes away (fair while lr * weight_decay < 1/2). Near the bottom of fp32's
 * range quotient and low parts are multiples of 2^-149; each may be one such step further off. */
VEC_OP vec descend_by_root(const struct zo_constants *k, vec p, pair numerator, vec v) {
  const vec root = v_sqrt(v);
  const pair sum = two_sum(root, v_set(k->f32.eps));
  const vec inverse = v_div(v_set(1.0f), sum.high);
  const vec q = v_mul(numerator.high, inverse);

  const vec twice_root_residue = v_mul(v_fnma(root, root, v), inverse);
  const vec sum_low = v_fma(v_set(0.5f), twice_root_residue, sum.low);
  const vec residue = v_add(v_fnma(q, sum.high, numerator.high), numerator.low);
  const vec small_q = v_mul(v_fnma(q, sum_low, residue), inverse);

  const vec step_size = v_set(k->f32.step_size.high);
  const vec small_p = v_fnma(step_size, small_q, v_mul(v_set(k->f32.minus_decay), p));
  return v_fnma(step_size, q, v_add(p, small_p));
}

/* decay p - step_size d. */
VEC_OP vec descend(const struct zo_constants *k, vec p, pair d) {
  const pair step_size = pair_set(k->f32.step_size);
  const vec small = v_fma(step_size.low, d.high,
                          v_fnma(v_set(k->f32.minus_decay), p, v_mul(step_size.high, d.low)));
  return v_fnma(step_size.high, d.high, v_sub(p, small));
}
