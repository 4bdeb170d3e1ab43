"""The other end of the server's unix socket: a lead that answers each Submit as a test says."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING

import msgspec

from tandem_runtime.engine.request import FinishReason, TokenLogprobs
from tandem_runtime.framing import FrameBuffer, frame
from tandem_runtime.ipc import Abort, FromServer, Limits, Output, Report, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WAIT_S = 10.0


class ScriptedLead:
    """Runs its own loop in a thread. `script` maps a Submit to its outputs; a list without a finish leaves
    the request open until it is aborted. Every Submit gets exactly one final Output, as from the real lead.
    """

    def __init__(self, path: str, limits: Limits) -> None:
        self.script: Callable[[Submit], Iterable[Output]] = lambda submit: []
        self.submits: queue.Queue[Submit] = queue.Queue()
        self.aborts: queue.Queue[str] = queue.Queue()
        self.reports: queue.Queue[Report] = queue.Queue()
        self.hold_aborts = False  # do not end aborted requests: the test does
        self._limits = limits
        self._open: set[str] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_unix_server(self._serve, path))

    def submit(self) -> Submit:
        """The next request the server sent."""
        return self.submits.get(timeout=WAIT_S)

    def aborted(self) -> str:
        return self.aborts.get(timeout=WAIT_S)

    def report(self) -> Report:
        return self.reports.get(timeout=WAIT_S)

    def send(self, *outputs: Output) -> None:
        """More tokens for requests whose script left them open."""
        self._loop.call_soon_threadsafe(self._send, outputs)

    def reset(self) -> None:
        self.script = lambda submit: []
        for box in (self.submits, self.aborts, self.reports):
            while not box.empty():
                box.get_nowait()

    def hang_up(self) -> None:
        """End every connection, as a lead that dies does."""
        self._loop.call_soon_threadsafe(lambda: [writer.close() for writer in self._writers])

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            for writer in self._writers:
                writer.close()
            await asyncio.sleep(0)

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        writer.write(frame(msgspec.msgpack.encode(self._limits)))
        frames, decoder = FrameBuffer(), msgspec.msgpack.Decoder(FromServer)
        while data := await reader.read(1 << 16):
            for payload in frames.feed(data):
                self._receive(decoder.decode(payload))
        writer.close()
        self._writers.discard(writer)

    def _receive(self, message: Submit | Abort | Report) -> None:
        if isinstance(message, Submit):
            self._open.add(message.request_id)
            self.submits.put(message)
            self._send(self.script(message))
        elif isinstance(message, Abort):
            self.aborts.put(message.request_id)
            if message.request_id in self._open and not self.hold_aborts:
                self._send([Output(message.request_id, [], finish=FinishReason.ABORT)])
        else:
            self.reports.put(message)

    def _send(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                self._open.discard(output.request_id)
            for writer in self._writers:
                writer.write(frame(msgspec.msgpack.encode(output)))


def steps(
    submit: Submit,
    tokens: Iterable[int],
    finish: FinishReason | None = FinishReason.STOP,
    *,
    at_once: int = 1,
    **last: object,
) -> list[Output]:
    """One output per `at_once` tokens, the last one with `finish` and whatever `last` says. With logprobs
    where asked for: token t has -t/1000, and the most likely ones are ids 0, 1, 2 …"""
    tokens = list(tokens)
    groups = [tokens[i : i + at_once] for i in range(0, len(tokens), at_once)] or [[]]
    top = submit.params.logprobs
    return [
        Output(
            submit.request_id,
            group,
            logprobs=[]
            if top is None
            else [TokenLogprobs(-token / 1000, [(k, -float(k)) for k in range(top)]) for token in group],
            **({"finish": finish, **last} if i == len(groups) - 1 else {}),
        )
        for i, group in enumerate(groups)
    ]
