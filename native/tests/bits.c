/* Runs every kernel on every instruction set of this build and CPU, with one and more threads, on
 * numbers made from integers. Prints a line with a hash of the results for each case, the same on
 * every machine, and fails if an instruction set or a number of threads changes a bit.
 *
 * Built by the target `bits` of CMakeLists.txt; tests/native/test_c.py runs it under sanitizers and
 * for other CPUs, and compares what it prints. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/internal.h"

enum { LENGTH = 3 * ZO_TILE + 1237, SEGMENT_COUNT = 9 };

static const char *const dtype_names[ZO_DTYPE_COUNT] = {"f16", "bf16", "f32"};

struct data {
  float *master;
  void *state[3];
  void *exchange;
};

static uint64_t random_state;

static uint32_t next_random(void) {
  random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(random_state >> 32);
}

static float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Of either sign, of a size that training has; or any bits at all, NaN and subnormals too. */
static float number(int any_bits, int exponent, int exponents) {
  const uint32_t bits = next_random();
  if (any_bits && bits % 4 == 0) {
    return float_of_bits(next_random());
  }
  const uint32_t shift = (uint32_t)(127 + exponent) + next_random() % (uint32_t)exponents;
  return float_of_bits((bits & 0x807FFFFF) | shift << 23);
}

static float magnitude(float x) { return x < 0.0f ? -x : x; }

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes > 0 ? bytes : 1);
  if (memory == NULL) {
    abort();
  }
  return memory;
}

static struct data make_data(int64_t n, enum zo_dtype exchange, enum zo_dtype state, int any_bits) {
  const struct zo_kernels *reference = &zo_scalar;
  const size_t floats = (size_t)n * sizeof(float);
  struct data data = {.master = allocate(floats),
                      .exchange = allocate((size_t)n * zo_size_of(exchange))};
  float *numbers = allocate(floats);
  random_state = 1;
  for (int64_t i = 0; i < n; i++) {
    data.master[i] = number(any_bits, -8, 8);
    numbers[i] = number(any_bits, -20, 16);
  }
  reference->narrow[exchange](n, numbers, data.exchange);
  for (int j = 0; j < 3; j++) {
    for (int64_t i = 0; i < n; i++) {
      const float x = number(any_bits, -20, 16);
      numbers[i] = j == 0 ? x : magnitude(x * x);
    }
    data.state[j] = allocate((size_t)n * zo_size_of(state));
    reference->narrow[state](n, numbers, data.state[j]);
  }
  free(numbers);
  return data;
}

static void free_data(struct data data) {
  free(data.master);
  free(data.exchange);
  for (int j = 0; j < 3; j++) {
    free(data.state[j]);
  }
}

static uint64_t hash(uint64_t so_far, const void *bytes, size_t count) { /* FNV-1a */
  const unsigned char *at = bytes;
  for (size_t i = 0; i < count; i++) {
    so_far = (so_far ^ at[i]) * UINT64_C(1099511628211);
  }
  return so_far;
}

static uint64_t hash_data(struct data data, int64_t n, enum zo_dtype exchange,
                          enum zo_dtype state) {
  uint64_t value = hash(UINT64_C(14695981039346656037), data.master, (size_t)n * sizeof(float));
  value = hash(value, data.exchange, (size_t)n * zo_size_of(exchange));
  for (int j = 0; j < 3; j++) {
    value = hash(value, data.state[j], (size_t)n * zo_size_of(state));
  }
  return value;
}

/* What is run: the argument `variant` chooses among a case's settings. */
typedef uint64_t run_case(int variant, int64_t n, int any_bits, int threads);

static void make_segments(int64_t n, int64_t ends[SEGMENT_COUNT], int64_t steps[SEGMENT_COUNT],
                          int64_t seeds[SEGMENT_COUNT]) {
  for (int i = 0; i < SEGMENT_COUNT; i++) {
    ends[i] = i + 1 == SEGMENT_COUNT ? n : n * i / SEGMENT_COUNT;
    steps[i] = i == 4 ? 0 : i < 3 ? 10 : i * 1000;
    seeds[i] = 17 * i;
  }
}

enum { RULES = 10 };

