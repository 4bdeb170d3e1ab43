"""What the forward pass must know about a model: config.json and generation_config.json, defaults resolved.

Knows: the keys that transformers 4 and 5 write (`torch_dtype` or `dtype`; `rope_theta` and `rope_scaling`, or
`rope_parameters`), and what our engine computes. Does not know: torch, tensors, tokenizers.

A key that would change the result and that we do not compute (another rope type, sliding windows, quantized
weights) is an error: a model that answers almost right is worse than one that does not start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")


class CheckpointError(Exception):
    """The model directory cannot be served as it is. One line that names the file or field at fault."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies (`rope_type: llama3`); the only kind we compute."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the forward pass must know about the model, defaults resolved."""

    architecture: str  # one of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # heads * head_dim may differ from hidden_size
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    attention_bias: bool  # on q, k, v and o
    mlp_bias: bool  # on gate, up and down
    qk_norm: bool  # RMSNorm over head_dim on q and k, before rotation
    tie_word_embeddings: bool  # no lm_head.weight: the embedding is the head
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str  # the checkpoint's, one of DTYPES


class JsonFile(BaseModel):
    """Unknown keys are passed over; known ones have their type exactly."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _RopeJson(JsonFile):
    """`rope_parameters` (transformers 5) or `rope_scaling` (4, where the old key of the type is `type`)."""

    rope_theta: PositiveFloat | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float = 1.0
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None


class _ConfigJson(JsonFile):
    """config.json. A default here is transformers' own, for the keys that published checkpoints leave out."""

    architectures: list[str] = Field(min_length=1)
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat | None = None
    rope_scaling: _RopeJson | None = None
    rope_parameters: _RopeJson | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: PositiveInt
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    use_sliding_window: bool = False
    quantization_config: dict[str, Any] | None = None


class _GenerationJson(JsonFile):
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


_T = TypeVar("_T", bound=JsonFile)


def read_config(path: Path) -> ModelConfig:
    """The model in directory `path`. Raises CheckpointError."""
    require_directory(path)
    raw = parse(_ConfigJson, path / "config.json", read_json(path / "config.json"))

    def refuse(field: str, value: object, allowed: str) -> NoReturn:
        raise CheckpointError(f"{path / 'config.json'}: {field} is {value!r}; {allowed}")

    architecture = raw.architectures[0]
    if architecture not in ARCHITECTURES:
        refuse("architectures[0]", architecture, f"supported: {', '.join(ARCHITECTURES)}")
    qwen3 = architecture == "Qwen3ForCausalLM"
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unnamed")
        refuse("quantization_config.quant_method", method, "only unquantized weights are supported")
    if raw.hidden_act != "silu":
        refuse("hidden_act", raw.hidden_act, "supported: silu")
    if raw.use_sliding_window:
        refuse("use_sliding_window", True, "supported: false (full attention in every layer)")
    dtype = raw.dtype or raw.torch_dtype or "float32"
    if dtype not in DTYPES:
        refuse("dtype" if raw.dtype else "torch_dtype", dtype, f"supported: {', '.join(DTYPES)}")

    heads = raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or (
        32 if qwen3 and "num_key_value_heads" not in raw.model_fields_set else heads
    )
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"it must divide num_attention_heads ({heads})")
    head_dim = raw.head_dim
    if head_dim is None and qwen3:
        head_dim = 128
    elif head_dim is None:
        if raw.hidden_size % heads:
            refuse(
                "hidden_size",
                raw.hidden_size,
                f"without head_dim it must be a multiple of num_attention_heads ({heads})",
            )
        head_dim = raw.hidden_size // heads
    if head_dim % 2:
        refuse("head_dim", head_dim, "it must be even, because rotary embeddings turn pairs")

    generation_path = path / "generation_config.json"
    generation = _GenerationJson()
    if generation_path.exists():
        generation = parse(_GenerationJson, generation_path, read_json(generation_path))
    eos = generation.eos_token_id if generation.eos_token_id is not None else raw.eos_token_id
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    for token in eos_token_ids:
        if not 0 <= token < raw.vocab_size:
            refuse("eos_token_id", token, f"token ids are 0 to {raw.vocab_size - 1}")

    rope_theta, rope_scaling = _rope(raw, path / "config.json")
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias and not qwen3,  # Qwen3 has no such key, and transformers ignores it there
        qk_norm=qwen3,
        tie_word_embeddings=raw.tie_word_embeddings,
        max_position_embeddings=raw.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        bos_token_id=generation.bos_token_id if generation.bos_token_id is not None else raw.bos_token_id,
        dtype=dtype,
    )


def _rope(raw: _ConfigJson, source: Path) -> tuple[float, RopeScaling | None]:
    key = "rope_parameters" if raw.rope_parameters else "rope_scaling"
    rope = raw.rope_parameters or raw.rope_scaling or _RopeJson()
    theta = rope.rope_theta or raw.rope_theta or 10_000.0
    kind = rope.rope_type or rope.type or "default"
    if rope.partial_rotary_factor != 1.0:
        raise CheckpointError(
            f"{source}: {key}.partial_rotary_factor is {rope.partial_rotary_factor}; supported: 1.0"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"{source}: {key}.rope_type is {kind!r}; supported: default, llama3")
    if rope.factor is None or rope.low_freq_factor is None or rope.high_freq_factor is None:
        raise CheckpointError(
            f"{source}: {key} of type llama3 needs factor, low_freq_factor and high_freq_factor"
        )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError(
            f"{source}: {key}.high_freq_factor is {rope.high_freq_factor}; "
            f"it must exceed low_freq_factor ({rope.low_freq_factor})"
        )
    original = rope.original_max_position_embeddings or raw.max_position_embeddings
    return theta, RopeScaling(rope.factor, rope.low_freq_factor, rope.high_freq_factor, original)


def require_directory(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'not a directory' if path.exists() else 'no such directory'}")


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bytes(file))
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: a JSON object is expected")
    return content


def parse(kind: type[_T], file: Path, content: dict[str, Any]) -> _T:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part not in ("int", "list[int]"))
        if first["type"] == "missing":
            raise CheckpointError(f"{file}: {field} is missing") from error
        raise CheckpointError(f"{file}: {field} is {first['input']!r}; {first['msg']}") from error
