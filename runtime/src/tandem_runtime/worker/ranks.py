"""The lead's end of its rank processes: load them, hand them steps, collect results.

Knows: sockets, file descriptors, the order of messages. Does not know: requests, pages, transfers.

    lead                                     rank i
      listen(rank.sock)  ◄──── connect ────
                         ◄──── Loading × n
                         ◄──── Loaded + memfds (SCM_RIGHTS)
      step() ──── Step ────────────────────►  one forward pass
                         ◄──── StepResult

All ranks get the same step and all of them answer; rank 0's tokens count, any rank's error is the step's
error. A rank whose connection closes is dead, and so is the pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..engine.step import FromRank, Loaded, LoadFailed, Loading, Shutdown, Step, StepResult
from ..framing import FrameBuffer, frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECEIVE_NBYTES = 1 << 18
MAX_FDS = 3


class RankError(RuntimeError):
    """A rank broke the protocol or died."""


class LoadError(RankError):
    """The model cannot be served as configured; the message is the rank's one line."""


@dataclass(slots=True, eq=False)
class _Link:
    connection: socket.socket
    buffer: FrameBuffer = field(default_factory=FrameBuffer)
    messages: asyncio.Queue[FromRank | None] = field(default_factory=asyncio.Queue)
    fds: list[int] = field(default_factory=list)
    loaded: Loaded | None = None


class RankGroup:
    """`count` ranks, connected to the unix socket at `path`."""

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(count)
        self._listener.setblocking(False)
        self._links: list[_Link] = []
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._encoder = msgspec.msgpack.Encoder()
        self.weights_nbytes = 0
        self.progress = 0.0  # of loading, 0 to 1

    async def load(self, on_progress: Callable[[float], None]) -> None:
        """Returns when every rank is ready. Raises RankError with the rank's own line when one cannot be."""
        done: dict[int, tuple[int, int]] = {}

        async def follow(link: _Link) -> None:
            while link.loaded is None:
                match await link.messages.get():
                    case Loading(done_nbytes, total_nbytes):
                        done[id(link)] = (done_nbytes, total_nbytes)
                        total = sum(t for _, t in done.values()) * self.count / len(done)
                        self.progress = sum(d for d, _ in done.values()) / total if total else 0.0
                        on_progress(self.progress)
                    case Loaded() as loaded:
                        link.loaded = loaded
                    case LoadFailed(message):
                        raise LoadError(message)
                    case None:
                        raise RankError("a rank process ended while it loaded the model")
                    case StepResult():
                        raise RankError("a rank sent a result before it was loaded")

        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.count):
                    connection, _ = await self._loop.sock_accept(self._listener)
                    link = _Link(connection)
                    self._links.append(link)
                    connection.setblocking(False)
                    self._loop.add_reader(connection, self._read, link)
                    group.create_task(follow(link))
        except* RankError as errors:
            failure = errors.exceptions[0]  # raised below: what is raised in here would come out as a group
        if failure is not None:
            raise failure
        self._links.sort(key=lambda link: _loaded(link).rank)
        self.weights_nbytes = sum(_loaded(link).weights_nbytes for link in self._links)
        self.progress = 1.0
        on_progress(1.0)

    def pool_fds(self) -> list[tuple[int, int]]:
        """Each rank's KV pool, in rank order: memfd and bytes."""
        return [(link.fds[0], _loaded(link).pool_nbytes) for link in self._links]

    def counter_fds(self) -> tuple[int, int]:
        """Rank 0's layer counter: memfd and eventfd."""
        fds = self._links[0].fds
        return fds[1], fds[2]

    def pids(self) -> list[int]:
        return [_loaded(link).pid for link in self._links]

    async def step(self, step: Step) -> StepResult:
        """Runs one pass on all ranks. Raises RankError when a rank is gone."""
        payload = frame(self._encoder.encode(step))
        for link in self._links:
            try:
                await self._loop.sock_sendall(link.connection, payload)
            except OSError as error:
                raise RankError(f"rank {_loaded(link).rank} is gone: {error}") from error
        results = [await self._result(link, step.step_id) for link in self._links]
        for rank, result in enumerate(results):
            if result.error is not None:
                message = f"rank {rank}: {result.error}" if self.count > 1 else result.error
                return msgspec.structs.replace(results[0], error=message, fatal=result.fatal)
        return results[0]

    async def close(self) -> None:
        """Asks the ranks to exit and closes what they lent us."""
        payload = frame(self._encoder.encode(Shutdown()))
        for link in self._links:
            self._loop.remove_reader(link.connection)
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(link.connection, payload)
            link.connection.close()
            for fd in link.fds:
                os.close(fd)
        self._listener.close()

    async def _result(self, link: _Link, step_id: int) -> StepResult:
        message = await link.messages.get()
        if message is None:
            raise RankError(f"rank {_loaded(link).rank} (pid {_loaded(link).pid}) ended")
        if not isinstance(message, StepResult) or message.step_id != step_id:
            raise RankError(f"rank {_loaded(link).rank} answered step {step_id} with {message!r:.200}")
        return message

    def _read(self, link: _Link) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(link.connection, RECEIVE_NBYTES, MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        link.fds.extend(fds)
        if not data:
            self._loop.remove_reader(link.connection)
            link.messages.put_nowait(None)
            return
        for payload in link.buffer.feed(data):
            link.messages.put_nowait(self._decoder.decode(payload))


def _loaded(link: _Link) -> Loaded:
    assert link.loaded is not None
    return link.loaded
