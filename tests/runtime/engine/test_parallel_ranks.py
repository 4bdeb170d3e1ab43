"""Ranks that share a model out: real processes, real gloo, the answers of the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from driver import Driver, greedy_params
from tiny_checkpoints import greedy, oracle, random_prompt, write_llama

from tandem_runtime.engine import parallel

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue
    from pathlib import Path

PROMPTS = (2, 33)
TOKENS = 6


def serve(checkpoint: Path, rank: int, size: int, store: Path, answers: SimpleQueue[object]) -> None:
    """One rank: computes the prompts in a mixed batch, then puts what it produced."""
    torch.set_num_threads(1)
    group = parallel.join(rank, size, store, "cpu")
    driver = Driver(checkpoint, group=group)
    jobs = [driver.add(random_prompt(length), greedy_params(TOKENS)) for length in PROMPTS]
    while any(len(job.output) < TOKENS for job in jobs):
        driver.step(24)
        # Rank 0 alone draws; a lead would send its tokens to everyone with the next step.
        for job in jobs:
            drawn = torch.tensor(job.output, dtype=torch.long)
            torch.distributed.broadcast(drawn, 0)
            job.output[:] = drawn.tolist()
    answers.put((rank, driver.layout.kv_heads, [job.output for job in jobs]))
    group.close()


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (4, 1)])
def test_ranks_answer_as_the_whole_model_even_where_they_outnumber_the_kv_heads(
    tmp_path: Path, size: int, kv_heads: int
) -> None:
    # 383 tokens do not divide by 2 or 4: the last rank's share of the head is smaller.
    checkpoint = write_llama(tmp_path / "model", vocab_size=383, attention_bias=True, mlp_bias=True)
    model = oracle(checkpoint)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=serve, args=(checkpoint, rank, size, tmp_path / "store", answers))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    results = [answers.get() for _ in ranks]
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    expected = [greedy(model, random_prompt(length), TOKENS) for length in PROMPTS]
    assert sorted(rank for rank, _, _ in results) == list(range(size))
    for _, held, output in results:
        assert held == kv_heads
        assert output == expected


def test_one_rank_needs_nobody(tmp_path: Path) -> None:
    group = parallel.join(0, 1, tmp_path / "store", "cpu")
    tensor = torch.ones(3)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert not (tmp_path / "store").exists()
