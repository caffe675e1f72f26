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
 * Every result is within 2 ulp of that formula computed exactly. The kernel is bound by memory, so
 * fp32 pairs (high, low) buy accuracy where a plain fp32 chain would lose it. With u = 2^-24 and
 * x = sqrt(v) / (sqrt(v) + eps), the relative error of the update m / (sqrt(v) + eps) is
 *
 *   m                      0                  its low part is kept (two products, exact sum)
 *   v                      2u / 2 * x         two roundings, halved by the square root
 *   square root            u x (1 - x)        its residue is divided by the sum instead of itself
 *   sqrt(v) + eps          u min(x, 1 - x)    in the first step of the quotient's residue
 *   quotient               0                  corrected by its residue
 *
 * to first order in u: at most 1.25 u. The decayed parameter and the result round once more each.
 * Below fp32's normal range m, v and the quotient are multiples of 2^-149, as in any fp32 code.
 *
 * Where exact residues meet infinities they are NaN, where the formula need not be. A lane whose
 * parameter does not come out finite is therefore done again, in fp64, by zo_adam_element. */

#include <string.h>

#include "internal.h"

VEC_OP vec load_exchange(const void *exchange, enum zo_dtype dtype) {
  switch (dtype) {
  case ZO_F16:
    return v_load_f16(exchange);
  case ZO_BF16:
    return v_load_bf16(exchange);
  default:
    return v_load(exchange);
  }
}

VEC_OP void store_exchange(void *exchange, enum zo_dtype dtype, vec x) {
  switch (dtype) {
  case ZO_F16:
    v_store_f16(exchange, x);
    break;
  case ZO_BF16:
    v_store_bf16(exchange, x);
    break;
  default:
    v_store(exchange, x);
  }
}

/* Numbers known more exactly than fp32 tells: high + low. */
typedef struct {
  vec high, low;
} pair;

VEC_OP pair pair_set(struct zo_pair x) { return (pair){v_set(x.high), v_set(x.low)}; }

/* c * x, with its rounding error and the constant's low part in the low part. */
VEC_OP pair pair_mul(pair c, vec x) {
  const vec high = v_mul(c.high, x);
  return (pair){high, v_fma(c.low, x, v_fms(c.high, x, high))};
}

/* c * x + y: one rounding in the high part, and what it lost in the low part (Knuth's sum, in which
 * the product need not be rounded first). */
VEC_OP pair pair_fma(pair c, vec x, pair y) {
  const vec high = v_fma(c.high, x, y.high);
  const vec x_share = v_sub(high, y.high);
  const vec y_share = v_sub(high, x_share);
  const vec lost = v_add(v_fms(c.high, x, x_share), v_sub(y.high, y_share));
  return (pair){high, v_add(v_fma(c.low, x, y.low), lost)};
}

/* The scaled, clamped and L2-penalised gradient. */
VEC_OP pair adam_gradient(const struct zo_adam_constants *k, vec raw, vec p) {
  pair a = pair_mul(pair_set(k->f32.scale), raw);
  const vec limit = v_set(k->f32.clip);
  const vec clamped = v_max(v_sub(v_set(0.0f), limit), v_min(limit, a.high));
  a = (pair){clamped, v_zero_unless_equal(a.low, clamped, a.high)};
  return k->l2 == 0.0 ? a : pair_fma(pair_set(k->f32.l2), p, a);
}

typedef struct {
  vec p, m, v;
} adam_state;

/* The step on one register of elements. `folded`: the scale is part of the constants, so that the
 * gradient is exact as it was read. */
