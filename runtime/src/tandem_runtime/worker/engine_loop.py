"""The lead's loop: plan a step, run it on the ranks, hand out what came of it.

Knows: the scheduler, the ranks, who waits for a request's tokens. Does not know: transfers; those are its
`TransferSide`'s.

    submit ──► scheduler.add     ┌────► side.before_plan()   decode: blocked requests are dispatched
    abort  ──► scheduler.abort   │      plan()
    side.wake() ──► wake ────────┤      side.planned()       prefill: the messenger learns the chunks first
                                 │      ranks.step()
                                 └───── side.passed()        or the plan is withdrawn; then apply()

One step is in flight at a time; while the ranks compute, the event loop serves everything else. Every request
ends in exactly one final output. A step's error ends that step's requests; only a rank's death ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..engine.request import FinishReason, Request
from ..ipc import Output, Report, Submit, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engine.scheduler import Emitted, Planned, Scheduler
    from ..engine.step import StepResult
    from .metrics import Metrics
    from .ranks import RankGroup

log = logging.getLogger("tandem.engine")


class TransferSide(Protocol):
    """What a role adds to the loop. `passed` gets whether the pass succeeded, before anything else is
    planned.
    """

    def before_plan(self) -> None: ...

    def planned(self, planned: Planned) -> None: ...

    def passed(self, planned: Planned, ok: bool) -> None: ...

    def aborted(self, request_id: str) -> None: ...


class NoTransfers:
    """Role mixed: everything is computed here."""

    def before_plan(self) -> None: ...

    def planned(self, planned: Planned) -> None: ...

    def passed(self, planned: Planned, ok: bool) -> None: ...

    def aborted(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Record:
    """What the loop remembers of a request that a server waits for."""

    request: Request
    first_token_s: float | None = None
    transfer: Timing | None = None


class EngineLoop:
    """`send` takes the outputs of requests that came by `submit`; prefill workers have none."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: RankGroup,
        metrics: Metrics,
        node: str,
        send: Callable[[Output], None],
    ) -> None:
        self.scheduler = scheduler
        self.side: TransferSide = NoTransfers()
        self._ranks = ranks
        self._metrics = metrics
        self._node = node
        self._send = send
        self._wake = asyncio.Event()
        self._records: dict[str, _Record] = {}
        self._seen = (0, 0, 0)  # the scheduler's totals that the metrics know of
        self.draining = False
        self.steps = 0

    # --- SubmissionHandler --------------------

    def submit(self, submit: Submit) -> None:
        request = Request(
            submit.request_id, submit.prompt, submit.params, time.monotonic(), priority=submit.priority
        )
        self._records[request.id] = _Record(request)
        if self.draining:
            self.finish_error(request.id, "this worker is draining; retry", 503)
        elif (refusal := self.scheduler.validate(submit.prompt, submit.params)) is not None:
            self.finish_error(request.id, refusal, 400)
        else:
            self.scheduler.add(request)
            self.wake()

    def abort(self, request_id: str) -> None:
        """The client left, or has all it wants. Unknown ids have finished already."""
        if request_id not in self._records:
            return
        self.side.aborted(request_id)
        emitted = self.scheduler.abort(request_id)
        if emitted is not None:
            self._emit(emitted)
        self.wake()

    def report(self, report: Report) -> None:
        self._metrics.report(report)

    # --- for the transfer side --------------------

    def wake(self) -> None:
        """Something changed that planning should see."""
        self._wake.set()

    def transferred(self, request_id: str, timing: Timing) -> None:
        record = self._records.get(request_id)
        if record is not None:
            record.transfer = timing

    def finish_error(self, request_id: str, message: str, status: int) -> None:
        """Ends a request that the scheduler no longer holds (or never did)."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        self._metrics.finished(FinishReason.ERROR)
        self._send(Output(request_id, [], finish=FinishReason.ERROR, error=message, status=status))

    @property
    def waiting_for(self) -> int:
        """Requests that a server still waits for."""
        return len(self._records)

    # --- the loop --------------------

    async def run(self) -> None:
        """Runs until cancelled. Raises RankError when a rank is gone or its device is unusable."""
        while True:
            self._wake.clear()
            begin = time.perf_counter()
            self.side.before_plan()
            planned = self.scheduler.plan()
            if planned is None:
                self._observe()
                await self._wake.wait()
                continue
            self.side.planned(planned)
            overhead_s = time.perf_counter() - begin
            result = await self._ranks.step(planned.step)
            begin = time.perf_counter()
            if result.error is not None:
                log.error("step %d failed: %s", result.step_id, result.error)
            self.side.passed(planned, result.error is None)
            for emitted in self.scheduler.apply(result):
                self._emit(emitted)
            self.steps += 1
            self._count(planned, result, overhead_s + time.perf_counter() - begin)
            if result.fatal:
                from .ranks import RankError

                raise RankError(f"the device is unusable: {result.error}")

    def _emit(self, emitted: Emitted) -> None:
        request = emitted.request
        record = self._records.get(request.id)
        if record is None:
            return
        now = time.monotonic()
        if emitted.tokens and record.first_token_s is None:
            record.first_token_s = now
            if request.admitted_s is not None:
                self._metrics.queue.observe(request.admitted_s - request.arrival_s)
        output = Output(
            request.id,
            emitted.tokens,
            emitted.logprobs,
            emitted.finish,
            emitted.error,
            500 if emitted.error is not None else 200,
            request.num_cached,
            self._timing(record) if emitted.finish is not None else None,
        )
        if emitted.finish is not None:
            del self._records[request.id]
            self._metrics.finished(emitted.finish)
        self._send(output)

    def _timing(self, record: _Record) -> Timing:
        if record.transfer is not None:
            return record.transfer
        request, admitted_s = record.request, record.request.admitted_s
        if admitted_s is None:
            return Timing(time.monotonic() - request.arrival_s, decode_node=self._node)
        prefill_s = None if record.first_token_s is None else record.first_token_s - admitted_s
        return Timing(admitted_s - request.arrival_s, prefill_s, decode_node=self._node)

    def _count(self, planned: Planned, result: StepResult, overhead_s: float) -> None:
        metrics = self._metrics
        metrics.step_tokens.observe(planned.step.num_tokens)
        metrics.forward.observe(result.forward_s)
        metrics.step_overhead.observe(overhead_s)
        metrics.generation_tokens.inc(sum(token >= 0 for token in result.tokens))
        metrics.prompt_tokens.inc(sum(len(row.tokens) - row.sample for row in planned.step.rows))
        self._observe()

    def _observe(self) -> None:
        scheduler, metrics = self.scheduler, self._metrics
        counts = scheduler.counts()
        metrics.running.set(counts.running)
        metrics.waiting.set(counts.waiting)
        metrics.blocked.set(counts.blocked)
        totals = (scheduler.num_preemptions, scheduler.prefix_query_tokens, scheduler.prefix_hit_tokens)
        counters = (metrics.preemptions, metrics.prefix_queries, metrics.prefix_hits)
        for counter, total, seen in zip(counters, totals, self._seen, strict=True):
            counter.inc(total - seen)
        self._seen = totals
