"""`tandem up` as its user runs it: it serves, it ends when told to, and nothing of it outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from real_processes import children, descendants, manifest, module_of, running, until, write_manifest
from tiny_checkpoints import greedy, oracle, random_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.timeout(300, func_only=True)
TANDEM = Path(sys.executable).with_name("tandem")
SERVES_S = 180.0
ENDS_S = 20.0
OUTPUT = 6


class Up:
    """A running `tandem up`, and what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.said += line.decode()

    async def url(self) -> str:
        """Its API, once it says that it serves."""
        await until(lambda: "serving" in self.said or self._reader.done(), "it serves", SERVES_S)
        assert "serving" in self.said, self.said
        return next(line for line in self.said.splitlines() if "serving" in line).split()[-1]

    async def ended(self, pids: list[int]) -> int:
        """The exit status, once none of `pids` runs."""
        status = await asyncio.wait_for(self.process.wait(), ENDS_S)
        await until(lambda: not any(map(running, pids)), "none of its processes is left", 5)
        await self._reader
        return status

    def tree(self) -> list[int]:
        pids = descendants(self.process.pid)
        assert all(map(running, pids))
        return pids


@contextlib.asynccontextmanager
async def up(file: Path, *arguments: str) -> AsyncIterator[Up]:
    process = await asyncio.create_subprocess_exec(
        str(TANDEM), "up", str(file), "--port", "0", *arguments, stderr=asyncio.subprocess.PIPE
    )
    one = Up(process)
    try:
        yield one
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await one._reader


@pytest.fixture(scope="module")
def model_dir(tiny_qwen3: Path) -> Path:
    return tiny_qwen3


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[int]:
    return greedy(oracle(model_dir), random_prompt(40), OUTPUT)


async def answer(url: str) -> list[int]:
    body = {"model": "tiny", "prompt": random_prompt(40), "max_tokens": OUTPUT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/completions", json=body) as response:
        assert response.status == 200, await response.text()
        tokens: list[int] = (await response.json())["choices"][0]["token_ids"]
        return tokens


async def test_two_side_by_side_do_not_meet_and_leave_nothing_whether_interrupted_or_killed(
    model_dir: Path, expected: list[int], tmp_path: Path
) -> None:
    file = write_manifest(tmp_path / "model.yaml", manifest(model_dir))
    logs = [tmp_path / "first", tmp_path / "second"]
    async with up(file, "--log-dir", str(logs[0])) as first, up(file, "--log-dir", str(logs[1])) as second:
        assert await answer(await first.url()) == expected
        assert await answer(await second.url()) == expected
        first_pids, second_pids = first.tree(), second.tree()
        assert len(first_pids) == len(second_pids) == 8  # pods of three and four processes, and a router

        second.process.send_signal(signal.SIGKILL)
        assert await second.ended(second_pids) == -signal.SIGKILL
        assert await answer(await first.url()) == expected
        first.process.send_signal(signal.SIGINT)
        assert await first.ended(first_pids) == 0
    for directory in logs:
        assert {path.stem for path in directory.iterdir()} == {"router", "tiny-prefill-0", "tiny-decode-0"}
        assert (directory / "tiny-decode-0.log").read_text().count("attached to") == 1
        assert (directory / "tiny-prefill-0.log").read_text().count("is attached") == 1
        assert not [path for path in directory.iterdir() if "Traceback" in path.read_text()]


async def test_mixed_serves_and_a_workers_death_ends_it_with_that_workers_last_words(
    model_dir: Path, expected: list[int], tmp_path: Path
) -> None:
    file = write_manifest(tmp_path / "model.yaml", manifest(model_dir))
    async with up(file, "--mixed") as one:
        assert await answer(await one.url()) == expected
        pids = one.tree()
        (pod, _) = [pid for pid in children(one.process.pid) if module_of(pid) == "worker"]
        (rank,) = [pid for pid in children(pod) if module_of(pid) == "rank"]
        os.kill(rank, signal.SIGKILL)
        assert await one.ended(pids) == 1
    error = one.said[one.said.index("error: ") :]
    assert error.startswith("error: tiny-mixed-")
    assert "the rank 0 process ended by signal 9" in error
    assert "Traceback" not in error


async def test_sigterm_while_it_starts_ends_it_with_0(model_dir: Path, tmp_path: Path) -> None:
    file = write_manifest(tmp_path / "model.yaml", manifest(model_dir))
    async with up(file) as one:
        await until(lambda: len(descendants(one.process.pid)) >= 5, "its processes are starting", SERVES_S)
        pids = one.tree()
        one.process.terminate()
        assert await one.ended(pids) == 0
    assert "error" not in one.said


async def test_ask_answers_over_shm_on_stdout_and_ends(model_dir: Path, tmp_path: Path) -> None:
    file = write_manifest(tmp_path / "model.yaml", manifest(model_dir))
    process = await asyncio.create_subprocess_exec(
        str(TANDEM), "up", str(file), "--port", "0", "--provider", "shm", "--ask", "Why?",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(SERVES_S):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert output.decode().startswith("\nWhy?\n")
    assert "KV moved" in output.decode()
