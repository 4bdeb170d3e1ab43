"""Carry one request to a worker and its answer back, byte for byte and as the bytes come.

Knows: HTTP on both sides. Does not know: what the bytes mean, but for the end of a broken event stream.

    read the body ─► choose a worker ─► connect ─► send ─► first byte of the answer ─► the rest
                          ▲               │          │                │                  │
                          └──another──────┘        502              502        event stream: an error event
                                                                               else: the connection breaks

A request goes to another worker only when the first refused the connection, for then nothing of it was sent.
So each request has a fresh connection: on a reused one a worker's death would look the same before and after.

The status is told to the client only with the first byte of the answer's body, so that a worker's death
before it is a 502 and not an empty success. When the client leaves, its handler is cancelled, which closes
the connection to the worker: that is how the worker learns it.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from yarl import URL

from .errors import BodyTooLarge, NoWorker, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .config import RouterConfig
    from .metrics import RouterMetrics
    from .workers import Worker, Workers

log = logging.getLogger("tandem.router")

HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
FROM_CLIENT_ONLY = HOP_BY_HOP | {"host", "content-length", "expect"}  # ours to say

# A worker's machine that vanishes closes no connection; only unanswered probes show it.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 2, 3


def upstream_session(config: RouterConfig) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, limit=0, socket_factory=_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


class Proxy:
    def __init__(
        self,
        workers: Workers,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        *,
        keep_authorization: bool,
    ) -> None:
        self._workers = workers
        self._session = session
        self._metrics = metrics
        self._dropped = FROM_CLIENT_ONLY if keep_authorization else FROM_CLIENT_ONLY | {"authorization"}

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Raises RouterError for what is to be told instead of an answer."""
        body = await _read_body(request)
        headers = _passed_on(request.headers, self._dropped)
        refused: list[Worker] = []
        while (worker := self._workers.choose(refused)) is not None:
            url = URL(f"http://{worker.addresses.server}{request.rel_url.raw_path_qs}", encoded=True)
            worker.outstanding += 1
            try:
                upstream = await self._session.request(
                    request.method, url, headers=headers, data=body, allow_redirects=False
                )
                try:
                    return await self._answer(request, upstream, worker)
                finally:
                    upstream.close()
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                self._lost(worker, "connect", error)
                refused.append(worker)
            except aiohttp.ClientError as error:
                self._lost(worker, "before_first_byte", error)
                raise WorkerLost from error
            finally:
                worker.outstanding -= 1
        raise NoWorker

    async def _answer(
        self, request: web.Request, upstream: aiohttp.ClientResponse, worker: Worker
    ) -> web.StreamResponse:
        """Raises aiohttp.ClientError only while the client has been told nothing."""
        chunk = await upstream.content.readany()
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=_passed_on(upstream.headers, HOP_BY_HOP)
        )
        try:
            await response.prepare(request)
            while chunk:
                await response.write(chunk)
                try:
                    chunk = await upstream.content.readany()
                except aiohttp.ClientError as error:
                    self._lost(worker, "after_first_byte", error)
                    await _break_off(request, upstream, response)
                    return response
            await response.write_eof()
        except ConnectionResetError:
            log.debug("the client of %s left", request.path)  # before its handler could be cancelled
        return response

    def _lost(self, worker: Worker, when: str, error: Exception) -> None:
        log.warning("worker %s failed (%s): %s: %s", worker.addresses.pod, when, type(error).__name__, error)
        self._metrics.upstream_errors.labels(when=when).inc()
        self._workers.lost(worker)


async def _read_body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLarge(request.client_max_size) from None


def _passed_on(headers: Mapping[str, str], dropped: frozenset[str]) -> list[tuple[str, str]]:
    """The end-to-end headers: neither `dropped` nor named by `Connection`. A name may occur twice."""
    pairs = [(name.lower(), name, value) for name, value in headers.items()]
    named = {
        word.strip().lower() for key, _, value in pairs if key == "connection" for word in value.split(",")
    }
    return [(name, value) for key, name, value in pairs if key not in dropped and key not in named]


async def _break_off(
    request: web.Request, upstream: aiohttp.ClientResponse, response: web.StreamResponse
) -> None:
    """End an answer that its worker left unfinished so that it cannot be taken for a whole one."""
    if upstream.content_type == "text/event-stream":
        # The blank line closes an event that was cut in the middle; after a whole one it means nothing.
        await response.write(b"\n\ndata: " + WorkerLost().body() + b"\n\n")
        await response.write_eof()
    elif request.transport is not None:
        request.transport.abort()


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    return sock
