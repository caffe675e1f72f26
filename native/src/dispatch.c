/* Chooses the instruction set. */
#include <stdatomic.h>

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
#ifdef ZO_ARM64
    {&zo_neon, always}, /* NEON is part of the architecture */
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

const struct zo_kernels *zo_kernels_active(void) { return isas[zo_isa_active()].kernels; }