VEC_OP adam_state adam_lanes(const struct zo_adam_constants *k, int folded, vec raw,
                             adam_state old) {
  adam_state new;
  const pair a = folded ? (pair){raw, raw} : adam_gradient(k, raw, old.p);

  pair m = pair_fma(pair_set(k->f32.first), a.high, pair_mul(pair_set(k->f32.beta1), old.m));
  if (!folded) {
    m.low = v_fma(v_set(k->f32.first.high), a.low, m.low);
  }
  new.m = v_add(m.high, m.low);

  const pair beta2 = pair_set(k->f32.beta2);
  const pair c_a = pair_mul(pair_set(k->f32.second), a.high); /* (1 - beta2) a, to times by a */
  vec small_v = v_fma(c_a.low, a.high, v_mul(beta2.low, old.v));
  if (!folded) {
    small_v = v_fma(v_add(c_a.high, c_a.high), a.low, small_v);
  }
  new.v = v_fma(c_a.high, a.high, v_fma(beta2.high, old.v, small_v));

  const pair eps = pair_set(k->f32.eps);
  const vec root = v_sqrt(new.v);
  const vec inverse = v_div(v_set(1.0f), v_add(root, eps.high));
  const vec q = v_mul(m.high, inverse);

  /* residue = m - q (root + root_residue + eps), the larger product first: it cancels most. */
  const vec twice_root_residue = v_mul(v_fnma(root, root, new.v), inverse);
  vec residue = v_fnma(q, v_max(root, eps.high), m.high);
  residue = v_fnma(q, v_min(root, eps.high), residue);
  residue = v_add(v_fnma(q, eps.low, residue), m.low);
  residue = v_fnma(v_mul(v_set(0.5f), q), twice_root_residue, residue);
  const vec small_q = v_fma(residue, inverse, v_mul(v_set(k->f32.step_size_residue), q));

  const pair decay = pair_set(k->f32.decay);
  const vec step_size = v_set(k->f32.step_size);
  const vec small_p = v_fnma(step_size, small_q, v_mul(decay.low, old.p));
  new.p = v_fnma(step_size, q, v_fma(decay.high, old.p, small_p));
  return new;
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

VEC_OP void adam_block(const struct zo_adam_constants *k, int folded, enum zo_dtype dtype,
                       float *master, float *exp_avg, float *exp_avg_sq, void *exchange) {
  const vec raw = load_exchange(exchange, dtype);
  adam_state new = adam_lanes(k, folded, raw, adam_load(master, exp_avg, exp_avg_sq));
  if (__builtin_expect(!v_all_finite(new.p), 0)) {
    new = adam_repair(k, raw, new, master, exp_avg, exp_avg_sq);
  }
  adam_store(new, master, exp_avg, exp_avg_sq);
  store_exchange(exchange, dtype, new.p);
}

enum { CACHE_LINE_FLOATS = 16, PREFETCH_AHEAD = 256 };

VEC_OP void adam_range(const struct zo_adam_constants *k, int folded, enum zo_dtype dtype,
                       int64_t n, float *master, float *exp_avg, float *exp_avg_sq,
                       void *exchange) {
  const int64_t size = (int64_t)zo_size_of(dtype);
  char *bytes = exchange;
  int64_t i = 0;
  for (; i + CACHE_LINE_FLOATS <= n; i += CACHE_LINE_FLOATS) {
    /* Four streams and a long dependency chain: the hardware alone does not run far enough ahead.
     * Addresses beyond the end are harmless. */
    __builtin_prefetch(master + i + PREFETCH_AHEAD, 1);
    __builtin_prefetch(exp_avg + i + PREFETCH_AHEAD, 1);
    __builtin_prefetch(exp_avg_sq + i + PREFETCH_AHEAD, 1);
    __builtin_prefetch(bytes + (i + PREFETCH_AHEAD) * size, 1);
    for (int64_t j = i; j < i + CACHE_LINE_FLOATS; j += LANES) {
      adam_block(k, folded, dtype, master + j, exp_avg + j, exp_avg_sq + j, bytes + j * size);
    }
  }
  for (; i < n; i += LANES) { /* the tail: the same block on copies padded with zeros */
    const size_t rest = (size_t)(n - i < LANES ? n - i : LANES);
    float tail[4][LANES] = {{0}};
    memcpy(tail[0], master + i, rest * sizeof(float));
    memcpy(tail[1], exp_avg + i, rest * sizeof(float));
    memcpy(tail[2], exp_avg_sq + i, rest * sizeof(float));
    memcpy(tail[3], bytes + i * size, rest * (size_t)size);
    adam_block(k, folded, dtype, tail[0], tail[1], tail[2], tail[3]);
    memcpy(master + i, tail[0], rest * sizeof(float));
    memcpy(exp_avg + i, tail[1], rest * sizeof(float));
    memcpy(exp_avg_sq + i, tail[2], rest * sizeof(float));
    memcpy(bytes + i * size, tail[3], rest * (size_t)size);
  }
}

#define ADAM_FOR(name, dtype)                                                                      \
  static void name(const struct zo_adam_constants *k, int64_t n, float *master, float *exp_avg,    \
                   float *exp_avg_sq, void *exchange) {                                            \
    if (k->folded) {                                                                               \
      adam_range(k, 1, dtype, n, master, exp_avg, exp_avg_sq, exchange);                           \
    } else {                                                                                       \
      adam_range(k, 0, dtype, n, master, exp_avg, exp_avg_sq, exchange);                           \
    }                                                                                              \
  }

ADAM_FOR(adam_f16, ZO_F16)
ADAM_FOR(adam_bf16, ZO_BF16)
ADAM_FOR(adam_f32, ZO_F32)
