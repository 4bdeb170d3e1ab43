"""Read what a model directory holds, without reading a weight: tensors by their headers, identity, template.

Knows: safetensors headers, tokenizer and template files. Does not know: torch, the tensors that an
architecture needs (the loader checks those), where the directory came from.

Headers only, so that inspecting a model of hundreds of gigabytes costs milliseconds and no memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from .model_config import CheckpointError, ModelConfig, read_bytes, read_config, read_json, require_directory

__all__ = [
    "CheckpointError",
    "ModelConfig",
    "Tensor",
    "chat_template",
    "read_config",
    "tensors",
    "weights_id",
]

# Bits of one element, by the name that a safetensors header uses.
_SAFETENSORS_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_MAX_HEADER_NBYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies: bytes `[offset, offset + nbytes)` of `file`, row-major, little-endian."""

    file: Path
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in directory `path`, by name. Raises CheckpointError."""
    require_directory(path)
    found: dict[str, Tensor] = {}
    for file in _weight_files(path):
        for name, tensor in _read_header(file)[1].items():
            if name in found:
                raise CheckpointError(f"{file}: tensor {name} is also in {found[name].file.name}")
            found[name] = tensor
    index = path / "model.safetensors.index.json"
    if not (path / "model.safetensors").exists():
        for name, shard in _weight_map(index).items():
            if name not in found or found[name].file.name != shard:
                raise CheckpointError(f"{index}: tensor {name} is not in {shard}")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map[{name!r}] is {shard!r}; it must name a .safetensors file beside it"
            )
    return weight_map


def _weight_files(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{path}: no model.safetensors and no model.safetensors.index.json")
    shards = sorted(set(_weight_map(index).values()))
    for shard in shards:
        if not (path / shard).exists():
            raise CheckpointError(f"{path / shard}: missing; {index.name} names it")
    return [path / shard for shard in shards]


def _read_header(file: Path) -> tuple[bytes, dict[str, Tensor]]:
    """The header of a safetensors file, raw and parsed: u64 length, JSON, then tensors to the file's end."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            if not 2 <= length <= min(_MAX_HEADER_NBYTES, size - 8):
                raise CheckpointError(f"{file}: not a safetensors file, or cut short ({size} bytes)")
            header = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    try:
        entries = json.loads(header)
        found = {
            name: Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
            for name, entry in entries.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        }
        for name, tensor in found.items():
            bits = _SAFETENSORS_BITS[tensor.dtype] * math.prod(tensor.shape)
            if bits != 8 * tensor.nbytes:
                raise CheckpointError(
                    f"{file}: {name} has {tensor.nbytes} bytes; "
                    f"{tensor.dtype} {list(tensor.shape)} needs {bits // 8}"
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: unreadable safetensors header ({type(error).__name__}: {error})"
        ) from error
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{file}: {name} begins at byte {tensor.offset}, not at {end}")
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(
            f"{file}: {size} bytes; its header describes {end}, so it is cut short or damaged"
        )
    return header, found


def chat_template(path: Path) -> str | None:
    """The Jinja chat template, from chat_template.jinja or tokenizer_config.json; None without one."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_bytes(file).decode(errors="replace")
    config = path / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.exists() else None
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def weights_id(path: Path) -> str:
    """Identity of local files: a digest of config, tokenizer, and the safetensors headers and sizes.

    Equal names, shapes and sizes with other numbers inside look equal here: hashing hundreds of gigabytes on
    every start is no option. Checkpoints from a hub are identified by their commit instead.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        content = read_bytes(path / name)
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for file in _weight_files(path):
        header, _ = _read_header(file)
        digest.update(f"{file.name} {file.stat().st_size} {len(header)}\n".encode() + header)
    return f"sha256:{digest.hexdigest()}"
