"""From kopf's events to keys in the queue, and nothing else.

Knows: kopf. Does not know: what a pass does.

    kopf's thread                                   the operator's loop
    list/watch of models, children, pods ─event──► relevant? ─► queue.add(namespace, model)

Only `on.event` handlers: they write nothing to an object, while kopf's others keep annotations and finalizers
and act on differences. kopf has a thread and a loop of its own, since it cancels what else runs in its loop
when it ends and takes the signal handlers of a main thread. It never reports what was deleted while its watch
was broken, so its events say "look", and never what is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import random
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kopf

from tandem_crds import names
from tandem_crds.model import GROUP, KIND

from .objects import CHILD_KINDS, MODEL, POD, labels_of, name_of, namespace_of, uid_of

if TYPE_CHECKING:
    from .objects import Kind, Obj
    from .settings import Settings
    from .watch_freshness import WatchFreshness
    from .work_queue import WorkQueue

WATCHED = (MODEL, *CHILD_KINDS, POD)
# A burst of child events is one pass; a manifest's edit is looked at at once.
COALESCED_S = 0.2
LOGIN_S = 600.0  # tokens of a pod are replaced every hour
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

log = logging.getLogger(__name__)


class Relevance:
    """Drops events that change nothing a pass looks at: its own status writes, kubelets' heartbeats."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def is_news(self, kind: Kind, obj: Obj, *, gone: bool) -> bool:
        uid = uid_of(obj)
        if gone:
            self._digests.pop(uid, None)
            return True
        seen = hashlib.sha256(json.dumps(_looked_at(kind, obj), sort_keys=True).encode()).hexdigest()
        news = self._digests.get(uid) != seen
        self._digests[uid] = seen
        return news


def _looked_at(kind: Kind, obj: Obj) -> Any:
    metadata = obj["metadata"]
    common = [metadata.get(key) for key in ("generation", "labels", "ownerReferences", "deletionTimestamp")]
    status = obj.get("status") or {}
    if kind == MODEL:
        return [*common, metadata.get("annotations")]
    if kind == POD:
        # A probe's result moves no transition time: what a kubelet rewrites each minute is not among these.
        conditions = [
            [one.get(key) for key in ("type", "status", "reason", "message")]
            for one in status.get("conditions") or ()
        ]
        parts = ("phase", "podIP", "reason", "message", "initContainerStatuses", "containerStatuses")
        return [*common, conditions, *(status.get(key) for key in parts)]
    if "status" in obj:
        return [*common, metadata.get("annotations"), status]
    return [*common, metadata["resourceVersion"]]


def model_key(kind: Kind, obj: Obj) -> tuple[str, str] | None:
    """Namespace and name of the model that an object belongs to: by its controller, else by its label."""
    if kind == MODEL:
        return namespace_of(obj), name_of(obj)
    for one in obj["metadata"].get("ownerReferences") or ():
        if one.get("controller") and one["kind"] == KIND and one["apiVersion"].startswith(f"{GROUP}/"):
            return namespace_of(obj), str(one["name"])
    model = labels_of(obj).get(names.LABEL_MODEL)
    return (namespace_of(obj), model) if model else None


class Watch:
    """kopf in a thread. `ended` is set, with its error if any, when it stops by itself."""

    def __init__(self, settings: Settings, queue: WorkQueue[tuple[str, str]], fresh: WatchFreshness) -> None:
        """Created in the loop that owns the queue."""
        self._settings, self._queue, self._fresh = settings, queue, fresh
        self._relevance = Relevance()
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.wait([self.ended], timeout=10.0)

    def heard(self, kind: Kind, event: str | None, obj: Obj) -> None:
        """In the operator's loop. `event` is None for what the first list shows."""
        gone = event == "DELETED"
        key = model_key(kind, obj)
        if key is None:
            return
        self._fresh.delivered(key, uid_of(obj), obj["metadata"]["resourceVersion"], gone=gone)
        if not self._relevance.is_news(kind, obj, gone=gone):
            return
        if kind == MODEL:
            self._queue.add(key)
        else:
            self._queue.add_after(key, COALESCED_S)

    def _run(self) -> None:
        error: BaseException | None = None
        scope: dict[str, Any] = (
            {"namespaces": list(self._settings.namespaces)}
            if self._settings.namespaces
            else {"clusterwide": True}
        )
        try:
            running = kopf.operator(
                registry=self._registry(),
                settings=kopf_settings(),
                standalone=True,
                stop_flag=self._stop,
                **scope,
            )
            asyncio.run(running)
        except BaseException as raised:  # whatever ends the thread ends the operator
            error = raised
        self._loop.call_soon_threadsafe(self._finish, error)

    def _finish(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None or self._stop.is_set():
            self.ended.set_result(None)
        else:
            self.ended.set_exception(RuntimeError(f"the watch ended: {type(error).__name__}: {error}"))

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(login)
        for kind in WATCHED:
            self._listen(registry, kind)
        return registry

    def _listen(self, registry: kopf.OperatorRegistry, kind: Kind) -> None:
        version = kind.api_version.rpartition("/")[2]

        async def heard(event: Any, **_: Any) -> None:
            obj = {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]}
            self._loop.call_soon_threadsafe(self.heard, kind, event["type"], obj)

        kopf.on.event(kind.group, version, kind.plural, registry=registry, id=f"{kind.plural}")(heard)


def kopf_settings() -> kopf.OperatorSettings:
    """It lists and watches; it scans nothing, posts nothing, stores nothing."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.watching.server_timeout = 300  # an integer: the API server parses no other
    settings.networking.error_backoffs = tuple(
        random.uniform(0.8, 1.2) * pause for pause in (0.5, 1, 1, 2, 2, 3, 3, 5, 5, 5, 5, 5)
    )
    settings.networking.trust_env = False
    settings.execution.max_workers = 1
    settings.process.ultimate_exiting_timeout = 25.0
    settings.persistence.finalizer = f"{GROUP}/unused"
    for kind in (*CHILD_KINDS, POD):
        selector = kopf_selector(kind)
        settings.watching.label_selectors[selector] = names.LABEL_MODEL
    return settings


def kopf_selector(kind: Kind) -> tuple[str, str, str]:
    return kind.group, kind.api_version.rpartition("/")[2], kind.plural


def login(settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
    """With KUBECONFIG, or as the pod's own account; its token is read anew before it expires."""
    if os.environ.get("KUBECONFIG"):
        return kopf.login_with_kubeconfig(settings=settings)
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    found = kopf.login_with_service_account(settings=settings)
    if found is None:
        return None
    address = f"[{host}]" if ":" in host else host
    return dataclasses.replace(
        found,
        server=f"https://{address}:{port}",
        expiration=datetime.now(UTC) + timedelta(seconds=LOGIN_S),
    )
