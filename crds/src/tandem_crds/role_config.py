"""RoleConfig: everything a worker of one role starts from, the same in the cluster (ConfigMap) and under `tandem up` (file).

Knows: the model's facts, sizes, fabric. Does not know: what differs between processes of a role (addresses, ports, UID, keys, peer
source): that is an `Instance`, from environment and flags.
"""

from __future__ import annotations

import enum
from typing import Literal

from pydantic import BaseModel, ConfigDict

ROLE_CONFIG_VERSION = 1


class Role(enum.StrEnum):
    MIXED = "mixed"  # a baseline, not in the CRD
    PREFILL = "prefill"
    DECODE = "decode"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFacts(Frozen):
    """What `tandem inspect` finds. Sizes in bytes; `weights_id` identifies the resolved weights (commit, or a digest of local files)."""

    uri: str
    weights_id: str
    architecture: str  # the name in config.json, say "LlamaForCausalLM"
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str  # the checkpoint's
    weights_nbytes: int
    eos_token_ids: list[int]
    has_chat_template: bool
    wire_version: int
    role_config_version: int


class KVConfig(Frozen):
    """The KV cache as both roles must agree on it, plus how many pages this role's pool has."""

    dtype: str
    page_tokens: int
    pages: int


class EngineLimits(Frozen):
    dtype: str
    max_model_len: int
    max_batched_tokens: int
    max_sequences: int


class FabricConfig(Frozen):
    """`providers` in order of preference; the first that passes its feature test is used."""

    providers: list[str]
    port_low: int = 0
    port_high: int = 0
    spin_us: int = 50


class RoleConfig(Frozen):
    version: Literal[1] = ROLE_CONFIG_VERSION
    name: str  # of the DisaggregatedModel
    served_name: str
    role: Role
    device: Literal["cpu", "cuda"]
    model: ModelFacts
    model_path: str  # directory inside the container, or on this machine under `tandem up`
    tensor_parallel: int
    data_parallel: int = 1
    engine: EngineLimits
    kv: KVConfig
    kv_key: str
    fabric: FabricConfig
    prefill_fallback: Literal["Reject", "Local"] = "Reject"
    drain_seconds: int = 600
