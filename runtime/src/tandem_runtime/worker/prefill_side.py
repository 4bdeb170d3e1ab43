"""Prefill's half of the joint between engine and messenger: dispatched prompts become requests, chunks become
plans.

Knows: which transfer belongs to which request. Does not know: wire messages, pages' geometry, sampling.

Source pages have two holders: the scheduler's request until its goal is reached, and the transfer's pin from
admission until the messenger proves that nobody reads them any more (`released`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from ..engine.pages import PagePool
    from ..engine.scheduler import Planned, Scheduler
    from ..messenger.ports import IncomingTransfer
    from ..messenger.prefill_messenger import PrefillMessenger
    from .engine_loop import EngineLoop

NO_SAMPLING = SamplingParams(max_tokens=1)


class PrefillSide:
    """A `TransferSide` for the loop and a `PrefillListener` for the messenger."""

    def __init__(self, loop: EngineLoop, scheduler: Scheduler, pool: PagePool) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._pool = pool
        self._messenger: PrefillMessenger | None = None
        self._keys: dict[str, int] = {}  # engine request id -> transfer key
        self._pinned: set[int] = set()

    def attach(self, messenger: PrefillMessenger) -> None:
        self._messenger = messenger

    # --- TransferSide --------------------

    def before_plan(self) -> None: ...

    def planned(self, planned: Planned) -> None:
        """Before the ranks see the step: source pages for the admitted, then which chunks it contains."""
        assert self._messenger is not None
        for request in planned.admitted:
            key = self._keys[request.id]
            self._pool.pin(("transfer", key), request.pages)
            self._pinned.add(key)
            self._messenger.admitted(key, list(request.pages), request.num_cached)
        chunks = [
            (self._keys[chunk.request_id], chunk)
            for chunk in planned.chunks
            if chunk.request_id in self._keys
        ]
        self._messenger.publish(planned.step.counter_base, chunks)

    def passed(self, planned: Planned, ok: bool) -> None:
        assert self._messenger is not None
        if ok:
            self._messenger.computed(planned.step.counter_base)
        else:
            self._messenger.aborted(planned.step.counter_base)
        for chunk in planned.chunks:
            if chunk.last or not ok:
                self._keys.pop(chunk.request_id, None)

    def aborted(self, request_id: str) -> None: ...

    # --- PrefillListener --------------------

    def dispatched(self, incoming: IncomingTransfer) -> None:
        assert self._messenger is not None
        request = Request(
            f"{incoming.node}/{incoming.request_id}/{incoming.key}",
            incoming.tokens,
            NO_SAMPLING,
            time.monotonic(),
            prefill_only=True,
            priority=incoming.priority,
        )
        refusal = self._scheduler.validate(incoming.tokens, NO_SAMPLING)
        if refusal is not None:
            self._messenger.fail(incoming.key, refusal, retryable=False)
            return
        self._keys[request.id] = incoming.key
        self._scheduler.add(request)
        self._loop.wake()

    def cancelled(self, key: int) -> None:
        for request_id, other in self._keys.items():
            if other == key:
                del self._keys[request_id]
                self._scheduler.abort(request_id)
                break
        self._loop.wake()

    def released(self, key: int) -> None:
        if key in self._pinned:
            self._pinned.discard(key)
            self._pool.unpin(("transfer", key))
        self._loop.wake()
