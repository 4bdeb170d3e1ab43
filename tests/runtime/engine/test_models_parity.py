"""Greedy token ids of every model must equal those of transformers in fp32, however the passes are cut."""

from __future__ import annotations

from functools import cache
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


# The whole grid for one of each family; for the others the batch that mixes all lengths.
GRID = [(name, chunk) for name in ("llama", "qwen3-tied-with-biases") for chunk in (16, 64, 1000)]
Answers = tuple["Path", dict[int, list[int]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """Checkpoint and transformers' answers of a model, made once."""

    @cache
    def ask(name: str) -> Answers:
        write, config = MODELS[name]
        checkpoint = write(tmp_path_factory.mktemp(name) / "model", **config)
        model = oracle(checkpoint)
        return checkpoint, {length: greedy(model, random_prompt(length), TOKENS) for length in LENGTHS}

    return ask


@pytest.mark.parametrize(("name", "chunk"), GRID)
def test_each_prompt_alone_is_answered_as_transformers_answers_it(
    answers: Callable[[str], Answers], name: str, chunk: int
) -> None:
    checkpoint, expected = answers(name)
    driver = Driver(checkpoint)
    for length in LENGTHS:
        job = driver.add(random_prompt(length), greedy_params(TOKENS))
        driver.run(chunk)
        assert job.output == expected[length], f"prompt of {length} tokens"


@pytest.mark.parametrize(
    ("name", "chunk"), [*GRID, *((name, 64) for name in MODELS if name not in dict(GRID))]
)
def test_sixteen_at_once_are_answered_as_transformers_answers_each(
    answers: Callable[[str], Answers], name: str, chunk: int
) -> None:
    checkpoint, expected = answers(name)
    driver = Driver(checkpoint)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(16)]
    jobs = [driver.add(random_prompt(length), greedy_params(TOKENS)) for length in lengths]
    driver.run(chunk)
    for length, job in zip(lengths, jobs, strict=True):
        assert job.output == expected[length], f"prompt of {length} tokens"
