/* Exact sums and products as pairs of fp32, on any vocabulary. */
#pragma once

#include "internal.h"

/* Numbers known more exactly than fp32 tells: high + low. */
typedef struct {
  vec high, low;
} pair;

VEC_OP pair pair_set(struct zo_pair x) { return (pair){v_set(x.high), v_set(x.low)}; }

/* c * x. */
VEC_OP pair pair_mul(pair c, vec x) {
  const vec high = v_mul(c.high, x);
  return (pair){high, v_fma(c.low, x, v_fms(c.high, x, high))};
}

/* x + y: the sum rounded, and exactly what the rounding lost (Knuth). */
VEC_OP pair two_sum(vec x, vec y) {
  const vec high = v_add(x, y);
  const vec y_share = v_sub(high, x);
  const vec x_share = v_sub(high, y_share);
  return (pair){high, v_add(v_sub(x, x_share), v_sub(y, y_share))};
}

/* c * x + d * y. Where the terms cancel the low part may be as large as the high one. */
VEC_OP pair pair_combine(pair c, vec x, pair d, pair y) {
  const pair a = pair_mul(c, x);
  const pair b = pair_mul(d, y.high);
  const pair sum = two_sum(a.high, b.high);
  return (pair){sum.high, v_add(v_fma(d.high, y.low, v_add(a.low, b.low)), sum.low)};
}
