"""One leader at a time, by a Lease: work runs while it is held, and has ended before another can hold it.

Knows: the Lease's protocol. Does not know: what the work is.

    GET ── absent ─────────────────────────────► POST  (of several racers one wins)
        ── ours, or given back (holder "") ────► PUT at its resourceVersion
        ── another's ── unchanged on our clock for its duration ──► PUT at its resourceVersion
                     └─ else: ask again

A foreign holder is judged by our monotonic clock, never by comparing its times with ours: it has died when
(holder, renewTime, resourceVersion) stood still for its whole duration. The holder, in turn, ends its work
when it could not renew for RENEW_DEADLINE_S: with a call's deadline that is less than DURATION_S.
The official client's elector leaves the work running when a renewal is refused; hence this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from .kube import Conflict, KubeError, NotFound
from .objects import LEASE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .kube import Kube
    from .objects import Obj

LEASE_NAME = "tandem-operator"
DURATION_S = 15.0
RENEW_DEADLINE_S = 9.0
CALL_S = 3.0  # RENEW_DEADLINE_S + CALL_S < DURATION_S
TICK_S = 2.0

log = logging.getLogger(__name__)


class _Outcome(enum.Enum):
    OURS = enum.auto()
    ANOTHERS = enum.auto()
    UNKNOWN = enum.auto()


class Held(Exception):
    """Another installation operates this namespace."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`installation` is the same for the replicas of one installation; `replica` tells them apart."""

    installation: str
    replica: str

    def __str__(self) -> str:
        return f"{self.installation}/{self.replica}"


class Lease:
    """A Lease in `namespace`. `run` may be called once."""

    def __init__(
        self, kube: Kube, namespace: str, identity: Identity, *, tick_s: float = TICK_S, scale: float = 1.0
    ) -> None:
        """`scale` shortens all durations alike, for tests."""
        self._kube, self._namespace, self._identity = kube, namespace, identity
        self._tick_s = tick_s * scale
        self._duration_s, self._deadline_s = DURATION_S * scale, RENEW_DEADLINE_S * scale
        self._call_s = max(CALL_S * scale, 0.2)
        self._seen: tuple[object, float] | None = None  # a foreign holder's state, and since when it stands
        self.held = False

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Waits for the Lease, runs `work`, gives the Lease back. Returns when work ended or the Lease was
        lost (work is cancelled and awaited first). Raises Held, and what work raises.
        """
        while await self._attempt() is not _Outcome.OURS:
            await asyncio.sleep(self._tick_s)
        log.info("leading namespace %s as %s", self._namespace, self._identity)
        self.held = True
        task = asyncio.ensure_future(work())
        try:
            await self._renew_until_done(task)
        finally:
            self.held = False
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            with contextlib.suppress(KubeError, TimeoutError):
                await self._give_back()
        if not task.cancelled():
            task.result()

    async def _renew_until_done(self, task: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            await asyncio.wait([task], timeout=self._tick_s)
            if task.done():
                return
            outcome = await self._attempt()
            if outcome is _Outcome.OURS:
                renewed = loop.time()
            elif outcome is _Outcome.ANOTHERS:
                log.error("the Lease of namespace %s is another's now; stopping", self._namespace)
                return
            elif loop.time() - renewed > self._deadline_s:
                log.error("the Lease of namespace %s could not be renewed; stopping", self._namespace)
                return

    async def _attempt(self) -> _Outcome:
        """Raises Held."""
        try:
            async with asyncio.timeout(self._call_s):
                return await self._take()
        except (Conflict, NotFound):
            return _Outcome.UNKNOWN  # somebody was faster; the next look tells who
        except (KubeError, TimeoutError) as error:
            log.warning("Lease of namespace %s: %s", self._namespace, error or "no answer")
            return _Outcome.UNKNOWN

    async def _take(self) -> _Outcome:
        try:
            found = await self._kube.get(LEASE, self._namespace, LEASE_NAME)
        except NotFound:
            await self._kube.create(self._body({}, transitions=0))
            return _Outcome.OURS
        spec = found.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        ours = holder == str(self._identity)
        if holder and not ours and (self.held or not self._has_died(found, holder)):
            return _Outcome.ANOTHERS
        transitions = int(spec.get("leaseTransitions") or 0)
        await self._kube.replace(self._body(found, transitions=transitions + (not ours)))
        return _Outcome.OURS

    def _has_died(self, found: Obj, holder: str) -> bool:
        """Raises Held if it lives and is of another installation."""
        state = (holder, found["spec"].get("renewTime"), found["metadata"]["resourceVersion"])
        now = asyncio.get_running_loop().time()
        if self._seen is None or self._seen[0] != state:
            moved = self._seen is not None
            self._seen = (state, now)
            if moved and holder.rpartition("/")[0] != self._identity.installation:
                raise Held(
                    f"namespace {self._namespace} is operated by {holder}; two operators over one namespace "
                    "would undo each other's work: remove one, or give each its own namespaces"
                )
            return False
        duration_s = float(found["spec"].get("leaseDurationSeconds") or DURATION_S)
        return now - self._seen[1] > min(duration_s, self._duration_s)

    async def _give_back(self) -> None:
        async with asyncio.timeout(self._call_s):
            found = await self._kube.get(LEASE, self._namespace, LEASE_NAME)
            if found["spec"].get("holderIdentity") == str(self._identity):
                found["spec"]["holderIdentity"] = ""
                await self._kube.replace(found)

    def _body(self, found: Obj, *, transitions: int) -> Obj:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = found.get("spec") or {}
        same = spec.get("holderIdentity") == str(self._identity)
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": found.get("metadata") or {"name": LEASE_NAME, "namespace": self._namespace},
            "spec": {
                "holderIdentity": str(self._identity),
                "leaseDurationSeconds": max(1, round(self._duration_s)),
                "acquireTime": spec.get("acquireTime") if same else now,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }
