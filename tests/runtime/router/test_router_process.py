"""The router as a process: how it starts, how it ends, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from typing import TYPE_CHECKING

import aiohttp
from loopback_worker import LoopbackWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LIMIT_S = 30.0


@contextlib.asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem_runtime.router", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def logged(process: asyncio.subprocess.Process, words: str) -> str:
    """The next log line that has `words` in it."""
    assert process.stderr is not None
    async for line in process.stderr:
        if words in line.decode():
            return line.decode()
    raise AssertionError(f"the router ended without saying {words!r}")


@contextlib.asynccontextmanager
async def streaming(
    tmp_path: Path,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, LoopbackWorker, aiohttp.ClientResponse]]:
    """A router in the middle of a stream: the first event has reached the client."""
    peers = tmp_path / "peers.json"
    worker = LoopbackWorker("a")
    await worker.start()
    peers.write_text(json.dumps({"workers": [worker.addresses]}))
    worker.pieces.put_nowait(b"data: 0\n\n")
    try:
        async with started("--peers", str(peers)) as process, aiohttp.ClientSession() as session:
            url = (await logged(process, "listening on")).split()[-1]
            await logged(process, "usable: True")
            async with session.get(url + "/serving") as response:
                assert response.status == 200
            async with session.post(url + "/v1/stream", data=b"{}") as response:
                assert await response.content.readany() == b"data: 0\n\n"
                yield process, worker, response
    finally:
        await worker.stop()


async def test_sigterm_lets_an_open_stream_finish(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (process, worker, response):
        process.terminate()
        await logged(process, "draining")
        worker.pieces.put_nowait(b"data: 1\n\n")
        worker.pieces.put_nowait(None)
        assert await response.content.read() == b"data: 1\n\n"
        assert await process.wait() == 0


async def test_sigint_ends_it_at_once(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (process, worker, _):
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        await worker.left.wait()


async def test_a_taken_port_is_named_and_ends_it_with_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with started("--peers", str(tmp_path / "peers.json"), "--port", str(port)) as process:
            _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ".encode())
    assert len(errors.splitlines()) == 1


async def test_keys_that_cannot_be_read_are_named_and_end_it_with_2(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    async with started("--peers", str(tmp_path / "peers.json"), "--api-keys", str(keys)) as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors == f"error: API keys {keys}: No such file or directory\n".encode()
