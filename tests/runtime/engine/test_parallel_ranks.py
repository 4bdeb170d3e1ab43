"""Ranks that share a model out: real processes, real gloo, the answers of the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from rank_processes import answer, role_config, start_ranks
from tiny_checkpoints import greedy, oracle, random_prompt, write_llama, write_qwen3

from tandem_crds.role_config import Role
from tandem_runtime.engine import parallel
from tandem_runtime.engine.step import Loaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHECKPOINTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    # 383 tokens do not divide by 2: the second rank's share of the head is smaller.
    "one-kv-head-each": (write_llama, {"vocab_size": 383, "attention_bias": True, "mlp_bias": True}),
    "one-kv-head-for-both": (write_qwen3, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_two_ranks_answer_as_the_whole_model(name: str, tmp_path: Path) -> None:
    write, config = CHECKPOINTS[name]
    checkpoint = write(tmp_path / "model", **config)
    with start_ranks(role_config(checkpoint, Role.DECODE, tensor_parallel=2), tmp_path) as ranks:
        by_rank = {}
        for rank in ranks:
            loaded = rank.loaded()
            assert isinstance(loaded, Loaded)
            by_rank[loaded.rank] = rank
            assert len(rank.fds) == (3 if loaded.rank == 0 else 1)
        prompt = [token % 383 for token in random_prompt(17)]
        expected = greedy(oracle(checkpoint), prompt, 8)
        assert answer([by_rank[0], by_rank[1]], prompt, 8) == expected


def test_one_rank_needs_nobody(tmp_path: Path) -> None:
    group = parallel.join(0, 1, tmp_path / "store", "cpu")
    tensor = torch.ones(3)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert not (tmp_path / "store").exists()
