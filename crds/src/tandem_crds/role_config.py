"""RoleConfig: everything a worker of one role starts from, the same in the cluster and under `tandem up`.

Knows: the model's facts, sizes, fabric. Does not know: what differs between processes of a role (addresses,
ports, UID, keys, peer source): that is an `Instance`, from environment and flags.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from . import sizing
from .kv_key import kv_key

if TYPE_CHECKING:
    from .model import DisaggregatedModel

ROLE_CONFIG_VERSION = 1


class Role(enum.StrEnum):
    MIXED = "mixed"  # a baseline, not in the CRD
    PREFILL = "prefill"
    DECODE = "decode"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFacts(Frozen):
    """What `tandem inspect` finds. `weights_id` identifies the weights: a commit, or a digest of local
    files.
    """

    uri: str
    weights_id: str
    architecture: str  # the name in config.json, say "LlamaForCausalLM"
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_latent: int = 0  # MLA: elements that a token caches in a layer, on every rank; 0: keys and values
    vocab_size: int
    max_position_embeddings: int
    dtype: str  # the checkpoint's
    weights_nbytes: int
    eos_token_ids: list[int]
    has_chat_template: bool
    engine_refuses: str = ""  # why the engine that read them cannot compute this model
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
    version: Literal[1] = 1
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


class RoleConfigError(ValueError):
    """No worker could start from this. One line that names the field, its value and what is allowed."""


# In order of preference, for the built-in profiles. libfabric 1.x calls its connectionless TCP provider
# `net`; from 2.0 on that is what `tcp` does.
PROVIDERS = {"tcp": ["net", "tcp"], "efa": ["efa"], "roce": ["verbs"], "infiniband": ["verbs"]}


def build_role_config(
    model: DisaggregatedModel,
    facts: ModelFacts,
    role: Role,
    model_path: str,
    fabric: FabricConfig | None = None,
) -> RoleConfig:
    """What every worker of `role` starts from. `mixed` takes decode's settings; `fabric` is what an
    installation's profile says, None: the built-in profile's providers. Raises RoleConfigError.

    The longest length is the one that prefill's and decode's KV caches both hold, for every role: whatever
    one worker accepts, its peers can take.
    """
    if facts.engine_refuses:
        raise RoleConfigError(f"this runtime cannot serve the model: {facts.engine_refuses}")
    spec = model.spec
    path, settings = ("prefill", spec.prefill) if role is Role.PREFILL else ("decode", spec.decode)
    if fabric is None:
        if spec.fabric.profile not in PROVIDERS:
            raise RoleConfigError(
                f"spec.fabric.profile is {spec.fabric.profile}; known here: {', '.join(PROVIDERS)}"
            )
        fabric = FabricConfig(providers=PROVIDERS[spec.fabric.profile])
    try:
        for name, one in (("prefill", spec.prefill), ("decode", spec.decode)):
            sizing.check_tensor_parallel(facts, one.tensor_parallel, name)
        max_model_len = sizing.max_model_len(spec, facts)
        pages = sizing.pool_pages(spec, settings, facts, path)
    except sizing.SizingError as error:
        raise RoleConfigError(f"spec.{error}") from error
    dtype = sizing.kv_dtype(spec, facts)
    return RoleConfig(
        name=model.metadata.name,
        served_name=spec.model.served_name or model.metadata.name,
        role=role,
        device="cpu" if spec.accelerator.type == "CPU" else "cuda",
        model=facts,
        model_path=model_path,
        tensor_parallel=settings.tensor_parallel,
        data_parallel=settings.data_parallel,
        engine=EngineLimits(
            dtype=sizing.engine_dtype(spec, facts),
            max_model_len=max_model_len,
            max_batched_tokens=sizing.max_batched_tokens(spec, settings),
            max_sequences=sizing.max_sequences(spec, settings),
        ),
        kv=KVConfig(dtype=dtype, page_tokens=spec.engine.page_size, pages=pages),
        kv_key=kv_key(facts, dtype, spec.engine.page_size),
        fabric=fabric,
        prefill_fallback=spec.decode.prefill_fallback,
        drain_seconds=spec.drain_seconds,
    )
