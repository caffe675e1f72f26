#include "../simd/scalar.h"

#include "../adam.inc.h"
#include "../stats.inc.h"

const struct zo_kernels zo_scalar = ZO_KERNELS("scalar");
