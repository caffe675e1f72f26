/* Access to buffers of any dtype, on any vocabulary. */
#pragma once

#include "internal.h"

VEC_OP vec load_as(enum zo_dtype dtype, const void *p) {
  switch (dtype) {
  case ZO_F16:
    return v_load_f16(p);
  case ZO_BF16:
    return v_load_bf16(p);
  default:
    return v_load(p);
  }
}

/* To nearest even, by integers: AVX-512's own instruction flushes subnormal numbers. A NaN must be
 * the one of v_quiet: it becomes 0x7FC0, as in torch. */
VEC_OP void store_bf16(uint16_t *p, vec x) {
  const uvec bits = u_bits(x);
  const uvec odd = u_and(u_shift_right(bits, 16), u_set(1));
  u_store_high(p, u_add(bits, u_add(odd, u_set(0x7FFF))));
}

VEC_OP void store_as(enum zo_dtype dtype, void *p, vec x) {
  switch (dtype) {
  case ZO_F16:
    v_store_f16(p, x);
    break;
  case ZO_BF16:
    store_bf16(p, x);
    break;
  default:
    v_store(p, x);
  }
}
