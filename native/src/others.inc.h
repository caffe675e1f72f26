/* One step of SGD, Adagrad and Lion: the only texts of these kernels. Gradient, products and sums
 * are exact pairs, so that every result is within 2 ulp of its formula computed exactly, or 2 ulp
 * of the larger term where terms cancel. */
#pragma once

#include "gradient.inc.h"

/* torch.optim.SGD, with a as in adam.inc.h:
 *
 *   b = momentum b + (1 - dampening) a          (step 1: b = a)
 *   p = p - lr d,    d = a + momentum b if nesterov, else b; a without momentum */
VEC_OP lanes sgd_lanes(const struct zo_constants *k, enum zo_rule rule, vec raw, lanes old) {
  const pair a = gradient_of(k, raw, old.p);
  if (rule == ZO_SGD) {
    const vec p = descend(k, old.p, a);
    return (lanes){.p = p, .check = p};
  }
  const pair b = pair_combine(pair_set(k->f32.beta1), old.s0, pair_set(k->f32.first), a);
  pair d = b;
  if (k->nesterov) {
    const pair momentum = pair_set(k->f32.second);
    const pair ahead = pair_mul(momentum, b.high);
    const pair sum = two_sum(a.high, ahead.high);
    d = (pair){sum.high, v_add(sum.low, v_add(a.low, v_fma(momentum.high, b.low, ahead.low)))};
  }
  const vec p = descend(k, old.p, d);
  return (lanes){.p = p, .s0 = v_add(b.high, b.low), .check = p};
}

/* torch.optim.Adagrad: s = s + a^2, p = p - lr / (1 + (step - 1) lr_decay) a / (sqrt(s) + eps). */
VEC_OP lanes adagrad_lanes(const struct zo_constants *k, vec raw, lanes old) {
  const pair a = gradient_of(k, raw, old.p);
  const vec twice_low = v_mul(v_add(a.low, a.low), a.high);
  const vec s = v_fma(a.high, a.high, v_add(old.s0, twice_low));
  const pair numerator = {a.high, v_fma(v_set(k->f32.step_size_residue), a.high, a.low)};
  const vec p = descend_by_root(k, old.p, numerator, s);
  return (lanes){.p = p, .s0 = s, .check = p};
}

/* Lion: p = decay p - lr sign(beta1 m + (1 - beta1) a), m = beta2 m + (1 - beta2) a. The sign is
 * that of the exact sum unless its terms cancel to 2^-45 of their size. */
VEC_OP lanes lion_lanes(const struct zo_constants *k, vec raw, lanes old) {
  const pair a = gradient_of(k, raw, old.p);
  const pair c = pair_combine(pair_set(k->f32.beta1), old.s0, pair_set(k->f32.first), a);
  const pair m = pair_combine(pair_set(k->f32.beta2), old.s0, pair_set(k->f32.second), a);
  const pair direction = {v_sign(v_add(c.high, c.low)), v_set(0.0f)};
  const vec p = descend(k, old.p, direction);
  return (lanes){.p = p, .s0 = v_add(m.high, m.low), .check = v_add(p, v_add(c.low, m.low))};
}
