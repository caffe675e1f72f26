/* One Adam step: the only text of the kernel. A file of isa/ includes it after a vocabulary.
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
 * this kernel. So fp32 pairs (high, low) carry what rounding loses, where it is worth most. With
 * u = 2^-24 and x = sqrt(v) / (sqrt(v) + eps), the update m / (sqrt(v) + eps) is off, relatively,
 * by
 *
 *   m              u / 7          both products and their sum exact, but for beta1's rounding
 *   v              8/7 u x        two roundings and beta2's, halved by the square root
 *   square root    u x (1 - x)    its residue is divided by the sum instead of by itself
 *   eps            u (1 - x)      rounded to fp32
 *   quotient       0              corrected by its residue
 *
 * to first order: less than 1.5 u for any x. Then the decayed parameter and the result round once
 * each, and weight decay rounds to fp32 what it takes away (fair while lr * weight_decay < 1/2).
 * Near the bottom of fp32's range moments, quotient and low parts are multiples of 2^-149; each may
 * be one such step further off.
 *
 * Where residues meet infinities they are NaN, even where the formula is not. A lane whose
 * parameter does not come out finite is therefore done again, in fp64, by zo_adam_element. */

#include <string.h>

#include "internal.h"
#include "pair.inc.h"

/* The scaled, clamped and L2-penalised gradient. */
VEC_OP pair adam_gradient(const struct zo_adam_constants *k, vec raw, vec p) {
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

typedef struct {
  vec p, m, v;
} adam_state;

/* The new moments as they are stored, and for the update the first one as an exact pair, times what
 * rounding took from the step size. */
typedef struct {
  vec m, v;
  pair m_exact;
} adam_moments;

/* For the usual hyper-parameters: no L2 penalty, no clamping, betas of 7/8 and more, so that
 * 1 - beta rounds to fp32 at little cost. The gradient's scale is part of the constants: the
 * gradient is exact as it was read, and so is its square if it is `short`, fp16 or bf16. */
VEC_OP adam_moments moments_common(const struct zo_adam_constants *k, int raw_is_short, vec raw,
                                   adam_state old) {
  const vec decayed = v_fnma(v_set(k->f32.one_minus_beta1), old.m, old.m);
  const vec decayed_low = v_fnma(v_set(k->f32.one_minus_beta1_exact), old.m, v_sub(old.m, decayed));
  const vec first = v_set(k->f32.first.high);
  const vec share = v_mul(first, raw);
  const vec share_low = v_fma(v_set(k->f32.first_rest), raw, v_fms(first, raw, share));
  const pair m = two_sum(decayed, share);

  const vec second = v_set(k->f32.second.high);
  const vec square = v_mul(raw, raw);
  vec v = v_fnma(v_set(k->f32.one_minus_beta2), old.v, old.v);
  if (!raw_is_short) {
    v = v_fma(second, v_fms(raw, raw, square), v);
  }
  v = v_fma(second, square, v);
  return (adam_moments){v_fma(v_set(k->f32.first.low), raw, m.high),
                        v,
                        {m.high, v_add(m.low, v_add(decayed_low, share_low))}};
}

/* For all others. */
VEC_OP adam_moments moments_general(const struct zo_adam_constants *k, vec raw, adam_state old) {
  const pair a = adam_gradient(k, raw, old.p);
  const pair first = pair_set(k->f32.first);
  const pair decayed = pair_mul(pair_set(k->f32.beta1), old.m);
  const pair share = pair_mul(first, a.high);
  const pair m = two_sum(decayed.high, share.high);
  const vec low = v_add(v_fma(first.high, a.low, v_add(decayed.low, share.low)), m.low);

  const pair beta2 = pair_set(k->f32.beta2);
  const pair c_a = pair_mul(pair_set(k->f32.second), a.high); /* (1 - beta2) a, to times by a */
  vec small = v_fma(c_a.low, a.high, v_mul(beta2.low, old.v));
  small = v_fma(v_add(c_a.high, c_a.high), a.low, small);
  const vec v = v_fma(c_a.high, a.high, v_fma(beta2.high, old.v, small));
  return (adam_moments){
      v_add(m.high, low), v, {m.high, v_fma(v_set(k->f32.step_size_residue), m.high, low)}};
}

/* The step on one register of elements. */
VEC_OP adam_state adam_lanes(const struct zo_adam_constants *k, int common, int raw_is_short,
                             vec raw, adam_state old) {
  const adam_moments new =
      common ? moments_common(k, raw_is_short, raw, old) : moments_general(k, raw, old);
  const vec root = v_sqrt(new.v);
  const pair sum = two_sum(root, v_set(k->f32.eps));
  const vec inverse = v_div(v_set(1.0f), sum.high);
  const vec q = v_mul(new.m_exact.high, inverse);

  const vec twice_root_residue = v_mul(v_fnma(root, root, new.v), inverse);
  const vec sum_low = v_fma(v_set(0.5f), twice_root_residue, sum.low);
  const vec residue = v_add(v_fnma(q, sum.high, new.m_exact.high), new.m_exact.low);
  const vec small_q = v_mul(v_fnma(q, sum_low, residue), inverse);

  const vec step_size = v_set(k->f32.step_size);
  const vec small_p = v_fnma(step_size, small_q, v_mul(v_set(k->f32.minus_decay), old.p));
  return (adam_state){v_fnma(step_size, q, v_add(old.p, small_p)), new.m, new.v};
}

VEC_OP adam_state adam_load(const float *master, const float *exp_avg, const float *exp_avg_sq) {
  return (adam_state){v_load(master), v_load(exp_avg), v_load(exp_avg_sq)};
}

VEC_OP void adam_store(adam_state new, float *master, float *exp_avg, float *exp_avg_sq) {
  v_store(master, new.p);
  v_store(exp_avg, new.m);
  v_store(exp_avg_sq, new.v);
}

/* Puts the lanes whose parameter is not finite right; the old state is still in memory. */
static __attribute__((noinline)) adam_state adam_repair(const struct zo_adam_constants *k, vec raw,
                                                        adam_state new, const float *master,
                                                        const float *exp_avg,
                                                        const float *exp_avg_sq) {
  float gradient[LANES], p[LANES], m[LANES], v[LANES];
  v_store(gradient, raw);
  adam_store(new, p, m, v);
  for (int i = 0; i < LANES; i++) {
    if (p[i] - p[i] != 0.0f) {
      p[i] = master[i];
      m[i] = exp_avg[i];
      v[i] = exp_avg_sq[i];
      zo_adam_element(k, gradient[i], &p[i], &m[i], &v[i]);
    }
  }
  return adam_load(p, m, v);
}

VEC_OP void adam_block(const struct zo_adam_constants *k, int common, enum zo_dtype dtype,
                       float *master, float *exp_avg, float *exp_avg_sq, void *exchange) {
  const vec raw = load_exchange(exchange, dtype);
  adam_state new =
      adam_lanes(k, common, dtype != ZO_F32, raw, adam_load(master, exp_avg, exp_avg_sq));
  if (__builtin_expect(!v_all_finite(new.p), 0)) {
    new = adam_repair(k, raw, new, master, exp_avg, exp_avg_sq);
  }
  adam_store(new, master, exp_avg, exp_avg_sq);
  store_exchange(exchange, dtype, new.p);
}

VEC_OP void adam_range(const struct zo_adam_constants *k, int common, enum zo_dtype dtype,
                       int64_t n, float *master, float *exp_avg, float *exp_avg_sq,
                       void *exchange) {
  const int64_t size = (int64_t)zo_size_of(dtype);
  char *bytes = exchange;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    adam_block(k, common, dtype, master + i, exp_avg + i, exp_avg_sq + i, bytes + i * size);
  }
  if (i < n) { /* the tail: the same block on copies padded with zeros */
    const size_t rest = (size_t)(n - i);
    float tail[4][LANES] = {{0}};
    memcpy(tail[0], master + i, rest * sizeof(float));
    memcpy(tail[1], exp_avg + i, rest * sizeof(float));
    memcpy(tail[2], exp_avg_sq + i, rest * sizeof(float));
    memcpy(tail[3], bytes + i * size, rest * (size_t)size);
    adam_block(k, common, dtype, tail[0], tail[1], tail[2], tail[3]);
    memcpy(master + i, tail[0], rest * sizeof(float));
    memcpy(exp_avg + i, tail[1], rest * sizeof(float));
    memcpy(exp_avg_sq + i, tail[2], rest * sizeof(float));
    memcpy(bytes + i * size, tail[3], rest * (size_t)size);
  }
}

#define ADAM_FOR(name, dtype)                                                                      \
  static void name(const struct zo_adam_constants *k, int64_t n, float *master, float *exp_avg,    \
                   float *exp_avg_sq, void *exchange) {                                            \
    if (k->common) {                                                                               \
      adam_range(k, 1, dtype, n, master, exp_avg, exp_avg_sq, exchange);                           \
    } else {                                                                                       \
      adam_range(k, 0, dtype, n, master, exp_avg, exp_avg_sq, exchange);                           \
    }                                                                                              \
  }

ADAM_FOR(adam_f16, ZO_F16)
ADAM_FOR(adam_bf16, ZO_BF16)
ADAM_FOR(adam_f32, ZO_F32)
