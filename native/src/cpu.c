/* What the CPU offers and the operating system saves. Asking the CPU alone is not enough: an
 * operating system or a hypervisor may leave the wide registers switched off. */
#include "internal.h"

#ifdef ZO_X86

#include <cpuid.h>

enum {
  LEAF1_ECX_FMA = 1 << 12,
  LEAF1_ECX_OSXSAVE = 1 << 27,
  LEAF1_ECX_AVX = 1 << 28,
  LEAF1_ECX_F16C = 1 << 29,
  LEAF7_EBX_AVX2 = 1 << 5,
  LEAF7_EBX_AVX512F = 1 << 16,
  LEAF7_EBX_AVX512BW = 1 << 30,
  XCR0_YMM = 0x06, /* XMM and the upper halves of YMM */
  XCR0_ZMM = 0xE6, /* and the mask registers and both parts of ZMM */
};
#define LEAF7_EBX_AVX512VL (1u << 31)

static int has_all(unsigned value, unsigned flags) { return (value & flags) == flags; }

static unsigned saved_registers(void) {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

static int has(unsigned leaf7_ebx, unsigned xcr0) {
  unsigned eax, ebx, ecx, edx;
  const unsigned leaf1_ecx = LEAF1_ECX_FMA | LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX | LEAF1_ECX_F16C;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has_all(ecx, leaf1_ecx)) {
    return 0;
  }
  if (!has_all(saved_registers(), xcr0)) {
    return 0;
  }
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && has_all(ebx, leaf7_ebx);
}

int zo_cpu_has_avx2(void) { return has(LEAF7_EBX_AVX2, XCR0_YMM); }

int zo_cpu_has_avx512(void) {
  return has(LEAF7_EBX_AVX2 | LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL,
             XCR0_ZMM);
}

#else

typedef int nothing_to_ask; /* ISO C forbids an empty file */

#endif
