from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest
import tokenizers
from serving import Server, make_limits, write_model

from tandem_runtime.server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripted_lead import ScriptedLead


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="session")
def vocabulary(model_dir: Path) -> tokenizers.Tokenizer:
    """The library's own view of the same file, to compare with."""
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def eos(vocabulary: tokenizers.Tokenizer) -> int:
    return vocabulary.token_to_id("<|im_end|>")


@pytest.fixture(scope="session")
def _server(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, vocabulary: tokenizers.Tokenizer, eos: int
) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("run"), model_dir, make_limits(vocabulary.get_vocab_size(), eos))
    yield server
    server.close()
    log = server.log.read_text()
    assert "Traceback" not in log, log
    assert " ERROR " not in log, log
    assert server.process.returncode == 0, log


@pytest.fixture
def server(_server: Server) -> Server:
    _server.settle()
    return _server


@pytest.fixture
def lead(server: Server) -> ScriptedLead:
    return server.lead


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client
