"""How much: bytes of KV cache, pages that fit, devices, and how long a transfer should take.

Knows: the spec and the model's facts. Does not know: the machines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import quantity

if TYPE_CHECKING:
    from .role_config import ModelFacts
    from .roles import RoleSpec
    from .spec import Spec

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}

# A rank's KV cache on CPU when the spec says nothing: 23,301 tokens of a 135M model in fp32.
CPU_KV_CACHE_NBYTES = 2**30


class SizingError(ValueError):
    """The spec and the model do not fit together. One line that names the field, both numbers and what is
    allowed.
    """


def engine_dtype(spec: Spec, facts: ModelFacts) -> str:
    if spec.engine.dtype != "auto":
        return spec.engine.dtype
    return "float32" if spec.accelerator.type == "CPU" else facts.dtype


def kv_dtype(spec: Spec, facts: ModelFacts) -> str:
    return engine_dtype(spec, facts) if spec.engine.kv_cache_dtype == "auto" else spec.engine.kv_cache_dtype


def max_sequences(spec: Spec, role: RoleSpec) -> int:
    return role.engine.max_sequences or (32 if spec.accelerator.type == "CPU" else 256)


def max_batched_tokens(spec: Spec, role: RoleSpec) -> int:
    """On CPU a step of 512 tokens already takes long enough to hide its overhead. On GPU prefill needs
    thousands to be bound by compute, while decode's few prefills (fallback, preemption) must not hold up
    everybody's next token.
    """
    if role.engine.max_batched_tokens is not None:
        return role.engine.max_batched_tokens
    if spec.accelerator.type == "CPU":
        return 512
    return 8192 if role is spec.prefill else 2048


def rank_kv_heads(facts: ModelFacts, tensor_parallel: int) -> int:
    """KV heads that one rank holds: at least one, since heads are replicated when ranks outnumber them."""
    return max(1, facts.kv_heads // tensor_parallel)


def kv_token_nbytes(facts: ModelFacts, dtype: str, tensor_parallel: int = 1) -> int:
    """KV cache of one token on one rank, all layers. MLA's latent belongs to all heads: every rank has it."""
    width = facts.kv_latent or rank_kv_heads(facts, tensor_parallel) * 2 * facts.head_dim
    return facts.layers * width * DTYPE_NBYTES[dtype]


def check_tensor_parallel(facts: ModelFacts, tensor_parallel: int, path: str) -> None:
    """Ranks share heads evenly; KV heads are shared or replicated evenly. Raises SizingError."""

    def fits(degree: int) -> bool:
        if facts.kv_latent:
            return facts.heads % degree == 0
        return facts.heads % degree == 0 and (facts.kv_heads % degree == 0 or degree % facts.kv_heads == 0)

    if not fits(tensor_parallel):
        allowed = ", ".join(str(degree) for degree in range(1, min(facts.heads, 64) + 1) if fits(degree))
        raise SizingError(
            f"{path}.tensorParallel is {tensor_parallel}; the model's {facts.heads} heads and "
            f"{facts.kv_heads} KV heads allow {allowed}"
        )


def pool_pages(spec: Spec, role: RoleSpec, facts: ModelFacts, path: str) -> int:
    """Pages of one rank's KV cache.

    The default on CPU stops where more pages could never be used: `maxSequences` requests of the longest
    length. An explicit `kvCacheMemory` is taken at its word, since what requests do not use keeps prefixes.
    Raises SizingError.
    """
    page_tokens = spec.engine.page_size
    page_nbytes = page_tokens * kv_token_nbytes(facts, kv_dtype(spec, facts), role.tensor_parallel)
    memory = role.engine.kv_cache_memory
    if memory is None and spec.accelerator.type == "GPU":
        raise SizingError(f"{path}.engine.kvCacheMemory is missing; with accelerator GPU it must be set")
    pages = (CPU_KV_CACHE_NBYTES if memory is None else quantity.nbytes(memory)) // page_nbytes
    if pages < 1:
        raise SizingError(
            f"{path}.engine.kvCacheMemory is {'1Gi' if memory is None else memory}; "
            f"one page of {page_tokens} tokens takes {page_nbytes} bytes"
        )
    if memory is None:
        longest = min(
            spec.engine.max_model_len or facts.max_position_embeddings, facts.max_position_embeddings
        )
        pages = min(pages, max_sequences(spec, role) * -(-longest // page_tokens))
    return pages


def max_model_len(spec: Spec, facts: ModelFacts) -> int:
    """The one length that the model and both roles' KV caches can hold: a longer prompt could never be
    handed over.

    Raises SizingError if the spec asks for more.
    """
    wanted = spec.engine.max_model_len
    if wanted is not None and wanted > facts.max_position_embeddings:
        raise SizingError(
            f"engine.maxModelLen is {wanted}; the model's positions end at {facts.max_position_embeddings}"
        )
    length = wanted or facts.max_position_embeddings
    for path, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        holds = pool_pages(spec, role, facts, path) * spec.engine.page_size
        if wanted is not None and holds < wanted:
            raise SizingError(
                f"{path}.engine.kvCacheMemory ({role.engine.kv_cache_memory or '1Gi'}) holds {holds} tokens; "
                f"engine.maxModelLen is {wanted}"
            )
        length = min(length, holds)
    return length


def replica_gpus(spec: Spec, role: RoleSpec) -> int:
    """GPUs of one replica."""
    return role.tensor_parallel * role.data_parallel if spec.accelerator.type == "GPU" else 0


def total_gpus(spec: Spec) -> int:
    return spec.prefill_replicas * replica_gpus(spec, spec.prefill) + spec.decode.replicas * replica_gpus(
        spec, spec.decode
    )


def replica_nics(spec: Spec, role: RoleSpec, profile_nics_per_gpu: int) -> int:
    """RDMA devices of one replica; the profile's number per GPU holds unless the spec says another."""
    return replica_gpus(spec, role) * (spec.fabric.nics_per_gpu or profile_nics_per_gpu)


def transfer_s(facts: ModelFacts, dtype: str, tokens: int, nics: int, nic_gbit_per_s: int) -> float:
    """Seconds in which a prompt's KV cache crosses, bound by the NICs of one side. Most of it hides behind
    prefill: only the last layer's share is sent when nothing is left to compute.
    """
    return tokens * kv_token_nbytes(facts, dtype) * 8 / (nics * nic_gbit_per_s * 1e9)
