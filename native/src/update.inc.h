/* The fused pass: gradient in, new parameter out, in the same bytes. A file of isa/ includes it
 * after a vocabulary. */
#pragma once

#include <string.h>

#include "access.inc.h"
#include "adam.inc.h"
#include "others.inc.h"
#include "random.inc.h"

/* What a kernel is compiled for. */
struct variant {
  enum zo_rule rule;
  enum zo_dtype exchange, state;
};

/* Where a register of elements lies. */
struct place {
  float *master;
  char *state[3];
  char *exchange;
};

VEC_OP lanes lanes_of(struct variant of, vec raw, lanes old, const struct zo_constants *k) {
  switch (of.rule) {
  case ZO_SGD:
  case ZO_MOMENTUM:
    return sgd_lanes(k, of.rule, raw, old);
  case ZO_ADAGRAD:
    return adagrad_lanes(k, raw, old);
  case ZO_LION:
    return lion_lanes(k, raw, old);
  default:
    return adam_lanes(k, of.rule, of.exchange != ZO_F32, raw, old);
  }
}

VEC_OP lanes load_lanes(struct variant of, struct place at) {
  lanes x = {.p = v_load(at.master)};
  const int states = zo_state_count(of.rule);
  if (states > 0) {
    x.s0 = load_as(of.state, at.state[0]);
  }
  if (states > 1) {
    x.s1 = load_as(of.state, at.state[1]);
  }
  if (states > 2) {
    x.s2 = load_as(of.state, at.state[2]);
  }
  return x;
}

/* Each state takes 16 bits of its own of the random number. */
VEC_OP void store_lanes(struct variant of, struct place at, lanes x, uvec random) {
  const int states = zo_state_count(of.rule);
  v_store(at.master, x.p);
  store_as(of.exchange, at.exchange, x.p);
  if (of.state == ZO_BF16) {
    const uvec low = u_set(0xFFFF);
    if (states > 0) {
      store_bf16_stochastic((uint16_t *)at.state[0], x.s0, u_and(random, low));
    }
    if (states > 1) {
      store_bf16_stochastic((uint16_t *)at.state[1], x.s1, u_shift_right(random, 16));
    }
    if (states > 2) {
      const uvec third = u_shift_right(u_mul(random, u_set(0x9E3779B1)), 16);
      store_bf16_stochastic((uint16_t *)at.state[2], x.s2, third);
    }
    return;
  }
  if (states > 0) {
    v_store((float *)at.state[0], x.s0);
  }
  if (states > 1) {
    v_store((float *)at.state[1], x.s1);
  }
  if (states > 2) {
    v_store((float *)at.state[2], x.s2);
  }
}

/* The elements of one register in memory, for code that is not inlined. */
struct stored_lanes {
  float p[LANES], s0[LANES], s1[LANES], s2[LANES];
};

VEC_OP void spill(struct stored_lanes *to, lanes x) {
  v_store(to->p, x.p);
  v_store(to->s0, x.s0);
  v_store(to->s1, x.s1);
  v_store(to->s2, x.s2);
}

static __attribute__((noinline)) void redo(const struct zo_constants *k, const float *gradient,
                                           const float *check, const struct stored_lanes *old,
                                           struct stored_lanes *new) {
  for (int i = 0; i < LANES; i++) {
    if (check[i] - check[i] != 0.0f) {
      float state[3] = {old->s0[i], old->s1[i], old->s2[i]};
      new->p[i] = old->p[i];
      zo_update_element(k, gradient[i], &new->p[i], state);
      new->s0[i] = state[0];
      new->s1[i] = state[1];
      new->s2[i] = state[2];
    }
  }
}

/* Puts the lanes right whose check is not finite; the old ones are still in memory. */
VEC_OP lanes repair(struct variant of, const struct zo_constants *k, struct place at, lanes new) {
  float gradient[LANES], check[LANES];
  struct stored_lanes before, after;
  v_store(gradient, load_as(of.exchange, at.exchange));
  v_store(check, new.check);
  spill(&before, load_lanes(of, at));
  spill(&after, new);
  redo(k, gradient, check, &before, &after);
  new.p = v_load(after.p);
  new.s0 = v_load(after.s0);
  new.s1 = v_load(after.s1);
  new.s2 = v_load(after.s2);
  return new;
}

/* `own` is a copy of the constants that nothing else can reach: the compiler need not read it again
 * after each store. */
