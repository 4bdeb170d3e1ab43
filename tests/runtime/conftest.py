"""Checkpoints shared by the runtime's tests. Its place puts tests/runtime on the import path, so `import
tiny_checkpoints` works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Llama in three weight files."""
    from tiny_checkpoints import write_llama

    return write_llama(tmp_path_factory.mktemp("checkpoints") / "tiny-llama", shards=2)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied dense Qwen3."""
    from tiny_checkpoints import write_qwen3

    return write_qwen3(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3", tie_word_embeddings=True)
