"""Greedy token ids of every model must equal those of transformers in fp32, however the passes are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from driver import Driver, greedy_params
from tiny_checkpoints import LLAMA3_ROPE, greedy, oracle, random_prompt, write_llama, write_qwen3

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTHS = (1, 2, 15, 16, 17, 33, 300)
TOKENS = 48
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (write_llama, {}),
    "llama-tied-with-biases": (
        write_llama,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-with-scaled-rope": (write_llama, {"rope_parameters": LLAMA3_ROPE}),
    "llama-with-odd-heads": (
        write_llama,
        {"hidden_size": 96, "head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "llama-without-groups": (write_llama, {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 5e5}}),
    "qwen3": (write_qwen3, {}),
    "qwen3-tied-with-biases": (write_qwen3, {"tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint_and_answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, list[int]]]:
    write, config = MODELS[request.param]
    checkpoint = write(tmp_path_factory.mktemp(request.param) / "model", **config)
    model = oracle(checkpoint)
    return checkpoint, {length: greedy(model, random_prompt(length), TOKENS) for length in LENGTHS}


@pytest.mark.parametrize("chunk", [16, 64, 1000])
def test_each_prompt_alone_is_answered_as_transformers_answers_it(
    checkpoint_and_answers: tuple[Path, dict[int, list[int]]], chunk: int
) -> None:
    checkpoint, answers = checkpoint_and_answers
    driver = Driver(checkpoint)
    for length in LENGTHS:
        job = driver.add(random_prompt(length), greedy_params(TOKENS))
        driver.run(chunk)
        assert job.output == answers[length], f"prompt of {length} tokens"


@pytest.mark.parametrize("chunk", [16, 64, 1000])
def test_sixteen_at_once_are_answered_as_transformers_answers_each(
    checkpoint_and_answers: tuple[Path, dict[int, list[int]]], chunk: int
) -> None:
    checkpoint, answers = checkpoint_and_answers
    driver = Driver(checkpoint)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(16)]
    jobs = [driver.add(random_prompt(length), greedy_params(TOKENS)) for length in lengths]
    driver.run(chunk)
    for length, job in zip(lengths, jobs, strict=True):
        assert job.output == answers[length], f"prompt of {length} tokens"
