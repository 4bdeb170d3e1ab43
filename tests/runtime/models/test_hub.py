"""`hf://` against a hub on loopback: facts without weights, downloads that go on, errors that say what to
do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import published
import pytest
from local_hub import COMMIT, Hub, Repository, local_hub, part, size

from tandem_crds.role_config import ModelFacts
from tandem_crds.sizing import kv_token_nbytes
from tandem_runtime.models.fetch import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TINY = "hf://tandem/tiny"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with local_hub() as hub:
        yield hub


@pytest.fixture
def tiny(hub: Hub, tiny_llama: Path) -> Repository:
    files = {file.name: file.read_bytes() for file in tiny_llama.iterdir() if file.is_file()}
    hub.repositories["tandem/tiny"] = Repository(files)  # type: ignore[arg-type]
    return hub.repositories["tandem/tiny"]


def run(hub: Hub, tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its environment when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "TMPDIR": str(tmp_path), "HOME": "/nonexistent"}
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**kept, **own, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def inspected(hub: Hub, tmp_path: Path, uri: str, *words: str, **env: str) -> ModelFacts:
    done = run(hub, tmp_path, "tandem_runtime.cli", "inspect", uri, *words, **env)
    assert done.returncode == 0, done.stderr
    return ModelFacts.model_validate_json(done.stdout)


def test_facts_are_those_of_the_local_files_and_the_commit_identifies_them(
    hub: Hub, tiny: Repository, tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = inspected(hub, tmp_path, TINY)
    local = inspected(hub, tmp_path, f"file://{tiny_llama}")
    assert facts.weights_id == COMMIT
    assert facts == local.model_copy(update={"uri": TINY, "weights_id": COMMIT})


def test_deepseek_r1_is_sized_without_a_weight(hub: Hub, tmp_path: Path) -> None:
    hub.repositories = published.fleet()
    facts = inspected(hub, tmp_path, published.R1_URI)
    assert (facts.layers, facts.heads, facts.kv_latent, facts.head_dim) == (61, 128, 576, 192)
    assert 680e9 < facts.weights_nbytes < 700e9
    # 70 KB a token, on every rank: what MLA is for.
    assert kv_token_nbytes(facts, "bfloat16", 8) == kv_token_nbytes(facts, "bfloat16", 1) == 61 * 576 * 2
    assert "architectures[0] is 'DeepseekV3ForCausalLM'" in facts.engine_refuses


def test_qwen3_480b_needs_its_token(hub: Hub, tmp_path: Path) -> None:
    hub.repositories = published.fleet()
    facts = inspected(hub, tmp_path, published.QWEN3_URI, HF_TOKEN="hf_secret")
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.kv_latent) == (62, 8, 128, 0)
    assert 950e9 < facts.weights_nbytes < 970e9
    assert kv_token_nbytes(facts, "bfloat16", 8) == 62 * 2 * 128 * 2
    refused = run(hub, tmp_path, "tandem_runtime.cli", "inspect", published.QWEN3_URI, HF_TOKEN="hf_other")
    assert refused.returncode == 2
    assert "hf_" not in refused.stderr.replace("hf://", "")


@pytest.mark.parametrize(
    ("uri", "words", "says"),
    [
        ("hf://tandem/absent", (), "no such model, or a private one"),
        ("hf://tandem/gated", (), "gated: ask for access there"),
        (TINY, ("--revision", "v9"), "it has no revision v9"),
        ("hf://tandem/pickled", (), "only safetensors are supported"),
        ("hf://tandem", (), "expected hf://ORG/NAME"),
    ],
)
def test_what_a_hub_refuses_is_said_in_one_line(
    hub: Hub, tiny: Repository, tmp_path: Path, uri: str, words: tuple[str, ...], says: str
) -> None:
    hub.repositories["tandem/gated"] = Repository(tiny.files, token="hf_x", gated=True)
    config = {"config.json": tiny.files["config.json"], "pytorch_model.bin": b"x"}
    hub.repositories["tandem/pickled"] = Repository(config)
    message = tmp_path / "message"
    done = run(hub, tmp_path, "tandem_runtime.cli", "inspect", uri, *words, "--termination-log", str(message))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {uri}")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert message.read_text() == done.stderr.removeprefix("error: ").rstrip("\n")


def test_a_hub_that_is_away_is_named(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "tandem_runtime.cli", "inspect", TINY, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2
    assert f"{TINY} at http://127.0.0.1:9" in done.stderr


def tiny_files(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir() if file.is_file())


def fetched(hub: Hub, tmp_path: Path, into: Path, **env: str) -> subprocess.CompletedProcess[str]:
    words = (TINY, "--revision", COMMIT, "--into", str(into))
    return run(hub, tmp_path, "tandem_runtime.models.fetch", *words, **env)


def test_a_download_is_whole_and_the_second_needs_no_hub(
    hub: Hub, tiny: Repository, tmp_path: Path, tiny_llama: Path
) -> None:
    tiny.files["original/consolidated.pth"] = tiny.files["flax.msgpack"] = b"other formats"
    into = tmp_path / "cache" / COMMIT
    first = fetched(hub, tmp_path, into)
    assert first.returncode == 0, first.stderr
    assert "fetching hf://tandem/tiny" in first.stderr
    for name in tiny_files(tiny_llama):
        assert (into / name).read_bytes() == (tiny_llama / name).read_bytes()
    assert not (into / "original").exists()
    assert not (into / "flax.msgpack").exists()
    before = len(hub.asked)
    again = fetched(hub, tmp_path, into)
    assert (again.returncode, len(hub.asked)) == (0, before)


def test_a_download_that_was_cut_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    shard = "model-00001-of-000001.safetensors"
    hub.repositories["tandem/tiny"] = published.repository(published.QWEN3_CONFIG, 1, ("F32", (8, 10**6)))
    file = hub.repositories["tandem/tiny"].files[shard]
    cut = size(file) // 2
    hub.cut[shard] = cut
    into = tmp_path / "cache" / COMMIT
    for _ in range(2):
        done = fetched(hub, tmp_path, into)
        if done.returncode == 0:
            break
        assert not (into / WHOLE).exists()
    assert (into / shard).read_bytes() == part(file, 0, size(file))
    begins = [int(rang.removeprefix("bytes=").split("-")[0]) for rang in hub.served(shard) if rang]
    assert any(0 < begin <= cut for begin in begins), "nothing of the first half was kept"


def test_pods_that_share_a_volume_fetch_once(hub: Hub, tiny: Repository, tmp_path: Path) -> None:
    into = tmp_path / "cache" / COMMIT
    words = [
        sys.executable,
        "-m",
        "tandem_runtime.models.fetch",
        TINY,
        "--revision",
        COMMIT,
        "--into",
        str(into),
    ]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "TMPDIR": str(tmp_path)}
    pods = [subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [pod.wait(timeout=120) for pod in pods] == [0, 0, 0]
    assert all(len(hub.served(name)) == 1 for name in tiny.files if name.endswith(".safetensors"))


def test_a_volume_that_is_too_small_is_said_before_anything_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["tandem/tiny"] = published.fleet()["deepseek-ai/DeepSeek-R1"]
    free = shutil.disk_usage(tmp_path).free
    assert free < 600e9
    done = fetched(hub, tmp_path, tmp_path / "cache" / COMMIT)
    assert done.returncode == 1
    assert "GB are still to be fetched" in done.stderr
    assert "spec.model.cache" in done.stderr
    assert not any(hub.served(name) for name in hub.repositories["tandem/tiny"].files)


def test_facts_of_a_model_that_the_engine_cannot_compute_still_need_their_fields(
    hub: Hub, tmp_path: Path
) -> None:
    config = {name: value for name, value in published.R1_CONFIG.items() if name != "hidden_size"}
    hub.repositories["tandem/tiny"] = published.repository(config, 1, ("BF16", (2, 2)))
    done = run(hub, tmp_path, "tandem_runtime.cli", "inspect", TINY)
    assert done.returncode == 2
    assert "hidden_size is missing" in done.stderr
