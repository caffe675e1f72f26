/* Chooses the instruction set, and cuts a call into tiles for the threads. */
#include <fenv.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "internal.h"

static int always(void) { return 1; }

static const struct {
  const struct zo_kernels *kernels;
  int (*supported)(void);
} isas[] = {
    {&zo_scalar, always},
#ifdef ZO_X86
    {&zo_avx2, zo_cpu_has_avx2},
    {&zo_avx512, zo_cpu_has_avx512},
#endif
};

enum { ISA_COUNT = sizeof isas / sizeof isas[0] };

static atomic_int active = -1;

int zo_isa_count(void) { return ISA_COUNT; }

const char *zo_isa_name(int isa) {
  return isa >= 0 && isa < ISA_COUNT ? isas[isa].kernels->name : NULL;
}

int zo_isa_supported(int isa) { return isa >= 0 && isa < ISA_COUNT && isas[isa].supported(); }

int zo_isa_active(void) {
  int isa = atomic_load(&active);
  if (isa < 0) {
    isa = ISA_COUNT - 1;
    while (!isas[isa].supported()) {
      isa--;
    }
    atomic_store(&active, isa); /* two threads at once store the same */
  }
  return isa;
}

enum zo_status zo_isa_use(int isa) {
  if (!zo_isa_supported(isa)) {
    return ZO_UNSUPPORTED;
  }
  atomic_store(&active, isa);
  return ZO_OK;
}

static int64_t tiles_of(int64_t n) { return n / ZO_TILE + (n % ZO_TILE != 0); }

/* Waking a thread costs more than it saves on less than two tiles. */
static int useful_threads(int64_t n, int threads) { return n < 2 * ZO_TILE ? 1 : threads; }

struct adam_call {
  const struct zo_kernels *kernels;
  struct zo_adam_constants constants;
  int64_t n;
  float *master, *exp_avg, *exp_avg_sq;
  char *exchange;
  enum zo_dtype dtype;
};

static void adam_tiles(void *context, int64_t first, int64_t last) {
  const struct adam_call *call = context;
  const int64_t begin = first * ZO_TILE;
  const int64_t end = last * ZO_TILE < call->n ? last * ZO_TILE : call->n;
  call->kernels->adam[call->dtype](&call->constants, end - begin, call->master + begin,
                                   call->exp_avg + begin, call->exp_avg_sq + begin,
                                   call->exchange + begin * (int64_t)zo_size_of(call->dtype));
}

/* The user may have switched on flush-to-zero (torch.set_flush_denormal) or another rounding mode
 * in this thread; results must not depend on it. */
static void enter(fenv_t *users) {
  fegetenv(users);
  fesetenv(FE_DFL_ENV);
}

void zo_adam_step(const struct zo_adam *hyper, int64_t n, float *master, float *exp_avg,
                  float *exp_avg_sq, void *exchange, enum zo_dtype dtype, int threads) {
  fenv_t users;
  enter(&users);
  struct adam_call call = {
      .kernels = isas[zo_isa_active()].kernels,
      .constants = zo_adam_constants(hyper),
      .n = n,
      .master = master,
      .exp_avg = exp_avg,
      .exp_avg_sq = exp_avg_sq,
      .exchange = exchange,
      .dtype = dtype,
  };
  zo_parallel(adam_tiles, &call, tiles_of(n), useful_threads(n, threads));
  fesetenv(&users);
}

struct stats_call {
  const struct zo_kernels *kernels;
  int64_t n;
  const char *exchange;
  enum zo_dtype dtype;
  double *sums; /* one for each tile */
};

static void stats_tiles(void *context, int64_t first, int64_t last) {
  const struct stats_call *call = context;
  for (int64_t tile = first; tile < last; tile++) {
    const int64_t begin = tile * ZO_TILE;
    const int64_t length = call->n - begin < ZO_TILE ? call->n - begin : ZO_TILE;
    const char *bytes = call->exchange + begin * (int64_t)zo_size_of(call->dtype);
    call->sums[tile] = call->kernels->sum_of_squares[call->dtype](length, bytes);
  }
}

enum zo_status zo_grad_stats(int64_t n, const void *exchange, enum zo_dtype dtype, int threads,
                             double *sum_sq) {
  const int64_t tiles = tiles_of(n);
  double *sums = malloc((size_t)(tiles + 1) * sizeof *sums); /* + 1: never of size 0 */
  if (sums == NULL) {
    return ZO_NO_MEMORY;
  }
  fenv_t users;
  enter(&users);
  struct stats_call call = {isas[zo_isa_active()].kernels, n, exchange, dtype, sums};
  zo_parallel(stats_tiles, &call, tiles, useful_threads(n, threads));
  double total = 0.0;
  for (int64_t tile = 0; tile < tiles; tile++) {
    total += sums[tile];
  }
  fesetenv(&users);
  free(sums);
  *sum_sq = total;
  return ZO_OK;
}
