"""Two prefill and two decode pods, kept for all tests of a provider; each test finds them repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from real_deployment import Deployment, Oracle, deployed
from real_processes import manifest
from tiny_checkpoints import write_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(scope="session")
def expected(slow_model: Path) -> Oracle:
    return Oracle(slow_model)


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, but with wide heads: a long prompt has 16 MB of KV, and in steps of 16 tokens takes a second."""
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    directory = tmp_path_factory.mktemp("checkpoints") / "slow-llama"
    return write_llama(directory, max_position_embeddings=4096, **sizes)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["net", "shm"])
async def everlasting(
    request: pytest.FixtureRequest,
    slow_model: Path,
    expected: Oracle,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Deployment]:
    directory = tmp_path_factory.mktemp(request.param)  # the pods' logs stay there
    document = manifest(slow_model, prefill=2, decode=2, chunk=16, memory="48Mi")
    async with deployed(document, directory, expected, request.param) as deployment:
        yield deployment


@pytest_asyncio.fixture(loop_scope="session")
async def deployment(everlasting: Deployment) -> Deployment:
    await everlasting.repair()
    return everlasting
