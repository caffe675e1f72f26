/* Random numbers for stochastic rounding: a function of key and counter, so that they don't depend
 * on the order in which elements are done. */
#pragma once

#include "internal.h"

/* 32 random bits for each counter: multiplications spread a bit upwards, xor-shifts downwards (the
 * constants are those of https://github.com/skeeto/hash-prospector), a key before each round. */
VEC_OP uvec random_bits(const uint32_t keys[2], uvec counter) {
  uvec x = u_mul(u_xor(counter, u_set(keys[0])), u_set(0x21F0AAAD));
  x = u_xor(x, u_set(keys[1]));
  x = u_xor(x, u_shift_right(x, 15));
  x = u_mul(x, u_set(0x735A2D97));
  return u_xor(x, u_shift_right(x, 15));
}

/* bf16, rounded up where `random`, in [0, 2^16), exceeds what is missing to the next number: the
 * mean is exact. Infinity and the NaN of v_quiet stay what they are. */
VEC_OP void store_bf16_stochastic(uint16_t *p, vec x, uvec random) {
  u_store_high(p, u_add(u_bits(x), random));
}
