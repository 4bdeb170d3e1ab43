"""A real model answers as transformers does, token for token: SmolLM2-135M-Instruct, in fp32, over every
path.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from local_worker import Deployment, deployed, role_config
from tiny_checkpoints import greedy, oracle

from tandem_crds.role_config import Role
from tandem_runtime.server.tokenizer import Tokenizer
from tandem_runtime.up.demo_model import default_cache_dir, ensure_demo_model

if TYPE_CHECKING:
    from pathlib import Path

OUTPUT = 16
QUESTIONS = {
    "capital": "What is the capital of France?",
    "sum": "What is 2 + 2?",
    "colours": "Name three colours.",
    "long": "Summarize this in one sentence. " + "The quick brown fox jumps over the lazy dog. " * 30,
}


@dataclass(frozen=True)
class Way:
    """How the KV travels: `provider` None is mixed."""

    provider: str | None
    chunk: int


WAYS = {
    "mixed in one chunk": Way(None, 1000),
    "split over net in small chunks": Way("net", 64),
    "split over shm in one chunk": Way("shm", 1000),
}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return ensure_demo_model(default_cache_dir())


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.load(smollm2)

    def ids(text: str) -> list[int]:
        chat = tokenizer.render_chat([{"role": "user", "content": text}], {})
        return asyncio.run(tokenizer.encode(chat, add_special_tokens=False))

    return {name: ids(text) for name, text in QUESTIONS.items()}


@pytest.fixture(scope="session")
def expected(smollm2: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    model = oracle(smollm2)
    return {name: greedy(model, prompt, OUTPUT) for name, prompt in prompts.items()}


def configs(model: Path, way: Way) -> dict[str, object]:
    limits = {"max_batched_tokens": way.chunk, "max_model_len": 1024, "pages": 128}
    if way.provider is None:
        return {"mixed": role_config(model, Role.MIXED, **limits)}
    return {
        "prefill": role_config(model, Role.PREFILL, way.provider, **limits),
        "decode": role_config(model, Role.DECODE, way.provider, **limits),
    }


async def check(deployment: Deployment, prompt: list[int], expected: list[int]) -> None:
    answer = await deployment.decode.generate(prompt, max_tokens=OUTPUT)
    assert answer.tokens == expected


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_smollm2_answers_as_transformers_does(
    smollm2: Path,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    way: Way,
    tmp_path: Path,
) -> None:
    """Per way: each question cold, one again from the prefix index, and all of them at once."""
    async with deployed(configs(smollm2, way), tmp_path) as deployment:
        for name in QUESTIONS:
            await check(deployment, prompts[name], expected[name])
        await check(deployment, prompts["long"], expected["long"])
        await asyncio.gather(*(check(deployment, prompts[name], expected[name]) for name in QUESTIONS))
        await deployment.quiet()
