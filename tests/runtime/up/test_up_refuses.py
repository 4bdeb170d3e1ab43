"""What cannot work is told in one line that names it, with exit status 2, and nothing is left running."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from real_processes import manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TANDEM = Path(sys.executable).with_name("tandem")
ENDS_S = 150
pytestmark = pytest.mark.timeout(600)


class Wrong(NamedTuple):
    """`prepare` gets a directory and a good model, and returns the command line after `tandem up`. In it, and
    in what is said, {directory} is that directory and {taken} a port that somebody listens on.
    """

    prepare: Callable[[Path, Path], list[str]]
    says: str


def changed(**changes: Any) -> Callable[[Path, Path], list[str]]:
    """A manifest with some of its `spec` replaced."""

    def prepare(directory: Path, model_dir: Path) -> list[str]:
        document = manifest(model_dir)
        document["spec"].update(changes)
        return [str(write_manifest(directory / "model.yaml", document))]

    return prepare


def options(*more: str) -> Callable[[Path, Path], list[str]]:
    """A good manifest, and `more`."""
    return lambda directory, model_dir: [
        str(write_manifest(directory / "model.yaml", manifest(model_dir))),
        *more,
    ]


def text(content: bytes) -> Callable[[Path, Path], list[str]]:
    def prepare(directory: Path, _: Path) -> list[str]:
        (directory / "model.yaml").write_bytes(content)
        return [str(directory / "model.yaml")]

    return prepare


def cut_short(directory: Path, model_dir: Path) -> list[str]:
    copy = Path(shutil.copytree(model_dir, directory / "cut-short"))
    weights = sorted(copy.glob("*.safetensors"))[0]
    with weights.open("r+b") as stream:
        stream.truncate(weights.stat().st_size - 1000)
    return [str(write_manifest(directory / "model.yaml", manifest(copy)))]


def without_a_tensor(directory: Path, model_dir: Path) -> list[str]:
    """A well-formed checkpoint without model.norm.weight, which its header calls otherwise."""
    copy = Path(shutil.copytree(model_dir, directory / "incomplete"))
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(b'"model.norm.weight"', b'"model.morn.weight"')
    assert header != content[8 : 8 + length]
    weights.write_bytes(content[:8] + header + content[8 + length :])
    return [str(write_manifest(directory / "model.yaml", manifest(copy)))]


WRONG = {
    "an unknown field": Wrong(changed(replica=3), "spec.replica"),
    "tensor parallelism that does not divide the heads": Wrong(
        changed(decode={"tensorParallel": 3}), "spec.decode.tensorParallel"
    ),
    "a missing model": Wrong(changed(model={"uri": "file:///no/such/model"}), "/no/such/model"),
    "a claim without a directory": Wrong(changed(model={"uri": "pvc://models/x"}), "add --volume models=DIR"),
    "a volume that is no directory": Wrong(
        options("--volume", "models={directory}/none"), "{directory}/none"
    ),
    "truncated weights": Wrong(cut_short, "model.safetensors"),
    "a missing tensor": Wrong(without_a_tensor, "model.norm.weight"),
    "a taken port": Wrong(options("--port", "{taken}"), "port {taken} "),
    "a port that is none": Wrong(options("--port", "99999"), "99999"),
    "an unknown provider": Wrong(options("--provider", "carrier-pigeon"), "carrier-pigeon"),
    "a log directory that is a file": Wrong(
        options("--log-dir", "{directory}/model.yaml"), "{directory}/model.yaml"
    ),
    "a file that does not exist": Wrong(
        lambda directory, _: [str(directory / "none.yaml")], "{directory}/none.yaml"
    ),
    "a directory for a file": Wrong(lambda directory, _: [str(directory)], "{directory}"),
    "YAML that cannot be parsed": Wrong(text(b"spec: {a: [1, 2\nkind"), "{directory}/model.yaml"),
    "bytes that are no text": Wrong(text(b"\xff\xfe\x00"), "{directory}/model.yaml"),
    "an empty file": Wrong(text(b""), "{directory}/model.yaml"),
}


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


class Outcome(NamedTuple):
    status: int | None
    output: str
    errors: str
    values: dict[str, object]


@pytest.fixture(scope="module")
def outcomes(tiny_qwen3: Path, taken: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All of them, as many at a time as there are cores: most of each is the start of Python."""

    async def run(name: str, wrong: Wrong, cores: asyncio.Semaphore) -> tuple[str, Outcome]:
        directory = tmp_path_factory.mktemp("refused")
        values: dict[str, object] = {"directory": directory, "taken": taken}
        arguments = [word.format(**values) for word in wrong.prepare(directory, tiny_qwen3)]
        if "--port" not in arguments:
            arguments += ["--port", "0"]
        async with cores, asyncio.timeout(ENDS_S):
            process = await asyncio.create_subprocess_exec(
                str(TANDEM), "up", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            output, errors = await process.communicate()  # both pipes end only when no child holds them
        return name, Outcome(process.returncode, output.decode(), errors.decode(), values)

    async def run_all() -> dict[str, Outcome]:
        cores = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        return dict(await asyncio.gather(*(run(name, wrong, cores) for name, wrong in WRONG.items())))

    return asyncio.run(run_all())


@pytest.mark.parametrize("name", WRONG)
def test_tandem_up_refuses(name: str, outcomes: dict[str, Outcome]) -> None:
    status, output, errors, values = outcomes[name]
    told = [line for line in errors.splitlines() if not line.startswith("[")]  # not progress: "[  1.2 s] ..."
    assert status == 2, errors
    assert len(told) == 1, errors
    assert told[0].startswith("error: ")
    assert WRONG[name].says.format(**values) in told[0]
    assert output == ""