VEC_OP void update_block(struct variant of, const struct zo_constants *k,
                         const struct zo_constants *own, struct place at, const uint32_t keys[2],
                         uint32_t number) {
  const vec raw = load_as(of.exchange, at.exchange);
  lanes new = lanes_of(of, raw, load_lanes(of, at), own);
  if (__builtin_expect(!v_all_finite(new.check), 0)) {
    new = repair(of, k, at, new);
  }
  const uvec random = of.state == ZO_BF16 ? random_bits(keys, u_count_from(number)) : u_set(0);
  store_lanes(of, at, new, random);
}

VEC_OP void copy_rest(void *to, const void *from, int64_t n, size_t size) {
  memcpy(to, from, (size_t)n * size);
}

/* The last few elements: the same block on copies padded with zeros. */
VEC_OP void update_tail(struct variant of, const struct zo_constants *k, struct place at, int64_t n,
                        const uint32_t keys[2], uint32_t number) {
  const int states = zo_state_count(of.rule);
  float master[LANES] = {0}, exchange[LANES] = {0}, state[3][LANES] = {{0}};
  copy_rest(master, at.master, n, sizeof(float));
  copy_rest(exchange, at.exchange, n, zo_size_of(of.exchange));
  for (int j = 0; j < states; j++) {
    copy_rest(state[j], at.state[j], n, zo_size_of(of.state));
  }
  const struct place copies = {
      master, {(char *)state[0], (char *)state[1], (char *)state[2]}, (char *)exchange};
  update_block(of, k, k, copies, keys, number);
  copy_rest(at.master, master, n, sizeof(float));
  copy_rest(at.exchange, exchange, n, zo_size_of(of.exchange));
  for (int j = 0; j < states; j++) {
    copy_rest(at.state[j], state[j], n, zo_size_of(of.state));
  }
}

VEC_OP struct place place_at(struct variant of, const struct zo_slice *slice, int64_t i) {
  const int states = zo_state_count(of.rule);
  const size_t state_bytes = (size_t)i * zo_size_of(of.state);
  struct place at = {.master = slice->master + i,
                     .exchange = (char *)slice->exchange + (size_t)i * zo_size_of(of.exchange)};
  for (int j = 0; j < states; j++) {
    at.state[j] = (char *)slice->state[j] + state_bytes;
  }
  return at;
}

VEC_OP void update_slice(struct variant of, const struct zo_constants *k,
                         const struct zo_slice *slice) {
  const struct zo_constants own = *k;
  int64_t i = 0;
  for (; i + LANES <= slice->n; i += LANES) {
    update_block(of, k, &own, place_at(of, slice, i), slice->keys, slice->first + (uint32_t)i);
  }
  if (i < slice->n) {
    update_tail(of, k, place_at(of, slice, i), slice->n - i, slice->keys,
                slice->first + (uint32_t)i);
  }
}

#define UPDATE_FOR(name, rule, exchange, state)                                                    \
  static void name(const struct zo_constants *k, const struct zo_slice *slice) {                   \
    update_slice((struct variant){rule, exchange, state}, k, slice);                               \
  }

#define UPDATES_FOR(name, rule)                                                                    \
  UPDATE_FOR(name##_f16_f32, rule, ZO_F16, ZO_F32)                                                 \
  UPDATE_FOR(name##_bf16_f32, rule, ZO_BF16, ZO_F32)                                               \
  UPDATE_FOR(name##_f32_f32, rule, ZO_F32, ZO_F32)                                                 \
  UPDATE_FOR(name##_f16_bf16, rule, ZO_F16, ZO_BF16)                                               \
  UPDATE_FOR(name##_bf16_bf16, rule, ZO_BF16, ZO_BF16)                                             \
  UPDATE_FOR(name##_f32_bf16, rule, ZO_F32, ZO_BF16)

UPDATES_FOR(adam_common, ZO_ADAM_COMMON)
UPDATES_FOR(adam, ZO_ADAM)
UPDATES_FOR(amsgrad, ZO_AMSGRAD)
UPDATES_FOR(sgd, ZO_SGD)
UPDATES_FOR(momentum, ZO_MOMENTUM)
UPDATES_FOR(adagrad, ZO_ADAGRAD)
UPDATES_FOR(lion, ZO_LION)

/* By exchange dtype, then by state dtype: fp32, bf16. */
#define UPDATE_TABLE(name)                                                                         \
  {                                                                                                \
    {name##_f16_f32, name##_f16_bf16}, {name##_bf16_f32, name##_bf16_bf16}, {                      \
      name##_f32_f32, name##_f32_bf16                                                              \
    }                                                                                              \
  }
