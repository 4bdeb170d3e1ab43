"""The operator's process: `python -m tandem_operator.main --settings FILE`.

Knows: the order of starting and stopping. Does not know: what a pass does.

    settings ─► API server ─► CRD served? ─► verbs granted? ─► ready ─► Lease ─► watch, workers, resync
    SIGTERM  ─► the queue closes, passes under way end ─► the watch stops ─► the Lease is given back

Exit codes: 0 stopped by a signal; 1 the watch or the Lease was lost (the kubelet starts another); 2 wrong
settings or flags.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kubernetes.aio import config

from . import access_review, served_schema
from .desired import desired
from .handlers import WATCHED, Watch
from .kube import KubeError, NotFound
from .kube_api import KubeApi
from .lease import Held, Identity, Lease
from .metrics import Metrics
from .objects import MODEL, name_of, namespace_of
from .probes import PORT, Health, serve
from .reconcile import Reconciler
from .recorder import Recorder
from .settings import SettingsError, load_settings
from .watch_freshness import MUTE_S, WatchFreshness
from .work_queue import Closed, WorkQueue
from .worker_facts import WorkerFacts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .settings import Settings

ASK_AGAIN_S = 2.0
DRAIN_S = 20.0  # for passes under way at the end

log = logging.getLogger("tandem_operator")


class Operator:
    def __init__(self, kube: KubeApi, settings: Settings, metrics: Metrics, identity: Identity) -> None:
        loop = asyncio.get_running_loop()
        self._kube, self._settings, self._metrics, self._identity = kube, settings, metrics, identity
        self._queue: WorkQueue[tuple[str, str]] = WorkQueue()
        self._fresh = WatchFreshness(WATCHED, loop.time)
        self._forbidden: tuple[str, ...] = ()
        self.health = Health(self._queue, self._fresh)

    async def prepare(self) -> None:
        """Waits until the CRD is served whole and every read is granted."""
        told = ""
        while (obstacle := await self._obstacle()) != "":
            self.health.obstacle = obstacle
            if obstacle != told:
                log.warning("not ready: %s", obstacle)
                told = obstacle
            await asyncio.sleep(ASK_AGAIN_S)
        self.health.obstacle = ""

    async def run(self, lease_namespaces: tuple[str, ...]) -> None:
        """Leads when it may; returns when the Lease is lost. Raises Held and RuntimeError (the watch)."""
        leases = [Lease(self._kube, namespace, self._identity) for namespace in lease_namespaces]
        await _hold(leases, self._lead)

    async def _lead(self) -> None:
        facts = WorkerFacts(lambda endpoint: self._metrics.worker_errors.labels(endpoint=endpoint).inc())
        recorder = Recorder(self._kube, self._identity.replica, self._metrics.events_failed.inc)
        reconciler = Reconciler(
            self._kube,
            facts,
            recorder,
            self._metrics,
            self._settings,
            desired,
            forbidden=lambda: self._forbidden,
            saw=self._fresh.listed,
        )
        watch = Watch(self._settings, self._queue, self._fresh)
        workers = [
            asyncio.create_task(_until_closed(reconciler, self._queue)) for _ in range(self._settings.workers)
        ]
        resync = asyncio.create_task(self._resync())
        overdue = asyncio.create_task(self._read_again_what_is_overdue())
        watch.start()
        self.health.leading = True
        try:
            await asyncio.wait([watch.ended, resync, overdue, *workers], return_when=asyncio.FIRST_COMPLETED)
            for ended in (watch.ended, resync, overdue, *workers):
                if ended.done():
                    ended.result()
        finally:
            self.health.leading = False
            self._queue.close()
            resync.cancel()
            overdue.cancel()
            await asyncio.wait(workers, timeout=DRAIN_S)
            for worker in workers:
                worker.cancel()
            await watch.stop()
            await facts.close()

    async def _resync(self) -> None:
        """Every model is looked at now and then, whatever the watch says: it misses deletions."""
        while True:
            try:
                for parent in await self._models():
                    self._queue.add((namespace_of(parent), name_of(parent)))
            except KubeError as error:
                log.warning("models could not be listed: %s", error)
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            await asyncio.sleep(self._settings.resync_s * random.uniform(0.9, 1.1))

    async def _read_again_what_is_overdue(self) -> None:
        """Before a mute watch is declared: the object that it owes may be gone."""
        while True:
            await asyncio.sleep(MUTE_S / 4)
            for key in self._fresh.overdue(MUTE_S / 2):
                self._queue.add(key)

    async def _models(self) -> list[dict[str, object]]:
        found = []
        for namespace in self._settings.namespaces or (None,):
            found += await self._kube.list(MODEL, namespace)
        self._metrics.models.set(len(found))
        return found

    async def _obstacle(self) -> str:
        """Why it is not ready; empty if it is."""
        try:
            missing = served_schema.missing_fields(await self._kube.read(served_schema.PATH))
            if missing:
                shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
                return f"the served CRD is of another release and lacks {shown}: apply this release's CRD"
            refused = [
                (namespace, one)
                for namespace in self._settings.namespaces or (None,)
                for one in await access_review.refused(self._kube, namespace)
            ]
            self._metrics.permissions_missing.set(len(refused))
            if reads := [f"{one}{_in(namespace)}" for namespace, one in refused if one.need == "read"]:
                return f"RBAC refuses {', '.join(reads)}: without a read nothing can be decided"
            self._forbidden = tuple(sorted({str(one) for _, one in refused if one.need == "child"}))
            for namespace, one in refused:
                log.warning("RBAC refuses %s%s (%s)", one, _in(namespace), one.why)
            await self._models()
        except NotFound:
            return f"the API server does not serve {MODEL.api_version}: apply the CRD"
        except KubeError as error:
            return f"the API server: {error}"
        return ""


async def _hold(leases: list[Lease], work: Callable[[], Awaitable[None]]) -> None:
    """All of them, taken in order: two installations over the same namespaces cannot wait for each other."""
    if not leases:
        await work()
        return
    first, *others = leases
    await first.run(lambda: _hold(others, work))


async def _until_closed(reconciler: Reconciler, queue: WorkQueue[tuple[str, str]]) -> None:
    with contextlib.suppress(Closed):
        await reconciler.work(queue)


def _in(namespace: str | None) -> str:
    return f" in namespace {namespace}" if namespace else ""


async def operate(arguments: argparse.Namespace, settings: Settings) -> int:
    metrics = Metrics()

    def told(verb: str, path: str, code: int) -> None:
        metrics.calls.labels(verb=verb, resource=_resource(path), code=str(code)).inc()

    kube = await KubeApi.connect(arguments.kubeconfig, told)
    identity = Identity(arguments.installation, os.environ.get("POD_NAME") or socket.gethostname())
    operator = Operator(kube, settings, metrics, identity)
    server = await serve(operator.health, metrics, arguments.host, arguments.port)
    leases: tuple[str, ...] = ()
    if not arguments.no_leader_election:
        leases = tuple(sorted(settings.namespaces)) or (arguments.lease_namespace,)
    work = asyncio.create_task(_prepared(operator, leases))
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
    try:
        if stopped.is_set():
            work.cancel()
            await asyncio.wait([work])
            return 0
        work.result()
        return 1
    except (Held, RuntimeError) as error:
        log.error("%s", error)
        return 1
    finally:
        stopping.cancel()
        await server.cleanup()
        await kube.close()


async def _prepared(operator: Operator, leases: tuple[str, ...]) -> None:
    await operator.prepare()
    await operator.run(leases)


def _resource(path: str) -> str:
    """The kind's plural: names would make a metric without bounds."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return parts[0] if parts else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tandem-operator", description="DisaggregatedModel -> pods -> status"
    )
    parser.add_argument("--settings", type=Path, required=True, help="YAML, as the Helm chart writes it")
    parser.add_argument("--kubeconfig", help="a kubeconfig file; without it, the pod's own account")
    parser.add_argument(
        "--installation", default="tandem", help="the same for all replicas of an installation, no other's"
    )
    parser.add_argument(
        "--lease-namespace", default="default", help="of the Lease, where all namespaces are watched"
    )
    parser.add_argument("--no-leader-election", action="store_true", help="for one replica outside a cluster")
    parser.add_argument(
        "--host", default="", help="of /healthz, /readyz and /metrics; all addresses by default"
    )
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--log-level", choices=("debug", "info", "warning"), default="info")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # kopf asks who runs it; a container's user, of whatever number, has no name.
    os.environ.setdefault("USER", "tandem")
    if arguments.kubeconfig:
        os.environ["KUBECONFIG"] = arguments.kubeconfig  # kopf's login reads it from there
    try:
        settings = load_settings(arguments.settings)
        return asyncio.run(operate(arguments, settings))
    except SettingsError as error:
        print(f"tandem-operator: {error}", file=sys.stderr)
        return 2
    except (config.ConfigException, OSError) as error:
        print(f"tandem-operator: no API server: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
