/* Exact sums and products as pairs of fp32, and access to the exchange buffer, on any vocabulary.
 */
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
