"""What a model is, for those who plan around it: its facts, from config.json and the weights' sizes.

Knows: the keys that all published decoder models share, and MLA's. Does not know: what the forward pass needs
(`engine/model_config.py`), where the files came from.

A model that the engine cannot compute has facts all the same, and the engine's reason among them: a fleet is
sized, and its memory counted, before anything can run there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from tandem_crds.role_config import ROLE_CONFIG_VERSION, ModelFacts

from ..engine.checkpoint import chat_template, tensors, weights_id
from ..engine.model_config import CheckpointError, JsonFile, parse, read_config, read_json
from ..messenger import wire

if TYPE_CHECKING:
    from pathlib import Path


class _FactsJson(JsonFile):
    architectures: list[str] = Field(min_length=1)
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    # Multi-head latent attention: what is cached is one latent vector and one rotary key for all heads.
    kv_lora_rank: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt | None = None


def local_facts(path: Path, uri: str) -> ModelFacts:
    """Of the model in directory `path`. Raises CheckpointError."""
    weights = sum(tensor.nbytes for tensor in tensors(path).values())
    return facts(path, uri, weights_id(path), weights)


def facts(path: Path, uri: str, weights: str, weights_nbytes: int) -> ModelFacts:
    """Of the model whose small files are in directory `path`; `weights` identifies its weights. Raises
    CheckpointError.
    """
    file = path / "config.json"
    raw = parse(_FactsJson, file, read_json(file))
    refusal, heads = "", raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or heads
    head_dim = raw.head_dim or raw.hidden_size // heads
    latent = 0
    if raw.kv_lora_rank is not None:
        latent = raw.kv_lora_rank + (raw.qk_rope_head_dim or 0)
        head_dim = (raw.qk_nope_head_dim or 0) + (raw.qk_rope_head_dim or 0)
    eos = raw.eos_token_id
    eos_token_ids = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
    dtype = raw.dtype or raw.torch_dtype or "float32"
    try:
        config = read_config(path)
    except CheckpointError as error:
        refusal = str(error)
    else:  # its architecture's own defaults, and generation_config.json
        kv_heads, head_dim, dtype = config.kv_heads, config.head_dim, config.dtype
        eos_token_ids = list(config.eos_token_ids)
    return ModelFacts(
        uri=uri,
        weights_id=weights,
        architecture=raw.architectures[0],
        layers=raw.num_hidden_layers,
        hidden_size=raw.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_latent=latent,
        vocab_size=raw.vocab_size,
        max_position_embeddings=raw.max_position_embeddings,
        dtype=dtype,
        weights_nbytes=weights_nbytes,
        eos_token_ids=eos_token_ids,
        has_chat_template=chat_template(path) is not None,
        engine_refuses=refusal,
        wire_version=wire.VERSION,
        role_config_version=ROLE_CONFIG_VERSION,
    )