static void step_once(int rule, const struct zo_buffers *buffers,
                      const struct zo_segments *segments, int threads) {
  const struct zo_gradient plain = {1.0, 1e300 * 1e300};
  const struct zo_gradient scaled = {-0.37, 0.01};
  const struct zo_adam adams[5] = {{plain, 1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0},
                                   {scaled, 1e-3, 0.9, 0.999, 1e-8, 0.1, 0, 0},
                                   {scaled, 1e-2, 0.5, 0.6, 0.0, 0.0, 1, 0},
                                   {plain, 1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 1},
                                   {plain, 1e-3, 0.9, 0.95, 1e-30, 0.1, 1, 0}};
  const struct zo_sgd sgds[3] = {{plain, 0.1, 0.0, 0.0, 0.01, 0},
                                 {plain, 0.1, 0.9, 0.1, 0.01, 0},
                                 {scaled, 0.1, 0.9, 0.0, 0.0, 1}};
  const struct zo_adagrad adagrad = {plain, 0.01, 0.001, 1e-10, 0.01};
  const struct zo_lion lion = {plain, 1e-4, 0.9, 0.99, 0.1};
  if (rule < 5) {
    zo_adam_step(&adams[rule], buffers, segments, threads);
  } else if (rule < 8) {
    zo_sgd_step(&sgds[rule - 5], buffers, segments, threads);
  } else if (rule == 8) {
    zo_adagrad_step(&adagrad, buffers, segments, threads);
  } else {
    zo_lion_step(&lion, buffers, segments, threads);
  }
}

static uint64_t run_update(int variant, int64_t n, int any_bits, int threads) {
  const enum zo_dtype exchange = (enum zo_dtype)(variant / 2 % ZO_DTYPE_COUNT);
  const enum zo_dtype state = variant % 2 ? ZO_BF16 : ZO_F32;
  const struct data data = make_data(n, exchange, state, any_bits);
  const struct zo_buffers buffers = {.n = n,
                                     .master = data.master,
                                     .state = {data.state[0], data.state[1], data.state[2]},
                                     .exchange = data.exchange,
                                     .exchange_dtype = exchange,
                                     .state_dtype = state};
  int64_t ends[SEGMENT_COUNT], steps[SEGMENT_COUNT], seeds[SEGMENT_COUNT];
  make_segments(n, ends, steps, seeds);
  const struct zo_segments segments = {SEGMENT_COUNT, 0, ends, steps, seeds};
  step_once(variant / 6, &buffers, &segments, threads);
  const uint64_t value = hash_data(data, n, exchange, state);
  free_data(data);
  return value;
}

static uint64_t run_pass(int variant, int64_t n, int any_bits, int threads) {
  const enum zo_dtype dtype = (enum zo_dtype)(variant % ZO_DTYPE_COUNT);
  const struct data data = make_data(n, dtype, ZO_F32, any_bits);
  double sums[2] = {0.0, 0.0};
  if (zo_grad_stats(n, data.exchange, dtype, threads, &sums[0]) != ZO_OK ||
      zo_accumulate(n, data.master, data.exchange, dtype, threads, &sums[1]) != ZO_OK) {
    abort();
  }
  zo_cast(n, data.exchange, dtype, data.state[0], ZO_F32, threads);
  zo_cast(n, data.state[1], ZO_F32, data.exchange, dtype, threads);
  const uint64_t value = hash(hash_data(data, n, dtype, ZO_F32), sums, sizeof sums);
  free_data(data);
  return value;
}

/* Prints the hash; returns how many instruction sets and numbers of threads differ from scalar. */
static int check(const char *name, run_case *run, int variant, int64_t n, int any_bits) {
  uint64_t expected = 0;
  int failures = 0;
  for (int isa = 0; isa < zo_isa_count(); isa++) {
    if (zo_isa_use(isa) != ZO_OK) {
      continue;
    }
    for (int threads = 1; threads <= 3; threads++) {
      const uint64_t value = run(variant, n, any_bits, threads);
      if (isa == 0 && threads == 1) {
        expected = value;
      } else if (value != expected) {
        fprintf(stderr, "%s %d n=%lld any_bits=%d: %s with %d threads differs\n", name, variant,
                (long long)n, any_bits, zo_isa_name(isa), threads);
        failures++;
      }
    }
  }
  printf("%s %d n=%lld any_bits=%d %016llx\n", name, variant, (long long)n, any_bits,
         (unsigned long long)expected);
  return failures;
}

int main(void) {
  static const int64_t lengths[] = {0, 1, 15, 17, 33, LENGTH};
  int failures = 0;
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    for (int any_bits = 0; any_bits < 2; any_bits++) {
      for (int variant = 0; variant < 6 * RULES; variant++) {
        failures += check("update", run_update, variant, lengths[i], any_bits);
      }
      for (int variant = 0; variant < ZO_DTYPE_COUNT; variant++) {
        failures += check(dtype_names[variant], run_pass, variant, lengths[i], any_bits);
      }
    }
  }
  fprintf(stderr, "instruction sets:");
  for (int isa = 0; isa < zo_isa_count(); isa++) {
    fprintf(stderr, " %s%s", zo_isa_name(isa), zo_isa_supported(isa) ? "" : " (not on this CPU)");
  }
  fprintf(stderr, "\nfailures: %d\n", failures);
  return failures != 0;
}
