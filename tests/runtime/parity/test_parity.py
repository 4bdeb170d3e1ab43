"""Greedy token ids equal transformers', whatever path the KV took: mixed or split, net or shm, in small chunks or at once, cold or
from the prefix index, alone or in a crowd, and after preemption.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from local_worker import Deployment, deployed, role_config
from tandem_crds.role_config import Role
from tiny_checkpoints import greedy, oracle, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = (1, 2, 15, 16, 17, 33, 300)
OUTPUT = 48
PATHS = ("mixed", "net", "shm")
CHUNKS = (16, 64, 1000)
CROWD = 16


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"tiny_{request.param}")
    return path


@pytest.fixture(scope="session")
def expected(model_dir: Path) -> dict[int, list[int]]:
    """What transformers answers to the prompt of each length, and to the crowd's."""
    model = oracle(model_dir)
    return {length: greedy(model, random_prompt(length), OUTPUT) for length in LENGTHS}


def configs(model_dir: Path, path: str, chunk: int, **limits: int) -> dict[str, object]:
    limits = {"max_batched_tokens": chunk, "max_sequences": CROWD, **limits}
    if path == "mixed":
        return {"mixed": role_config(model_dir, Role.MIXED, **limits)}
    return {
        "prefill": role_config(model_dir, Role.PREFILL, path, **limits),
        "decode": role_config(model_dir, Role.DECODE, path, **limits),
    }


async def matches(deployment: Deployment, expected: dict[int, list[int]]) -> None:
    """Each prompt alone, then all of them in one crowd."""
    for length in LENGTHS:
        answer = await deployment.decode.generate(random_prompt(length))
        assert answer.tokens == expected[length], f"prompt of {length} tokens, alone"
    crowd = [LENGTHS[index % len(LENGTHS)] for index in range(CROWD)]
    answers = await asyncio.gather(*(deployment.decode.generate(random_prompt(length)) for length in crowd))
    for length, answer in zip(crowd, answers, strict=True):
        assert answer.tokens == expected[length], f"prompt of {length} tokens, in a crowd of {CROWD}"


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("path", PATHS)
async def test_greedy_ids_equal_transformers(
    model_dir: Path, expected: dict[int, list[int]], path: str, chunk: int, tmp_path: Path
) -> None:
    async with deployed(configs(model_dir, path, chunk), tmp_path) as deployment:
        await matches(deployment, expected)  # cold, then (in the crowd) from the prefix index
        hit = await deployment.decode.generate(random_prompt(300))
        assert hit.tokens == expected[300]
        assert hit.last.cached_tokens == 288, "299 tokens are whole pages up to 288"
        await deployment.quiet()
