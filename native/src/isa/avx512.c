#include "../simd/avx512.h"

#include "../kernels.inc.h"

const struct zo_kernels zo_avx512 = ZO_KERNELS("avx512");
