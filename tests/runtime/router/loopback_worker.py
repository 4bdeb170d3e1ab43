"""A decode worker as a router sees it: real sockets, `/state`, and `/v1/*` in pieces that a test releases.

As a program it is a process to kill: it prints its addresses; its arguments are the pieces of its one answer.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass, field

from aiohttp import web

HALF_EVENT = b'data: {"half":'


@dataclass
class LoopbackWorker:
    pod: str
    ready: bool = True
    paired: bool = True
    draining: bool = False
    outstanding: int = 0
    address: str = ""
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    pieces: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client's handler was cancelled

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.get("/state", self._state), web.route("*", "/v1/{name:.*}", self._answer)])
        self._runner = web.AppRunner(
            app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        host, bound = self._runner.addresses[0][:2]
        self.address = f"{host}:{bound}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    @property
    def addresses(self) -> dict[str, str]:
        return {
            "pod": self.pod,
            "uid": f"uid-{self.pod}",
            "role": "decode",
            "worker": self.address,
            "server": self.address,
        }

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": 1,
                "role": "decode",
                "ready": self.ready,
                "paired": self.paired,
                "draining": self.draining,
                "requests": {"running": 0, "outstanding": self.outstanding},
                "something": "newer",
            }
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.method, request.raw_path, headers, await request.read()))
        try:
            match request.match_info["name"]:
                case "stream":  # pieces as the test gives them; None ends the answer
                    return await self._stream(request, {"Content-Type": "text/event-stream"})
                case "headers":  # headers at once, then as above
                    return await self._stream(request, {"Content-Type": "text/event-stream"}, early=True)
                case "json":  # a part of a body of known length
                    headers = {"Content-Type": "application/json", "Content-Length": "100"}
                    return await self._stream(request, headers)
                case "teapot":
                    headers = {
                        "X-Mood": "short",
                        "Connection": "X-Hop",
                        "X-Hop": "secret",
                        "Retry-After": "7",
                    }
                    return web.Response(status=418, body=b"\x00\x01teapot", headers=headers)
                case "compressed":
                    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
                    return web.Response(body=b"not really gzip", headers=headers)
                case "empty":
                    return web.Response(status=204)
                case _:
                    return web.json_response({"pod": self.pod})
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _stream(
        self, request: web.Request, headers: dict[str, str], *, early: bool = False
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        if early:
            await response.prepare(request)
        while (piece := await self.pieces.get()) is not None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)
        return response


async def main(pieces: list[str]) -> None:
    worker = LoopbackWorker("process")
    for piece in pieces:
        worker.pieces.put_nowait(piece.encode())
    await worker.start()
    print(json.dumps(worker.addresses), flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await worker.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
