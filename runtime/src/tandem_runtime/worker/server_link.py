"""The lead's end of the HTTP server process: requests in, outputs out, over a unix socket.

Knows: `ipc.py` and which connection submitted what. Does not know: scheduling. A connection that closes
aborts what it submitted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..framing import LENGTH, frame
from ..ipc import Abort, FromServer, Limits, Output, Report, Submit

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE_NBYTES = 1 << 28


class SubmissionHandler(Protocol):
    """What the engine loop does with a server's messages."""

    def submit(self, submit: Submit) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def report(self, report: Report) -> None: ...


class ServerLink:
    """Accepts server connections; greets each with `Limits` once the model is loaded."""

    def __init__(self, handler: SubmissionHandler) -> None:
        self._handler = handler
        self._limits: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
        self._owners: dict[str, asyncio.StreamWriter] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accepted, path=str(path))

    def greet(self, limits: Limits) -> None:
        self._limits.set_result(limits)

    def send(self, output: Output) -> None:
        """Outputs of a request whose server is gone are dropped: nobody waits for them."""
        writer = self._owners.get(output.request_id)
        if output.finish is not None:
            self._owners.pop(output.request_id, None)
        if writer is not None and not writer.is_closing():
            writer.write(frame(self._encoder.encode(output)))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            writer.write(frame(self._encoder.encode(await asyncio.shield(self._limits))))
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MAX_MESSAGE_NBYTES:
                    raise ConnectionError(f"message of {length} bytes")
                match self._decoder.decode(await reader.readexactly(length)):
                    case Submit() as submit:
                        self._owners[submit.request_id] = writer
                        self._handler.submit(submit)
                    case Abort(request_id):
                        self._handler.abort(request_id)
                    case Report() as report:
                        self._handler.report(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the server ended; the pod's main process decides what that means
        finally:
            self._connections.discard(task)
            for request_id in [key for key, owner in self._owners.items() if owner is writer]:
                del self._owners[request_id]
                self._handler.abort(request_id)
            writer.close()
