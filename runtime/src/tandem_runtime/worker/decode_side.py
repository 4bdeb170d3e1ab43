"""Decode's half of the joint between engine and messenger: blocked requests become tickets, landed pages
become running requests.

Knows: which ticket belongs to which request, retries, the fallback policy. Does not know: wire messages,
pages' geometry.

    waiting ──next_remote()──► BLOCKED ──dispatch()──► ticket ──ready()──► RUNNING
                                  ▲                       ├──failed()──► requeue on new pages (twice), or end
                                  └─────── requeue ───────┤
                                                          └──released()──► the ticket lets go of the pages

A ticket pins the pages from dispatch to `released`, whatever becomes of the request: a late write may still
land in them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ipc import Timing

if TYPE_CHECKING:
    from ..engine.pages import PagePool
    from ..engine.request import Request
    from ..engine.scheduler import Planned, Remote, Scheduler
    from ..messenger.decode_messenger import DecodeMessenger
    from ..messenger.ports import TransferTiming
    from .engine_loop import EngineLoop
    from .metrics import Metrics

log = logging.getLogger("tandem.decode")
MAX_RETRIES = 2
MAX_LANDED = 4096  # transfers whose timing may still come


@dataclass(slots=True)
class _Attempts:
    failures: int = 0
    avoid: frozenset[str] = field(default_factory=frozenset)


class DecodeSide:
    """A `TransferSide` for the loop and a `DecodeListener` for the messenger."""

    def __init__(
        self,
        loop: EngineLoop,
        scheduler: Scheduler,
        pool: PagePool,
        metrics: Metrics,
        node: str,
        *,
        fallback_local: bool,
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._pool = pool
        self._metrics = metrics
        self._node = node
        self._fallback_local = fallback_local
        self._messenger: DecodeMessenger | None = None
        self._tickets: dict[int, tuple[Request, float]] = {}  # ticket -> request, time of dispatch
        self._of_request: dict[str, int] = {}
        self._landed: dict[int, tuple[Request, float]] = {}
        self._attempts: dict[str, _Attempts] = {}

    def attach(self, messenger: DecodeMessenger) -> None:
        self._messenger = messenger

    # --- TransferSide --------------------

    def before_plan(self) -> None:
        """Blocks and dispatches as many waiting requests as pages and credits allow."""
        messenger = self._messenger
        assert messenger is not None
        while (head := self._scheduler.head_of_waiting()) is not None:
            avoid = self._attempts[head.id].avoid if head.id in self._attempts else frozenset()
            if not messenger.has_peer:
                if messenger.peer_returns:
                    return  # neither fails nor computes here what can be asked for in a moment
                self._without_prefill(head)
                continue
            if not messenger.can_dispatch(avoid) and not messenger.can_dispatch():
                return
            remote = self._scheduler.next_remote()
            if remote is None:
                return
            if remote.tokens_to_move == 0:
                self._scheduler.ready(remote.request.id)
            else:
                self._dispatch(remote)

    def planned(self, planned: Planned) -> None: ...

    def passed(self, planned: Planned, ok: bool) -> None: ...

    def aborted(self, request_id: str) -> None:
        self._attempts.pop(request_id, None)
        ticket = self._of_request.pop(request_id, None)
        if ticket is not None:
            assert self._messenger is not None
            self._messenger.cancel(ticket, "the client left")

    # --- DecodeListener --------------------

    def ready(self, ticket: int, timing: TransferTiming) -> None:
        request, dispatched_s = self._tickets[ticket]
        self._of_request.pop(request.id, None)
        self._attempts.pop(request.id, None)
        self._scheduler.ready(request.id)
        self._metrics.transfer_nbytes.inc(timing.nbytes)
        self._landed[ticket] = (request, dispatched_s)
        if len(self._landed) > MAX_LANDED:
            del self._landed[next(iter(self._landed))]
        self._record(request, dispatched_s, timing)
        self._loop.wake()

    def timed(self, ticket: int, timing: TransferTiming) -> None:
        """Prefill's part of the timing, which readiness did not wait for."""
        landed = self._landed.pop(ticket, None)
        if landed is None:
            return
        if timing.transfer_s is not None:
            self._metrics.transfer_seconds.observe(timing.transfer_s)
        if timing.exposed_s is not None:
            self._metrics.exposed_seconds.observe(timing.exposed_s)
        self._record(*landed, timing)

    def failed(self, ticket: int, reason: str, message: str, retryable: bool, node: str) -> None:
        request, _ = self._tickets[ticket]
        self._of_request.pop(request.id, None)
        self._metrics.transfer_failures.labels(reason=reason).inc()
        attempts = self._attempts.setdefault(request.id, _Attempts())
        attempts.failures += 1
        attempts.avoid |= {node}
        log.warning("transfer of %s from %s failed (%s): %s", request.id, node, reason, message)
        if retryable and attempts.failures <= MAX_RETRIES:
            self._scheduler.requeue(request.id)
        else:
            self._attempts.pop(request.id)
            self._scheduler.fail(request.id, message)
            self._loop.finish_error(request.id, f"prefill failed: {message}", 503 if retryable else 500)
        self._loop.wake()

    def released(self, ticket: int) -> None:
        self._pool.unpin(("ticket", ticket))
        del self._tickets[ticket]
        self._loop.wake()

    def changed(self) -> None:
        """Peers or credits changed: what waits may go now."""
        self._loop.wake()

    # ------------------------------------------------------------------------

    def _record(self, request: Request, dispatched_s: float, timing: TransferTiming) -> None:
        self._loop.transferred(
            request.id,
            Timing(
                queue_s=dispatched_s - request.arrival_s,
                prefill_s=timing.prefill_s,
                prefill_queue_s=timing.queue_s,
                transfer_s=timing.transfer_s,
                exposed_s=timing.exposed_s,
                kv_nbytes=timing.nbytes,
                hidden_nbytes=timing.hidden_nbytes,
                prefill_node=timing.node,
                decode_node=self._node,
            ),
        )

    def _dispatch(self, remote: Remote) -> None:
        assert self._messenger is not None
        request = remote.request
        attempts = self._attempts.get(request.id, _Attempts())
        avoid = attempts.avoid if self._messenger.can_dispatch(attempts.avoid) else frozenset()
        ticket = self._messenger.dispatch(
            request.id,
            request.tokens(0, request.num_tokens),
            remote.cached_tokens,
            remote.pages,
            priority=request.priority,
            avoid=avoid,
        )
        self._pool.pin(("ticket", ticket), remote.pages)
        self._tickets[ticket] = (request, time.monotonic())
        self._of_request[request.id] = ticket

    def _without_prefill(self, request: Request) -> None:
        """No prefill worker is ready: local prefill where the manifest allows it, else an error at once."""
        if self._fallback_local or request.num_tokens == 1:
            self._metrics.local_prefills.inc()
            self._scheduler.run_local(request.id)
            return
        self._attempts.pop(request.id, None)
        self._scheduler.fail(request.id, "no prefill worker is ready")
        self._loop.finish_error(request.id, "no prefill worker is ready", 503)
