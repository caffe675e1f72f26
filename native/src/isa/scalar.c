#include "../simd/scalar.h"

#include "../kernels.inc.h"

const struct zo_kernels zo_scalar = ZO_KERNELS("scalar");
