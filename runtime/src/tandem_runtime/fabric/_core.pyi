from typing import Any

# cffi builds these from csrc/tandem_fabric.h; `fabric.py` is their typed face.
ffi: Any
lib: Any
