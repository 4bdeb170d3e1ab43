"""A checkpoint that is not exactly what the model needs is refused in one line."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_llama, write_qwen3

from tandem_runtime.engine import weights
from tandem_runtime.engine.checkpoint import CheckpointError, read_config
from tandem_runtime.engine.models import build
from tandem_runtime.engine.parallel import Group

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tandem_runtime.engine.models.llama import LlamaForCausalLM

CPU = torch.device("cpu")


def load(directory: Path, group: Group | None = None) -> tuple[LlamaForCausalLM, list[tuple[int, int]]]:
    """The model before its weights are packed, and what the progress callback heard."""
    model = build(read_config(directory), group or Group(), torch.float32, CPU)
    heard: list[tuple[int, int]] = []
    weights.load(model.parts(), directory, lambda done, total: heard.append((done, total)))
    return model, heard


@pytest.fixture
def checkpoint(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """A copy of a one-file checkpoint, to be broken."""
    return shutil.copytree(tiny_qwen3, tmp_path / "model")


def rewrite(directory: Path, changed: dict[str, Tensor], *, without: str = "") -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != without}
    save_file(tensors | changed, file, metadata={"format": "pt"})


def test_progress_counts_every_byte_once(tiny_llama: Path) -> None:
    _, heard = load(tiny_llama)
    done = [step for step, _ in heard]
    assert done == sorted(set(done))
    total = sum(
        tensor.nbytes for file in tiny_llama.glob("*.safetensors") for tensor in load_file(file).values()
    )
    assert heard[-1] == (total, total)


def test_joined_projections_hold_their_tensors_in_order(tiny_qwen3: Path) -> None:
    model, _ = load(tiny_qwen3)
    tensors = load_file(tiny_qwen3 / "model.safetensors")
    prefix = "model.layers.1."
    joined = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(model.layers[1].attention.qkv.matrix.weight, torch.cat(joined))
    joined = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(model.layers[1].mlp.gate_up.matrix.weight, torch.cat(joined))


def test_the_shards_of_all_ranks_make_the_whole(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "model", attention_bias=True, num_key_value_heads=2)
    whole, _ = load(directory)
    for size in (2, 4):
        ranks = [load(directory, Group(rank, size))[0] for rank in range(size)]
        o = torch.cat([rank.layers[0].attention.o.matrix.weight for rank in ranks], dim=1)
        assert torch.equal(o, whole.layers[0].attention.o.matrix.weight)
        head = torch.cat([rank.head.matrix.weight for rank in ranks])
        assert torch.equal(head, whole.head.matrix.weight)
        q, k, _ = whole.layers[0].attention.qkv.matrix.weight.split([64, 32, 32])
        parts = [rank.layers[0].attention.qkv.matrix.weight for rank in ranks]
        assert torch.equal(torch.cat([part[: 64 // size] for part in parts]), q)
        # Four ranks and two KV heads: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1.
        keys = [part[64 // size : 64 // size + 16] for part in parts]
        expected = [k[16 * (rank * 2 // size) :][:16] for rank in range(size)]
        assert all(torch.equal(key, e) for key, e in zip(keys, expected, strict=True))


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(checkpoint, {}, without=name)
    with pytest.raises(CheckpointError, match=re.escape(f"{checkpoint}: tensor {name} is missing")):
        load(checkpoint)


def test_an_unknown_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, {"model.extra.weight": torch.zeros(2)})
    message = f"{checkpoint / 'model.safetensors'}: tensor model.extra.weight is unknown to this architecture"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(checkpoint, {name: torch.zeros(64, 95)})
    message = f"tensor {name} is [64, 95]; config.json makes it [64, 96]"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(checkpoint)


def test_integer_weights_are_refused(checkpoint: Path) -> None:
    name = "model.norm.weight"
    rewrite(checkpoint, {name: torch.ones(64, dtype=torch.int32)})
    message = f"tensor {name} is I32; supported: F64, F32, F16, BF16"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(checkpoint)


def test_a_second_copy_of_a_tied_head_and_old_frequencies_are_ignored(checkpoint: Path) -> None:
    extra = {
        "lm_head.weight": torch.zeros(384, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    rewrite(checkpoint, extra)
    load(checkpoint)


def test_half_precision_weights_become_the_compute_type(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    rewrite(checkpoint, halved)
    model, _ = load(checkpoint)
    assert model.embedding.weight.dtype == torch.float32
    assert torch.equal(model.embedding.weight, halved["model.embed_tokens.weight"].float())


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "tensorParallel is 3; it must divide num_attention_heads (4)"),
        (8, "tensorParallel is 8; it must divide num_attention_heads (4)"),
    ],
)
def test_ranks_that_cannot_share_the_heads_evenly_are_refused(
    tiny_llama: Path, size: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(tiny_llama, Group(0, size))


def test_ranks_that_cannot_share_the_kv_heads_evenly_are_refused(tmp_path: Path) -> None:
    directory = write_qwen3(tmp_path / "model", num_attention_heads=6, num_key_value_heads=3)
    message = "tensorParallel is 2; it must divide num_key_value_heads (3) or be a multiple of it"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(directory, Group(0, 2))
