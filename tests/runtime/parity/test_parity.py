"""Greedy token ids equal transformers', whatever path the KV took: mixed or split, net or shm, in small
chunks or at once, cold or from the prefix index, alone or in a crowd, and after preemption.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest
from local_worker import Deployment, deployed, role_config
from tiny_checkpoints import greedy, oracle, random_prompt

from tandem_crds.role_config import Role

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


@pytest.mark.parametrize("path", PATHS)
async def test_preempted_requests_go_on_where_they_were(
    model_dir: Path, expected: dict[int, list[int]], path: str, tmp_path: Path
) -> None:
    """Ten requests that grow to 6 pages each share 30 pages: some must give theirs back and come again."""
    async with deployed(configs(model_dir, path, 64, pages=30), tmp_path) as deployment:
        prompts = [random_prompt(33)] * 5 + [random_prompt(17)] * 5
        answers = await asyncio.gather(*(deployment.decode.generate(prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == expected[len(prompt)]
        assert deployment.decode.lead._scheduler.num_preemptions > 0
        await deployment.quiet()


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_each_page_of_each_layer_is_written_exactly_once_and_prefill_samples_nothing(
    tiny_llama: Path, chunk: int, tmp_path: Path
) -> None:
    async with deployed(configs(tiny_llama, "net", chunk), tmp_path) as deployment:
        layers, page_tokens, pages = 2, 16, 0
        for length in LENGTHS:
            await deployment.decode.generate(random_prompt(length), max_tokens=2)
            pages += -(-(length - 1) // page_tokens)
        await deployment.decode.generate(random_prompt(300), max_tokens=2)
        pages += 1  # 288 of 299 tokens are cached on decode
        await deployment.quiet()
        written = deployment.prefill.lead._fabric.stats()
        counted = deployment.decode.lead._fabric.stats()
        assert written.writes_posted == counted.immediates == layers * pages
        assert written.writes_failed == counted.immediates_stale == counted.immediates_unknown == 0
        metrics = deployment.prefill.lead.metrics().decode()
        assert re.search(r"^vllm:generation_tokens_total\{.*\} 0\.0$", metrics, re.MULTILINE)


@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_that_fills_the_pool_is_served_and_a_larger_one_refused(
    tiny_llama: Path, path: str, tmp_path: Path
) -> None:
    async with deployed(configs(tiny_llama, path, 64, pages=8), tmp_path) as deployment:
        answer = await deployment.decode.generate(random_prompt(127), max_tokens=1)
        assert len(answer.tokens) == 1
        refused = await deployment.decode.generate(random_prompt(130), max_tokens=1)
        assert refused.last.status == 400
        assert refused.last.error
        await deployment.quiet()
