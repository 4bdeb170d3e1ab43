"""How an answer leaves: whole, or as server-sent events; and what a client that goes away stops.

    deltas ─► Answer words them ─► event bytes ─► EventStream ─► socket
                                                  └─ watches for the client leaving: cancels, which aborts

A stream's status is decided by its first event: until there is one, an error is an HTTP error, afterwards it
is an event and the stream ends without a finish reason and without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response

from .errors import ApiError, GenerationFailed
from .generate import Delta
from .tally import CLIENT_GONE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

    from starlette.types import Receive, Scope, Send

    from tandem_runtime.ipc import Timing

    from .answer import Usage
    from .generate import Generation
    from .tally import Tally

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Answer(Protocol):
    """How one endpoint words a generation."""

    @property
    def stream(self) -> bool: ...
    def chunks(self, delta: Delta) -> Sequence[msgspec.Struct]: ...
    def tail(self, usage: Usage, timing: Timing | None) -> msgspec.Struct | None: ...
    def whole(self, choices: list[Delta], usage: Usage, timing: Timing | None) -> msgspec.Struct: ...


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; the moment the client leaves, cancel it and raise ClientGone. The request's body must have
    been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(generation: Generation, num_choices: int) -> list[Delta]:
    """Each choice's deltas joined to one."""
    parts: list[list[Delta]] = [[] for _ in range(num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            parts[delta.index].append(delta)
    return [
        Delta(
            index=index,
            text="".join(delta.text for delta in own),
            tokens=[token for delta in own for token in delta.tokens],
            finish=own[-1].finish,
        )
        for index, own in enumerate(parts)
    ]


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


async def events(generation: Generation, answer: Answer) -> AsyncGenerator[bytes]:
    """One item per step that has something to say, then the tail with usage and timing, then [DONE]."""
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            chunks = [event(msgspec.json.encode(chunk)) for chunk in answer.chunks(delta)]
            if chunks:
                yield b"".join(chunks)
    tail = answer.tail(generation.usage, generation.timing)
    yield (event(msgspec.json.encode(tail)) if tail is not None else b"") + event(b"[DONE]")


class EventStream(Response):
    """Sends `first`, then the rest of `events`. `ended` is called once, however it ends: before the last
    byte, so that whoever has the whole answer finds it in the metrics."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes],
        headers: dict[str, str],
        tally: Tally,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._tally = tally
        self._ended: Callable[[], None] | None = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        except ClientGone:
            self._tally.status, self._tally.finish = CLIENT_GONE, "abort"
        finally:
            await self._rest.aclose()
            self._end()

    async def _send(self, send: Send) -> None:
        async def body(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await body(self._first)
        try:
            async for data in self._rest:
                await body(data)
        except ApiError as error:
            self._tally.finish = "error"
            await body(event(error.body()))
        except Exception:  # fault boundary: a defect of ours ends this stream, and the client is told
            logger.exception("a stream failed")
            self._tally.finish = "error"
            await body(event(GenerationFailed(500, "Internal error.").body()))
        self._end()
        await body(b"", more=False)

    def _end(self) -> None:
        if self._ended is not None:
            self._ended()
            self._ended = None
