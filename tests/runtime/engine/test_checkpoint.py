"""A model directory is read without reading a weight, and what is wrong with it is one line that names the
file.
"""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
import tiny_checkpoints
from safetensors import safe_open
from transformers import AutoConfig

from tandem_runtime.engine import checkpoint
from tandem_runtime.engine.checkpoint import CheckpointError, read_config, tensors, weights_id
from tandem_runtime.engine.model_config import RopeScaling
from tandem_runtime.models.facts import local_facts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def copy_of_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """In shards, so that there is an index to break."""
    return shutil.copytree(tiny_llama, tmp_path / "llama")


def write_config(directory: Path, **changes: Any) -> Path:
    """None deletes a key."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3"])
def test_a_configuration_says_what_transformers_reads_from_it(
    name: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(name)
    ours, theirs = read_config(path), AutoConfig.from_pretrained(path)
    assert ours.architecture == theirs.architectures[0]
    assert ours.layers == theirs.num_hidden_layers
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == theirs.head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == theirs.attention_bias
    assert ours.qk_norm == (theirs.model_type == "qwen3")
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.dtype == str(theirs.dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("architecture", "model_type"), [("LlamaForCausalLM", "llama"), ("Qwen3ForCausalLM", "qwen3")]
)
def test_keys_that_are_left_out_mean_what_transformers_takes_them_for(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    heads = {"num_attention_heads": 32} if model_type == "qwen3" else {}
    write_config(tmp_path, architectures=[architecture], model_type=model_type, torch_dtype=None, **heads)
    ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.rms_norm_eps, ours.rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert (ours.tie_word_embeddings, ours.attention_bias) == (
        theirs.tie_word_embeddings,
        theirs.attention_bias,
    )


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "keys",
    [
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 64, **SCALING},
        },
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", "original_max_position_embeddings": 64, **SCALING},
        },
        {
            "rope_parameters": {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "original_max_position_embeddings": 64,
                **SCALING,
            }
        },
    ],
)
def test_llama3_scaling_is_read_as_transformers_4_and_5_write_it(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    config = read_config(write_config(tmp_path, **keys))
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 64))


def test_default_rope_parameters_mean_no_scaling(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}))
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ids"),
    [(7, None, (7,)), ([7, 8], None, (7, 8)), (7, [8, 9], (8, 9)), (None, 9, (9,)), (None, None, ())],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, in_config: Any, in_generation: Any, ids: tuple[int, ...]
) -> None:
    write_config(tmp_path, eos_token_id=in_config)
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert read_config(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architectures[0] is 'MambaForCausalLM'; supported: LlamaForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": None}, "architectures is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'; Input should be a valid integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; Input should be greater than 0"),
        ({"hidden_size": 65}, "hidden_size is 65; without head_dim it must be a multiple"),
        ({"head_dim": 15}, "head_dim is 15; it must be even"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads (4)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; supported: float32, bfloat16, float16"),
        ({"use_sliding_window": True}, "use_sliding_window is True; supported: false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method is 'fp8'"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_scaling.rope_type is 'yarn'; supported: default, llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "rope_scaling of type llama3 needs factor, low_freq_factor",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"eos_token_id": 100}, "eos_token_id is 100; token ids are 0 to 99"),
    ],
)
def test_what_the_engine_would_compute_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    message = refusal(lambda: read_config(write_config(tmp_path, **changes)))
    assert message.startswith(f"{tmp_path / 'config.json'}: {says}")


def test_tensors_are_found_where_safetensors_finds_them(tiny_llama: Path) -> None:
    found = tensors(tiny_llama)
    shards = {tensor.file for tensor in found.values()}
    assert len(shards) > 1
    count = 0
    for shard in shards:
        with safe_open(shard, "pt") as stream:
            for name in stream.keys():  # noqa: SIM118  # not a mapping
                value, tensor = stream.get_tensor(name), found[name]
                assert tensor.shape == tuple(value.shape)
                with shard.open("rb") as raw:
                    raw.seek(tensor.offset)
                    assert raw.read(tensor.nbytes) == value.numpy().tobytes()
                count += 1
    assert count == len(found)


def test_a_single_file_needs_no_index(tiny_qwen3: Path) -> None:
    assert {tensor.file.name for tensor in tensors(tiny_qwen3).values()} == {"model.safetensors"}


def first_shard(path: Path) -> Path:
    return min(path.glob("model-*.safetensors"))


def truncate(path: Path) -> None:
    shard = first_shard(path)
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)


def cut_in_the_header(path: Path) -> None:
    with first_shard(path).open("r+b") as stream:
        stream.truncate(20)


def empty(path: Path) -> None:
    first_shard(path).write_bytes(b"")


def not_safetensors(path: Path) -> None:
    first_shard(path).write_bytes(b"PK\x03\x04" + bytes(1000))


def broken_json(path: Path) -> None:
    first_shard(path).write_bytes(struct.pack("<Q", 4) + b"{{{{")


def wrong_size(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    first_shard(path).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def overlap(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    first_shard(path).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "so it is cut short or damaged"),
        (cut_in_the_header, "not a safetensors file, or cut short (20 bytes)"),
        (empty, "not a safetensors file, or cut short (0 bytes)"),
        (not_safetensors, "not a safetensors file, or cut short"),
        (broken_json, "unreadable safetensors header"),
        (wrong_size, "a has 8 bytes; F32 [3] needs 12"),
        (overlap, "b begins at byte"),
        (lambda path: first_shard(path).unlink(), "missing; model.safetensors.index.json names it"),
    ],
)
def test_a_damaged_weight_file_is_named(
    copy_of_llama: Path, damage: Callable[[Path], None], says: str
) -> None:
    shard = first_shard(copy_of_llama)
    damage(copy_of_llama)
    for read in (lambda: tensors(copy_of_llama), lambda: local_facts(copy_of_llama, "file:///x")):
        message = refusal(read)
        assert message.startswith(f"{shard}: ")
        assert says in message


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(copy_of_llama: Path) -> None:
    index = copy_of_llama / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.surplus"] = first_shard(copy_of_llama).name
    index.write_text(json.dumps(content))
    assert refusal(lambda: tensors(copy_of_llama)) == (
        f"{index}: tensor model.surplus is not in {first_shard(copy_of_llama).name}"
    )


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "", 3])
def test_an_index_may_name_only_files_of_its_directory(copy_of_llama: Path, name: object) -> None:
    index = copy_of_llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert refusal(lambda: tensors(copy_of_llama)).startswith(f"{index}: weight_map['a'] is {name!r}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(copy_of_llama: Path, name: str) -> None:
    (copy_of_llama / name).unlink()
    assert refusal(lambda: local_facts(copy_of_llama, "file:///x")) == f"{copy_of_llama / name}: missing"


def test_a_directory_without_weights_or_no_directory_at_all_is_refused(tmp_path: Path) -> None:
    assert refusal(lambda: read_config(tmp_path / "no")) == f"{tmp_path / 'no'}: no such directory"
    assert "no model.safetensors" in refusal(lambda: tensors(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert refusal(lambda: read_config(tmp_path)).startswith(f"{tmp_path / 'config.json'}: not JSON")
    (tmp_path / "config.json").write_text("[]")
    assert "a JSON object is expected" in refusal(lambda: read_config(tmp_path))


def test_facts_add_up(tiny_llama: Path) -> None:
    facts = local_facts(tiny_llama, "pvc://models/tiny")
    model = tiny_checkpoints.oracle(tiny_llama)
    assert facts.weights_nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert facts.vocab_size == tiny_checkpoints.VOCAB_SIZE
    assert facts.eos_token_ids == [tiny_checkpoints.EOS]
    assert facts.has_chat_template


def test_weights_are_known_by_config_tokenizer_and_headers_but_not_by_their_path(
    tiny_llama: Path, copy_of_llama: Path
) -> None:
    same = weights_id(tiny_llama)
    assert same == weights_id(copy_of_llama)
    config = json.loads((copy_of_llama / "config.json").read_text())
    (copy_of_llama / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    other = weights_id(copy_of_llama)
    (copy_of_llama / "tokenizer.json").write_text("{}")
    assert len({same, other, weights_id(copy_of_llama)}) == 3


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": "{}"}, None),
        ({"tokenizer_config.json": '{"chat_template": "a"}'}, "a"),
        ({"tokenizer_config.json": '{"chat_template": "a"}', "chat_template.jinja": "b"}, "b"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "tool_use", "template": "t"},
                            {"name": "default", "template": "d"},
                        ]
                    }
                )
            },
            "d",
        ),
    ],
)
def test_a_chat_template_may_lie_in_several_places(
    tmp_path: Path, files: dict[str, str], template: str | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert checkpoint.chat_template(tmp_path) == template
