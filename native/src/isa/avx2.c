#include "../simd/avx2.h"

#include "../kernels.inc.h"

const struct zo_kernels zo_avx2 = ZO_KERNELS("avx2");
