/* Cuts an update into slices: threads take whole tiles, and each walks the segments in its own. */
#include "internal.h"

typedef struct zo_constants make_constants(const void *hyper, int64_t step);

struct update_call {
  make_constants *constants;
  const void *hyper;
  const struct zo_buffers *buffers;
  const struct zo_segments *segments;
  const struct zo_kernels *kernels;
};

/* splitmix64's finisher. */
static uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

/* The first segment that ends behind `element`. */
static int64_t segment_at(const struct zo_segments *segments, int64_t element) {
  int64_t low = 0, high = segments->count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (segments->ends[middle] > element) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

static struct zo_slice slice_of(const struct update_call *call, int states, int64_t segment,
                                int64_t begin, int64_t end) {
  const struct zo_buffers *buffers = call->buffers;
  const struct zo_segments *segments = call->segments;
  const int64_t segment_begin = segment == 0 ? segments->begin : segments->ends[segment - 1];
  const uint64_t key =
      mix(mix((uint64_t)segments->seeds[segment] + 1) + (uint64_t)segments->steps[segment]);
  struct zo_slice slice = {
      .n = end - begin,
      .master = buffers->master + begin,
      .exchange = (char *)buffers->exchange + (size_t)begin * zo_size_of(buffers->exchange_dtype),
      .first = (uint32_t)(begin - segment_begin),
      .keys = {(uint32_t)key, (uint32_t)(key >> 32)},
  };
  for (int j = 0; j < states; j++) {
    slice.state[j] = (char *)buffers->state[j] + (size_t)begin * zo_size_of(buffers->state_dtype);
  }
  return slice;
}

static void update_tiles(void *context, int64_t first, int64_t last) {
  const struct update_call *call = context;
  const struct zo_buffers *buffers = call->buffers;
  const struct zo_segments *segments = call->segments;
  const int rounds_randomly = buffers->state_dtype != ZO_F32;
  int64_t begin = first * ZO_TILE;
  const int64_t stop = zo_tiles_end(last, buffers->n);
  struct zo_constants k = {0};
  int64_t step_of_k = 0;
  for (int64_t i = segment_at(segments, begin); i < segments->count && begin < stop; i++) {
    const int64_t step = segments->steps[i];
    const int64_t segment = i;
    while (!rounds_randomly && i + 1 < segments->count && segments->steps[i + 1] == step) {
      i++; /* one slice for all that differ in their random numbers only */
    }
    const int64_t end = segments->ends[i] < stop ? segments->ends[i] : stop;
    if (step != 0 && begin < end) {
      if (step != step_of_k) {
        k = call->constants(call->hyper, step);
        step_of_k = step;
      }
      const struct zo_slice slice = slice_of(call, zo_state_count(k.rule), segment, begin, end);
      call->kernels->update[k.rule][buffers->exchange_dtype][rounds_randomly](&k, &slice);
    }
    begin = end;
  }
}

static void update(make_constants *constants, const void *hyper, const struct zo_buffers *buffers,
                   const struct zo_segments *segments, int threads) {
  struct update_call call = {constants, hyper, buffers, segments, zo_kernels_active()};
  zo_parallel_elements(update_tiles, &call, buffers->n, threads);
}

#define STEP_OF(optimizer)                                                                         \
  static struct zo_constants optimizer##_constants(const void *hyper, int64_t step) {              \
    return zo_##optimizer##_constants(hyper, step);                                                \
  }                                                                                                \
  void zo_##optimizer##_step(const struct zo_##optimizer *hyper, const struct zo_buffers *buffers, \
                             const struct zo_segments *segments, int threads) {                    \
    update(optimizer##_constants, hyper, buffers, segments, threads);                              \
  }

STEP_OF(adam)
STEP_OF(sgd)
STEP_OF(adagrad)
STEP_OF(lion)
