"""From a manifest and the facts of a model to what a worker starts with, or one line that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from manifest_examples import manifest

from tandem_crds import sizing
from tandem_crds.embedded import unsupported_by_embedded
from tandem_crds.kv_key import kv_key
from tandem_crds.model import DisaggregatedModel, load_manifest
from tandem_crds.role_config import ModelFacts, Role, RoleConfig, RoleConfigError, build_role_config

SMOLLM2 = ModelFacts(
    uri="pvc://models/smollm2",
    weights_id="sha256:00",
    architecture="LlamaForCausalLM",
    layers=30,
    hidden_size=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    dtype="bfloat16",
    weights_nbytes=269_030_016,
    eos_token_ids=[2],
    has_chat_template=True,
    wire_version=1,
    role_config_version=1,
)
QWEN3_CODER = SMOLLM2.model_copy(
    update={"layers": 62, "heads": 96, "kv_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144}
)


def model(**changes: Any) -> DisaggregatedModel:
    """`spec__decode__replicas=2` changes `spec.decode.replicas`."""
    return DisaggregatedModel.model_validate(
        manifest({path.replace("__", "."): value for path, value in changes.items()})
    )


def build(role: Role = Role.DECODE, facts: ModelFacts = SMOLLM2, **changes: Any) -> RoleConfig:
    return build_role_config(model(**changes), facts, role, "/models/smollm2")


def test_the_defaults_on_cpu() -> None:
    config = build()
    assert (config.device, config.engine.dtype, config.kv.dtype) == ("cpu", "float32", "float32")
    assert (config.kv.page_tokens, config.engine.max_batched_tokens, config.engine.max_sequences) == (
        16,
        512,
        32,
    )
    assert config.kv.pages == 2**30 // (16 * 46_080)
    assert config.engine.max_model_len == 8192
    assert config.served_name == config.name == "smollm2"
    assert config.fabric.providers == ["net", "tcp"]


def test_a_role_config_survives_its_json() -> None:
    config = build()
    assert RoleConfig.model_validate_json(config.model_dump_json()) == config


def test_the_default_pool_stops_where_more_pages_could_not_be_used() -> None:
    tiny = SMOLLM2.model_copy(update={"layers": 2, "max_position_embeddings": 100})
    assert build(facts=tiny).kv.pages == 32 * 7
    assert build(facts=tiny, spec__engine={"maxModelLen": 20}).kv.pages == 32 * 2
    assert build(facts=tiny, spec__decode={"engine": {"kvCacheMemory": "1Gi"}}).kv.pages > 20_000


def test_the_defaults_on_gpu_differ_by_role() -> None:
    changes = {
        "spec__accelerator": {"type": "GPU"},
        "spec__prefill__engine": {"kvCacheMemory": "8Gi"},
        "spec__decode": {"engine": {"kvCacheMemory": "8Gi"}},
    }
    prefill, decode = build(Role.PREFILL, **changes), build(Role.DECODE, **changes)
    assert (decode.device, decode.engine.dtype, decode.kv.dtype) == ("cuda", "bfloat16", "bfloat16")
    assert (prefill.engine.max_batched_tokens, decode.engine.max_batched_tokens) == (8192, 2048)
    assert decode.engine.max_sequences == 256


def test_mixed_takes_the_settings_of_decode() -> None:
    changes = {"spec__decode": {"engine": {"maxSequences": 7}}, "spec__prefill__engine": {"maxSequences": 3}}
    mixed, decode = build(Role.MIXED, **changes), build(Role.DECODE, **changes)
    assert mixed == decode.model_copy(update={"role": Role.MIXED})
    assert build(Role.PREFILL, **changes).engine.max_sequences == 3


def test_both_roles_get_the_length_that_the_smaller_pool_holds() -> None:
    changes = {"spec__decode": {"engine": {"kvCacheMemory": 46_080 * 16 * 10}}}
    assert build(Role.PREFILL, **changes).engine.max_model_len == 160
    assert build(Role.DECODE, **changes).engine.max_model_len == 160
    assert build(Role.PREFILL, **changes).kv.pages == 1456


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"spec__engine": {"maxModelLen": 8193}},
            "spec.engine.maxModelLen is 8193; the model's positions end at 8192",
        ),
        (
            {"spec__engine": {"maxModelLen": 200}, "spec__decode": {"engine": {"kvCacheMemory": "8Mi"}}},
            "spec.decode.engine.kvCacheMemory (8Mi) holds 176 tokens; engine.maxModelLen is 200",
        ),
        (
            {"spec__prefill__engine": {"kvCacheMemory": "100Ki"}},
            "spec.prefill.engine.kvCacheMemory is 100Ki; one page of 16 tokens takes 737280 bytes",
        ),
        (
            {"spec__decode": {"tensorParallel": 2}},
            "spec.decode.tensorParallel is 2; the model's 9 heads and 3 KV heads allow 1, 3, 9",
        ),
        (
            {"spec__prefill__tensorParallel": 4},
            "spec.prefill.tensorParallel is 4; the model's 9 heads and 3 KV heads allow 1, 3, 9",
        ),
        (
            {"spec__accelerator": {"type": "GPU"}},
            "spec.prefill.engine.kvCacheMemory is missing; with accelerator GPU it must be set",
        ),
        (
            {"spec__fabric": {"profile": "myrinet"}},
            "spec.fabric.profile is myrinet; known here: tcp, efa, roce, infiniband",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_both_numbers(changes: dict[str, Any], says: str) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        with pytest.raises(RoleConfigError) as caught:
            build(role, **changes)
        assert str(caught.value) == says


def test_kv_heads_are_shared_among_ranks_or_replicated() -> None:
    assert [sizing.rank_kv_heads(QWEN3_CODER, ranks) for ranks in (1, 4, 8, 16)] == [8, 2, 1, 1]
    for ranks in (1, 2, 4, 8, 16, 32):
        sizing.check_tensor_parallel(QWEN3_CODER, ranks, "decode")
    with pytest.raises(sizing.SizingError):
        sizing.check_tensor_parallel(QWEN3_CODER, 12, "decode")  # divides 96 heads, not 8 KV heads


def test_published_sizes_of_a_large_model() -> None:
    assert sizing.kv_token_nbytes(QWEN3_CODER, "bfloat16") == 253_952
    assert sizing.kv_token_nbytes(QWEN3_CODER, "bfloat16", tensor_parallel=8) == 31_744
    assert sizing.transfer_s(QWEN3_CODER, "bfloat16", 8192, nics=1, nic_gbit_per_s=400) == pytest.approx(
        0.0416, rel=1e-2
    )


def test_devices_are_counted_over_replicas_and_ranks() -> None:
    path = Path(__file__).parents[2] / "examples" / "qwen3-coder-480b.yaml"
    spec = load_manifest(path.read_text(), path.name).spec
    assert spec.prefill_replicas == 1
    assert sizing.total_gpus(spec) == 16
    assert sizing.replica_nics(spec, spec.decode, profile_nics_per_gpu=4) == 32
    assert sizing.total_gpus(model().spec) == 0


@pytest.mark.parametrize(("decode", "prefill"), [(0, 0), (1, 1), (3, 1), (4, 2), (12, 4)])
def test_prefill_follows_decode_by_the_ratio(decode: int, prefill: int) -> None:
    spec = model(
        spec__prefill={},
        spec__decode={"replicas": decode},
        spec__scaling={"ratio": {"prefill": 1, "decode": 3}},
    ).spec
    assert spec.prefill_replicas == prefill


def test_the_kv_key_changes_with_everything_that_gives_a_page_its_meaning() -> None:
    keys = {kv_key(SMOLLM2, "float32", 16), kv_key(SMOLLM2, "bfloat16", 16), kv_key(SMOLLM2, "float32", 32)}
    for field, value in [
        ("weights_id", "sha256:01"),
        ("layers", 31),
        ("kv_heads", 9),
        ("head_dim", 32),
        ("wire_version", 2),
    ]:
        keys.add(kv_key(SMOLLM2.model_copy(update={field: value}), "float32", 16))
    assert len(keys) == 8
    assert all(len(key) == 16 for key in keys)


def test_the_kv_key_is_equal_for_both_roles_whatever_their_pools() -> None:
    changes = {"spec__decode": {"engine": {"kvCacheMemory": "100Mi", "maxSequences": 3}}}
    assert build(Role.PREFILL, **changes).kv_key == build(Role.DECODE, **changes).kv_key


def test_the_embedded_mode_takes_the_manifest_of_the_demo() -> None:
    path = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
    assert unsupported_by_embedded(load_manifest(path.read_text(), path.name)) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"spec__model__uri": "oci://a"}, "spec.model.uri"),
        ({"spec__engine": {"speculative": {"method": "NGram"}}}, "spec.engine.speculative.method"),
        ({"spec__engine": {"kvCacheDtype": "float8_e4m3"}}, "spec.engine.kvCacheDtype"),
        ({"spec__prefill__dataParallel": 2}, "spec.prefill.dataParallel"),
        ({"spec__decode": {"dataParallel": 2}}, "spec.decode.dataParallel"),
        ({"spec__decode": {"tensorParallel": 3}}, "spec.prefill.tensorParallel"),
        ({"spec__accelerator": {"type": "GPU"}}, "spec.accelerator.type"),
        ({"spec__router": {"apiKeySecretRef": {"name": "key"}}}, "spec.router.apiKeySecretRef"),
        ({"spec__scaling": {"mode": "QPS", "targetQPS": 1, "maxReplicas": 2}}, "spec.scaling.mode"),
    ],
)
def test_the_embedded_mode_says_what_it_cannot_do(changes: dict[str, Any], field: str) -> None:
    (line,) = unsupported_by_embedded(model(**changes))
    assert line.startswith(f"{field} is ")
