"""Builds `tandem_runtime.fabric._core`: the C core under cffi's API mode.

The declarations are the public header itself, so that Python and C cannot disagree. libfabric's headers are
needed to compile and its library is not linked: the core looks for it when a fabric is opened, and importing
`_core` loads nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).parent / "csrc"
RUNTIME = Path(__file__).parents[3]  # setuptools wants sources relative to setup.py
SOURCES = (
    "blake2s",
    "bootstrap",
    "core",
    "counters",
    "endpoint",
    "link",
    "memory",
    "plan",
    "progress",
    "provider",
    "run",
    "transfer",
)
FLAGS = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O3",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wpointer-arith",
    "-Wstrict-prototypes",
    "-Werror=implicit-function-declaration",
    "-Werror=incompatible-pointer-types",
    "-Werror=int-conversion",
    "-Werror=return-type",
]


def declarations(header: str) -> str:
    """The header without what only the preprocessor understands."""
    return re.sub(r"^#(include|ifndef|endif|define TANDEM_FABRIC_H).*$", "", header, flags=re.MULTILINE)


ffibuilder = FFI()
ffibuilder.cdef(declarations((CSRC / "tandem_fabric.h").read_text()))
ffibuilder.set_source(
    "tandem_runtime.fabric._core",
    '#include "tandem_fabric.h"',
    sources=[str((CSRC / f"{name}.c").relative_to(RUNTIME)) for name in SOURCES],
    include_dirs=[str(CSRC)],
    depends=[str(path.relative_to(RUNTIME)) for path in sorted(CSRC.glob("*.h"))],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
)
