"""The router's HTTP face: `/v1/*` goes to the workers; health and metrics are its own.

/health     the loop moves
/ready      the list of workers is known, be it empty: without workers clients get a JSON 503, not a refusal
/serving    a worker is ready and paired now
/metrics    arrivals, answers, open requests
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiohttp import web

from ..peer_source import peer_source
from .api_keys import ApiKeys
from .errors import NoSuchRoute, RouterError, Unauthorized
from .metrics import RouterMetrics
from .proxy import Proxy, upstream_session
from .workers import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler

    from .config import RouterConfig

CLIENT_LEFT = 499  # told to nobody; only counted


class Router:
    """The handlers and what they share. Raises ApiKeysError when the keys cannot be read, ValueError when
    no source of workers is named.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._keys = None if config.api_keys is None else ApiKeys(config.api_keys)
        self.workers = Workers(peer_source(config.peers or "", config.selector), config)
        self._metrics = RouterMetrics(self.workers)
        self._proxy: Proxy | None = None
        self.open = 0
        self.idle = asyncio.Event()  # no request is open
        self.idle.set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[tell_as_json], client_max_size=self._config.max_body_nbytes)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/serving", self._serving),
                web.get("/metrics", self._render_metrics),
                web.route("*", "/v1/{path:.*}", self._api),
            ]
        )
        app.cleanup_ctx.append(self._follow_workers)
        return app

    async def _follow_workers(self, _: web.Application) -> AsyncIterator[None]:
        keep_authorization = self._keys is None  # a key of ours is none of the worker's business
        async with upstream_session(self._config) as session:
            self._proxy = Proxy(self.workers, session, self._metrics, keep_authorization=keep_authorization)
            watching = asyncio.create_task(self.workers.watch())
            yield
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _api(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        self.idle.clear()
        status = CLIENT_LEFT
        try:
            response = await self._answer(request)
            status = response.status
            return response
        finally:
            self._metrics.requests.labels(code=str(status)).inc()
            self.open -= 1
            if not self.open:
                self.idle.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert self._proxy is not None
        try:
            if self._keys is not None and not self._keys.allow(request.headers.get("Authorization")):
                raise Unauthorized
            self._metrics.arrivals.inc()
            return await self._proxy.forward(request)
        except RouterError as error:
            return error.response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        ready = self.workers.listed
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _serving(self, _: web.Request) -> web.Response:
        serving = self.workers.serving
        return web.json_response({"serving": serving}, status=200 if serving else 503)

    async def _render_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), content_type="text/plain", charset="utf-8")


@web.middleware
async def tell_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """aiohttp's own refusals (no such route, wrong method) in the shape of all other errors."""
    try:
        return await handler(request)
    except web.HTTPException as refusal:
        return NoSuchRoute(refusal, request.method, request.path).response()


def build_app(config: RouterConfig) -> web.Application:
    """Serve it with `handler_cancellation=True`: a client that leaves must cancel its handler."""
    return Router(config).app()
