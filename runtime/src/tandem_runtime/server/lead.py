"""The client of the pod's lead: requests out, tokens back, many HTTP calls over one connection.

Knows: the unix socket and which request belongs to which HTTP call. Does not know: text, HTTP.

    Call enters ─► Submit ──►┐            ┌──► Output ─► Call's queue ─► async for index, output in call
    Call.abort  ─► Abort  ──►┤ one socket ├──► Output ─► another Call's queue
                             └── lead ────┘

Every Submit ends in exactly one final Output, aborted ones too; an id is forgotten only then, so a token that
crosses an Abort on the wire finds its call, or is dropped on purpose when the call has left.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self, cast

import msgspec

from tandem_runtime.framing import FrameBuffer, frame
from tandem_runtime.ipc import Abort, Limits, Output, Report, Submit, ToServer

from .errors import LeadLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

logger = logging.getLogger(__name__)

CONNECT_RETRY_S = 0.05


class Call:
    """The requests that one HTTP call became, submitted on entry. Leaving the context aborts those still
    open."""

    def __init__(self, lead: Lead, submits: Sequence[Submit]) -> None:
        self._lead = lead
        self._submits = submits
        self._open: set[int] = set()
        self._queue: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()

    def __enter__(self) -> Self:
        for index, submit in enumerate(self._submits):
            self._lead.submit(submit, self, index)
            self._open.add(index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in self._open:
            self._lead.leave(self._submits[index].request_id)
        self._open.clear()

    def deliver(self, index: int, output: Output) -> None:
        self._queue.put_nowait((index, output))

    def lose(self) -> None:
        self._queue.put_nowait(None)

    def abort(self, index: int) -> None:
        """Ask the lead to stop one request; its last Output still comes through `outputs`."""
        if index in self._open:
            self._lead.abort(self._submits[index].request_id)

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Outputs in the order of arrival, until every request has ended. Raises LeadLost."""
        while self._open:
            item = await self._queue.get()
            if item is None:
                self._open.clear()  # a broken connection has aborted them
                raise LeadLost
            index, output = item
            if output.finish is not None:
                self._open.discard(index)
            yield index, output


class Lead(asyncio.Protocol):
    """`await Lead.connect(path)` gives a connected one with `limits` known. `lost` is set when the connection
    ends."""

    limits: Limits

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self._greeting: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
        # By request id; None where the call has left and the final Output has not come.
        self._calls: dict[str, tuple[Call, int] | None] = {}
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(ToServer)
        self._encoder = msgspec.msgpack.Encoder()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, path: str) -> Lead:
        """Connect and wait for the greeting. The lead may still be loading: wait as long as it takes, for the
        pod's main process watches both and this one dies with it. Raises LeadLost if the lead hangs up before
        it has greeted."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, lead = await loop.create_unix_connection(cls, path)
                break
            except (FileNotFoundError, ConnectionRefusedError):  # not listening yet
                await asyncio.sleep(CONNECT_RETRY_S)
        lead.limits = await lead._greeting
        return lead

    def call(self, submits: Sequence[Submit]) -> Call:
        return Call(self, submits)

    def submit(self, submit: Submit, call: Call, index: int) -> None:
        if self.lost.is_set():
            raise LeadLost
        self._calls[submit.request_id] = (call, index)
        self._send(submit)

    def abort(self, request_id: str) -> None:
        self._send(Abort(request_id))

    def leave(self, request_id: str) -> None:
        """Abort, and want nothing more of it."""
        if request_id in self._calls:
            self._calls[request_id] = None
            self.abort(request_id)

    def report(self, report: Report) -> None:
        self._send(report)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self, message: Submit | Abort | Report) -> None:
        if self._transport is not None and not self.lost.is_set():
            self._transport.write(frame(self._encoder.encode(message)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._receive(self._decoder.decode(payload))

    def _receive(self, message: ToServer) -> None:
        if isinstance(message, Limits):
            if not self._greeting.done():
                self._greeting.set_result(message)
            return
        if message.request_id not in self._calls:
            logger.error("the lead sent an output for the unknown request %s", message.request_id)
            return
        entry = self._calls[message.request_id]
        if message.finish is not None:
            del self._calls[message.request_id]
        if entry is not None:
            call, index = entry
            call.deliver(index, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        if not self._greeting.done():
            self._greeting.set_exception(LeadLost())
        for call in {entry[0] for entry in self._calls.values() if entry is not None}:
            call.lose()
        self._calls.clear()
