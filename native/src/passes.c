/* Statistics, accumulation, casts and first touch, cut into tiles for the threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct pass_call {
  const struct zo_kernels *kernels;
  int64_t n;
  const char *from;
  enum zo_dtype dtype; /* of `from`; of the buffer that is not fp32, in a cast */
  char *to;
  double *sums; /* one for each tile */
};

static void sum_tiles(void *context, int64_t first, int64_t last) {
  const struct pass_call *call = context;
  for (int64_t tile = first; tile < last; tile++) {
    const int64_t begin = tile * ZO_TILE, n = zo_tiles_end(tile + 1, call->n) - begin;
    const char *from = call->from + (size_t)begin * zo_size_of(call->dtype);
    call->sums[tile] =
        call->to == NULL
            ? call->kernels->sum_of_squares[call->dtype](n, from)
            : call->kernels->accumulate[call->dtype](n, (float *)call->to + begin, from);
  }
}

static enum zo_status sum(struct pass_call *call, int threads, double *sum_sq) {
  const int64_t tiles = call->n / ZO_TILE + 1;
  call->sums = calloc((size_t)tiles, sizeof *call->sums);
  if (call->sums == NULL) {
    return ZO_NO_MEMORY;
  }
  zo_parallel_elements(sum_tiles, call, call->n, threads);
  double total = 0.0;
  for (int64_t tile = 0; tile < tiles; tile++) {
    total += call->sums[tile];
  }
  free(call->sums);
  *sum_sq = isnan(total) ? NAN : total;
  return ZO_OK;
}

enum zo_status zo_grad_stats(int64_t n, const void *exchange, enum zo_dtype dtype, int threads,
                             double *sum_sq) {
  struct pass_call call = {
      .kernels = zo_kernels_active(), .n = n, .from = exchange, .dtype = dtype};
  return sum(&call, threads, sum_sq);
}

enum zo_status zo_accumulate(int64_t n, float *accumulator, const void *gradient,
                             enum zo_dtype dtype, int threads, double *sum_sq) {
  struct pass_call call = {.kernels = zo_kernels_active(),
                           .n = n,
                           .from = gradient,
                           .dtype = dtype,
                           .to = (char *)accumulator};
  return sum(&call, threads, sum_sq);
}

static void widen_tiles(void *context, int64_t first, int64_t last) {
  const struct pass_call *call = context;
  const int64_t begin = first * ZO_TILE;
  const int64_t end = zo_tiles_end(last, call->n);
  call->kernels->widen[call->dtype](
      end - begin, call->from + (size_t)begin * zo_size_of(call->dtype), (float *)call->to + begin);
}

static void narrow_tiles(void *context, int64_t first, int64_t last) {
  const struct pass_call *call = context;
  const int64_t begin = first * ZO_TILE;
  const int64_t end = zo_tiles_end(last, call->n);
  call->kernels->narrow[call->dtype](end - begin, (const float *)call->from + begin,
                                     call->to + (size_t)begin * zo_size_of(call->dtype));
}

void zo_cast(int64_t n, const void *source, enum zo_dtype source_dtype, void *destination,
             enum zo_dtype destination_dtype, int threads) {
  const int narrows = source_dtype == ZO_F32;
  struct pass_call call = {.kernels = zo_kernels_active(),
                           .n = n,
                           .from = source,
                           .dtype = narrows ? destination_dtype : source_dtype,
                           .to = destination};
  zo_parallel_elements(narrows ? narrow_tiles : widen_tiles, &call, n, threads);
}

static void copy_tiles(void *context, int64_t first, int64_t last) {
  const struct pass_call *call = context;
  const int64_t begin = first * ZO_TILE, end = zo_tiles_end(last, call->n);
  memcpy(call->to + begin, call->from + begin, (size_t)(end - begin));
}

void zo_copy(int64_t bytes, const void *source, void *destination, int threads) {
  struct pass_call call = {.n = bytes, .from = source, .to = destination};
  zo_parallel_elements(copy_tiles, &call, bytes, threads);
}

enum { PAGE = 4096 };

static void touch_pages(void *context, int64_t first, int64_t last) {
  const struct pass_call *call = context;
  for (int64_t page = first; page < last; page++) {
    ((volatile char *)call->to)[page * PAGE] = 0;
  }
}

void zo_first_touch(int64_t bytes, void *memory, int threads) {
  struct pass_call call = {.to = memory};
  zo_parallel(touch_pages, &call, (bytes + PAGE - 1) / PAGE, threads);
}
