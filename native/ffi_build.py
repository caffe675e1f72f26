"""Makes the C source of ``lightning_zoffload._native``; CMake runs it through ``cffi.gen_src``."""

from pathlib import Path

import cffi

HEADER = Path(__file__).parent / "include" / "zoffload.h"

ffibuilder = cffi.FFI()
ffibuilder.cdef(HEADER.read_text())
ffibuilder.set_source(
    "lightning_zoffload._native",
    '#include <stdint.h>\n#include "zoffload.h"\n',
    py_limited_api=True,
)
