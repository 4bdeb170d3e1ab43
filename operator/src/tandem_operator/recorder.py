"""Events about models, as `kubectl describe` shows them: one object per (model, reason, note), counted.

Knows: events.k8s.io/v1 and its series. Does not know: when something is worth telling (`status.events`).

An event never fails a pass: what cannot be written is a log line and a metric.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from .kube import Conflict, KubeError, NotFound
from .objects import EVENT, name_of, namespace_of, uid_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .kube import Kube
    from .objects import Obj
    from .plan import Event

CONTROLLER = "tandem.dev/operator"
NOTE_LENGTH = 1024  # the server's bound
REMEMBERED = 4096  # events whose count is known; older ones start a new object

log = logging.getLogger(__name__)


class Recorder:
    def __init__(self, kube: Kube, instance: str, failed: Callable[[], None] = lambda: None) -> None:
        """`instance` is the pod's name, at most 128 characters; `failed` is called per event not written."""
        self._kube, self._instance, self._failed = kube, instance[:128], failed
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def record(self, parent: Obj, event: Event) -> None:
        log.info("%s/%s: %s: %s", namespace_of(parent), name_of(parent), event.reason, event.note)
        digest = hashlib.sha256("\0".join((event.type, event.reason, event.note)).encode()).hexdigest()[:16]
        key = (uid_of(parent), digest)
        count = self._counts.get(key, 0) + 1
        try:
            await self._write(parent, event, f"{name_of(parent)}.{digest}", count)
        except KubeError as error:
            self._failed()
            log.warning("event %s of %s was not written: %s", event.reason, name_of(parent), error)
            return
        self._counts[key] = count
        self._counts.move_to_end(key)
        while len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)

    async def _write(self, parent: Obj, event: Event, name: str, count: int) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if count > 1:
            try:
                await self._kube.merge(EVENT, namespace_of(parent), name, _series(count, now))
                return
            except NotFound:
                pass  # the server forgets events after an hour
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": namespace_of(parent)},
            "eventTime": now,
            "type": event.type,
            "reason": event.reason,
            "action": event.action,
            "note": event.note[:NOTE_LENGTH],
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": parent["apiVersion"],
                "kind": parent["kind"],
                "name": name_of(parent),
                "namespace": namespace_of(parent),
                "uid": uid_of(parent),
            },
        }
        try:
            await self._kube.create(body)
        except Conflict:  # told before this process began
            await self._kube.merge(EVENT, namespace_of(parent), name, _series(2, now))


def _series(count: int, now: str) -> Obj:
    return {"series": {"count": count, "lastObservedTime": now}}
