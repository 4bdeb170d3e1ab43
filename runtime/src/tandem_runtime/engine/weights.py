"""Fill a model's parameters from its checkpoint, one tensor at a time.

Knows: which tensors the model needs and which part of each this rank takes. Does not know: layers, dtypes'
meaning.

Strict: a tensor that is missing, unknown or of another shape stops the start, because a model that loads
almost right answers almost right. One tensor is in memory at a time, and of a sharded one only this rank's
part is read.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from .checkpoint import CheckpointError, tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .checkpoint import Tensor
    from .models.layers import Part, Parts

_FLOATS = ("F64", "F32", "F16", "BF16")


def load(parts: Parts, directory: Path, progress: Callable[[int, int], None]) -> None:
    """Fill every part. `progress` hears bytes done of bytes in all. Raises CheckpointError."""
    found = {name: tensor for name, tensor in tensors(directory).items() if not _ignored(name, parts)}
    for name in parts.keys() - found.keys():
        raise CheckpointError(f"{directory}: tensor {name} is missing")
    for name, tensor in sorted(found.items()):
        _check(name, tensor, parts.get(name))
    total = sum(tensor.nbytes for tensor in found.values())
    done = 0
    in_order = sorted(found.items(), key=lambda entry: (entry[1].file, entry[1].offset))
    for file, entries in groupby(in_order, key=lambda entry: entry[1].file):
        with _open(file) as reader:
            for name, tensor in entries:
                part = parts[name]
                part.target.copy_(reader.get_slice(name)[part.source])
                done += tensor.nbytes
                progress(done, total)


def _check(name: str, tensor: Tensor, part: Part | None) -> None:
    if part is None:
        raise CheckpointError(f"{tensor.file}: tensor {name} is unknown to this architecture")
    if tensor.shape != part.shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {list(tensor.shape)}; config.json makes it {list(part.shape)}"
        )
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype}; supported: {', '.join(_FLOATS)}"
        )


def _ignored(name: str, parts: Parts) -> bool:
    """Old Llama files carry computed frequencies; files of tied models may carry the head a second time."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in parts)


def _open(file: Path) -> Any:  # safetensors' reader has no type that mypy can see
    return safe_open(file, framework="pt", device="cpu")
