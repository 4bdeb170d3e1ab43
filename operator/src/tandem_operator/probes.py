"""`/healthz`, `/readyz` and `/metrics` for the kubelet and Prometheus.

Knows: when the process is of no use any more. Does not know: how it came so.

Healthy: the watch delivers and the queue moves; a standby is healthy. Ready: what the operator needs of the
cluster is there, and a first list succeeded; a standby is ready, so that a rollout of the operator can end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .watch_freshness import MUTE_S

if TYPE_CHECKING:
    from .metrics import Metrics
    from .watch_freshness import WatchFreshness
    from .work_queue import WorkQueue

PORT = 8080
STUCK_S = 300.0  # that a model waits for a free worker


@dataclass(slots=True)
class Health:
    """Of this process; `obstacle` is why it is not ready, empty when it is."""

    queue: WorkQueue[tuple[str, str]]
    fresh: WatchFreshness
    obstacle: str = "starting"
    leading: bool = field(default=False)

    def illness(self) -> str:
        """Why a restart is wanted; empty when it is not."""
        if self.fresh.mute_s > MUTE_S:
            return f"the watch has not delivered for {self.fresh.mute_s:.0f} s what a list shows"
        if self.queue.oldest_s > STUCK_S:
            return f"a model has waited {self.queue.oldest_s:.0f} s for its pass"
        return ""


async def serve(health: Health, metrics: Metrics, host: str = "", port: int = PORT) -> web.AppRunner:
    """Runs until `cleanup()` of what it returns. Raises OSError if the port is taken."""

    async def healthz(_: web.Request) -> web.Response:
        illness = health.illness()
        return web.Response(status=500 if illness else 200, text=illness or "ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=503 if health.obstacle else 200, text=health.obstacle or "ok")

    async def numbers(_: web.Request) -> web.Response:
        metrics.queue_depth.set(len(health.queue))
        metrics.queue_oldest_seconds.set(health.queue.oldest_s)
        metrics.watch_mute_seconds.set(health.fresh.mute_s)
        metrics.leading.set(health.leading)
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", numbers)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host or None, port).start()
    return runner
