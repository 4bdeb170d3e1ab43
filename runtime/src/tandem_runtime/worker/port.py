"""The worker port: `/health`, `/ready`, `/peer`, `/state`, `/metrics`.

Knows: HTTP. Does not know: where the answers come from (`WorkerFacts`).

`/health` says that the lead's loop moves; `/ready` that the model is loaded and the messenger listens: it
never depends on peers, or a prefill's death would take its decodes out of service. `/peer` hands a fabric
address to whoever holds the peer key.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping


class WorkerFacts(Protocol):
    """What the port serves."""

    @property
    def ready(self) -> bool: ...

    @property
    def fault(self) -> str | None: ...

    def state(self) -> dict[str, object]: ...

    def metrics(self) -> bytes: ...

    def peer(self, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]] | None:
        """Body and headers of an authenticated answer; None when the caller does not hold the peer key."""
        ...


class WorkerPort:
    """Serves `facts` on `host:port`; port 0 picks one."""

    def __init__(self, facts: WorkerFacts, host: str, port: int) -> None:
        self._facts = facts
        self._socket = socket.create_server((host, port))
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/peer", self._peer),
                web.get("/state", self._state),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        if self._facts.fault is not None:
            return web.json_response({"status": "fault", "fault": self._facts.fault}, status=503)
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        return web.json_response({"ready": self._facts.ready}, status=200 if self._facts.ready else 503)

    async def _peer(self, request: web.Request) -> web.Response:
        if not self._facts.ready:
            return web.json_response({"error": "not ready"}, status=503)
        answer = self._facts.peer(request.headers)
        if answer is None:
            return web.json_response({"error": "the peer key does not match"}, status=401)
        body, headers = answer
        return web.Response(body=body, headers=headers, content_type="application/json")

    async def _state(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._facts.state()), content_type="application/json")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._facts.metrics(), content_type="text/plain", charset="utf-8")
