/* The sum of squares of one tile: the only text of the kernel. Included after adam.inc.h.
 *
 * Element i of a tile is added to lane i % 32 in fp64, and the lanes are summed as a fixed tree, so
 * the result is the same whatever the width of the registers. */

enum { SUM_LANES = 32 };

VEC_OP void add_squares(squares sums[SUM_LANES / LANES], enum zo_dtype dtype, const char *bytes) {
  for (int j = 0; j < SUM_LANES / LANES; j++) {
    sums[j] =
        squares_add(sums[j], load_exchange(bytes + (size_t)j * LANES * zo_size_of(dtype), dtype));
  }
}

VEC_OP double sum_of_squares(enum zo_dtype dtype, int64_t n, const char *bytes) {
  const int64_t size = (int64_t)zo_size_of(dtype);
  squares sums[SUM_LANES / LANES];
  for (int j = 0; j < SUM_LANES / LANES; j++) {
    sums[j] = squares_none();
  }
  int64_t i = 0;
  for (; i + SUM_LANES <= n; i += SUM_LANES) {
    add_squares(sums, dtype, bytes + i * size);
  }
  if (i < n) {
    float tail[SUM_LANES] = {0}; /* room for any dtype; zeros add nothing */
    memcpy(tail, bytes + i * size, (size_t)((n - i) * size));
    add_squares(sums, dtype, (const char *)tail);
  }
  double lanes[SUM_LANES];
  for (int j = 0; j < SUM_LANES / LANES; j++) {
    squares_store(lanes + (ptrdiff_t)j * LANES, sums[j]);
  }
  for (int width = SUM_LANES / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; j++) {
      lanes[j] += lanes[j + width];
    }
  }
  return lanes[0];
}

static double sum_of_squares_f16(int64_t n, const void *exchange) {
  return sum_of_squares(ZO_F16, n, exchange);
}

static double sum_of_squares_bf16(int64_t n, const void *exchange) {
  return sum_of_squares(ZO_BF16, n, exchange);
}

static double sum_of_squares_f32(int64_t n, const void *exchange) {
  return sum_of_squares(ZO_F32, n, exchange);
}

#define ZO_KERNELS(isa)                                                                            \
  {                                                                                                \
      .name = isa,                                                                                 \
      .adam = {adam_f16, adam_bf16, adam_f32},                                                     \
      .sum_of_squares = {sum_of_squares_f16, sum_of_squares_bf16, sum_of_squares_f32},             \
  }
