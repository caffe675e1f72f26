#include "../simd/neon.h"

#include "../kernels.inc.h"

const struct zo_kernels zo_neon = ZO_KERNELS("neon");
