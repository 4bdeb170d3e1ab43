"""The router as a process: listen, serve, and on SIGTERM let open answers finish.

SIGINT ends it at once: whoever sends that is ending the workers, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from .app import Router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .config import RouterConfig

log = logging.getLogger("tandem.router")


def listen(config: RouterConfig) -> socket.socket:
    """Raises OSError when the port is taken."""
    return socket.create_server((config.host, config.port), backlog=1024)


@contextlib.asynccontextmanager
async def serving(router: Router, sock: socket.socket) -> AsyncIterator[web.SockSite]:
    runner = web.AppRunner(
        router.app(),
        access_log=None,
        auto_decompress=False,  # bodies pass as they are
        handler_cancellation=True,
        shutdown_timeout=0.5,
    )
    await runner.setup()
    try:
        site = web.SockSite(runner, sock)
        await site.start()
        yield site
    finally:
        await runner.cleanup()


async def run(config: RouterConfig, sock: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT. `sock` is what `listen` gave. Raises OSError and ApiKeysError."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Queue[signal.Signals] = asyncio.Queue()
    router = Router(config)
    async with serving(router, sock or listen(config)) as site:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.put_nowait, number)
        log.info("listening on %s", site.name)
        number = await stop.get()
        await site.stop()
        if number is signal.SIGTERM:
            log.info("draining for at most %g s", config.drain_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(router.idle.wait(), config.drain_s)
