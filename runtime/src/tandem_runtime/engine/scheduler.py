"""Decide what each pass computes, for which requests, on which pages; one counter a request is its phase.

Knows: requests, pages, the token budget, the ranks' slots. Does not know: transfers, tensors, text.

    add ──► waiting ──plan──► running ──apply──► finished         roles mixed and prefill
            │  ▲                ▲
   next_remote requeue          │                                 role decode
            ▼  │                │
            blocked ───ready────┘

A pass moves `num_computed` of some running requests towards their `goal`, by `max_batched_tokens` together. A
row that meets `num_tokens` samples one token, which moves the goal on. On a prefill worker the goal is one
short of the prompt, so it never samples. On a decode worker a request starts at `num_tokens - 1`, once the
rest has landed from elsewhere; a preempted one goes that way again, with prompt + output as its prompt.

Seniority (priority, then arrival) is fixed for a request's life and orders everything: who computes first,
who is admitted first and, from the other end, who is preempted. So the most senior request always advances,
and no two can preempt each other in turns.

A request is admitted only with pages for all of its tokens and one left over for each request that may grow.
Chunked prompts therefore never compete for pages; only growth by sampled tokens preempts, and who preempts
itself comes back only when there is the page that it lacked. Pages of a blocked request are pinned, as
preemption cannot bring them back, and at most half of the pool is: the running requests can always grow into
the other half at each other's cost.

One pass is in flight at a time, from `plan` to `apply`; what befalls its requests meanwhile waits for that.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING

from tandem_crds.role_config import Role

from ..kv import Chunk
from .limits import SchedulerConfig, finish_reason, refusal
from .planned import Draft, Emitted, Planned, Remote, RequestCounts
from .prefix import PrefixNames
from .request import FinishReason, Request, SamplingParams, Status
from .slots import Slots
from .step import AddSlot, Row, Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from .pages import PagePool
    from .request import TokenLogprobs

__all__ = ["Emitted", "Planned", "Remote", "RequestCounts", "Scheduler", "SchedulerConfig"]

LOOK_AHEAD = 8  # waiting requests that one admission considers
MAX_OVERTAKEN = 32  # younger requests that may be admitted before one that does not fit yet


def seniority(request: Request) -> tuple[int, int]:
    return request.priority, request.order


class Scheduler:
    """The metrics' counters are public: they only ever grow."""

    def __init__(
        self, config: SchedulerConfig, pool: PagePool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert (config.pages, config.page_tokens) == (pool.total, pool.page_tokens)
        self.config = config
        self.num_preemptions = 0
        self.num_sampled = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._pool = pool
        self._clock = clock
        self._names = PrefixNames(config.page_tokens)
        self._slots = Slots(config.max_sequences)
        self._arrivals = 0
        self._passes = 0
        self._live: dict[str, Request] = {}
        self._local: list[Request] = []  # waiting to be computed here, by seniority
        self._remote: list[Request] = []  # waiting for a prefill worker, by seniority
        self._blocked: dict[str, Request] = {}
        self._running: list[Request] = []  # by seniority
        self._in_flight: Step | None = None
        self._in_pass: list[Request] = []  # one for each row of the pass in flight
        self._aborted: set[str] = set()  # among those

    # Requests come and go.

    def validate(self, prompt: list[int], params: SamplingParams) -> str | None:
        """Why this request cannot be served here, or None."""
        return refusal(self.config, prompt, params)

    def add(self, request: Request) -> None:
        """Queue a request that `validate` had nothing against."""
        assert request.id not in self._live, request.id
        assert request.prefill_only is (self.config.role is Role.PREFILL)
        request.order = self._arrivals
        self._arrivals += 1
        self._live[request.id] = request
        self._enqueue(request, remote=self.config.role is Role.DECODE)

    def abort(self, request_id: str) -> Emitted | None:
        """End a request in any state. None if it has ended, or is in the pass in flight and ends at `apply`.

        Who aborts a blocked request cancels its ticket, too.
        """
        request = self._live.get(request_id)
        if request is None:
            return None
        if request in self._in_pass:
            self._aborted.add(request_id)
            return None
        return self._end(request, FinishReason.ABORT)

    @property
    def idle(self) -> bool:
        return not self._live and self._in_flight is None

    def counts(self) -> RequestCounts:
        waiting = len(self._local) + len(self._remote)
        return RequestCounts(running=len(self._running), waiting=waiting, blocked=len(self._blocked))

    # Role decode: prompts that are computed elsewhere.

    def head_of_waiting(self) -> Request | None:
        """The most senior of those that wait for a prefill worker."""
        return self._remote[0] if self._remote else None

    def next_remote(self) -> Remote | None:
        """Give the first waiting request that fits its pages and block it until `ready`, `requeue` or an end.

        With `tokens_to_move == 0` there is nothing to ask for: call `ready` at once.
        """
        assert self.config.role is Role.DECODE
        found = self._first_that_fits(self._remote, self._local)
        if found is None:
            return None
        request, matched = found
        self._admit(request, matched)
        request.status = Status.BLOCKED
        self._blocked[request.id] = request
        self._pool.pin(_pin_of(request), request.pages)
        landing = request.num_tokens - 1
        pages = request.pages[len(matched) : self._pool.pages_for(landing)]
        return Remote(request, pages, request.num_cached, landing - request.num_cached)

    def ready(self, request_id: str) -> None:
        """The KV of all tokens of a blocked request but the last has landed."""
        request = self._blocked.pop(request_id)
        self._pool.unpin(_pin_of(request))
        landed = request.num_tokens - 1
        self._index(request, request.num_cached, landed)
        request.num_computed = landed
        self._run(request)

    def requeue(self, request_id: str) -> None:
        """A blocked request's transfer failed: wait again, ahead of all that came later, for new pages.

        A late write may still land in the old ones; the ticket's pin keeps them until it cannot.
        """
        request = self._blocked[request_id]
        self._vacate(request)
        self._enqueue(request, remote=True)

    def run_local(self, request_id: str) -> None:
        """No prefill worker for this waiting or blocked request: compute it here, on new pages."""
        request = self._live[request_id]
        assert request.status in (Status.WAITING, Status.BLOCKED), request.status
        self._vacate(request)
        self._enqueue(request, remote=False)

    def fail(self, request_id: str, message: str) -> Emitted:
        """End a waiting or blocked request with an error."""
        request = self._live[request_id]
        assert request.status in (Status.WAITING, Status.BLOCKED), request.status
        return self._end(request, FinishReason.ERROR, message)

    # One pass.

    def plan(self) -> Planned | None:
        """The next pass, or None with nothing to compute: decoding requests, then chunks, then who waits."""
        assert self._in_flight is None
        preemptions = self.num_preemptions
        draft = Draft(self.config.max_batched_tokens)
        decoding = [request for request in self._running if _decodes(request)]
        chunked = [request for request in self._running if not _decodes(request)]
        for request in (*decoding, *chunked):
            if not draft.budget:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it
            if request.slot < 0 and not self._slots.free:
                continue  # landed while all slots were taken: blocked requests hold none
            if self._grow(request):
                self._compute(request, draft)
        while draft.budget and self._slots.free and preemptions == self.num_preemptions:
            found = self._first_that_fits(self._local, self._remote)
            if found is None:
                break
            request, matched = found
            self._admit(request, matched)
            request.num_computed = request.num_cached
            self._run(request)
            self._compute(request, draft)
            draft.admitted.append(request)
        if not draft.rows:
            return None
        counter_base = self._passes * self.config.layers
        step = Step(self._passes, counter_base, self._slots.take_drops(), draft.adds, draft.rows)
        self._passes += 1
        self._in_flight, self._in_pass = step, draft.requests
        return Planned(step, draft.chunks, draft.admitted)

    def apply(self, result: StepResult) -> list[Emitted]:
        """What the pass in flight gave: tokens, ends, nothing for a chunk that another is to follow."""
        step, requests, aborted = self._in_flight, self._in_pass, self._aborted
        assert step is not None
        assert step.step_id == result.step_id, (step.step_id, result.step_id)
        self._in_flight, self._in_pass, self._aborted = None, [], set()
        faults = {fault.row: fault.message for fault in result.faults}
        emitted = []
        sampled = -1  # which of the result's tokens is the row's
        for index, (row, request) in enumerate(zip(step.rows, requests, strict=True)):
            sampled += row.sample
            stop = row.start + len(row.tokens)
            if request.id in aborted:
                emitted.append(self._end(request, FinishReason.ABORT))
            elif result.error is not None:
                emitted.append(self._end(request, FinishReason.ERROR, result.error))
            elif index in faults:
                self._pool.forget(request.pages)  # what made this row fail may lie in KV of earlier chunks
                emitted.append(self._end(request, FinishReason.ERROR, faults[index]))
            else:
                self._index(request, row.start, stop)
                request.num_computed = stop
                if row.sample:
                    emitted.append(self._sampled(request, result.tokens[sampled], result.logprobs[sampled]))
                elif request.prefill_only and stop == request.goal:
                    emitted.append(self._end(request, FinishReason.STOP))
        return emitted

    # Admission.

    def _first_that_fits(
        self, queue: list[Request], other: list[Request]
    ) -> tuple[Request, list[int]] | None:
        """The most senior request of `queue` that fits, and its cached pages.

        It may overtake more senior ones that do not fit, the head of the `other` queue among them, but none
        of them more than MAX_OVERTAKEN times.
        """
        overtaken = []
        for request in heapq.merge(queue[:LOOK_AHEAD], other[:1], key=seniority):
            matched = self._matched_if_fits(request)
            if matched is None:
                if request.overtaken == MAX_OVERTAKEN:
                    return None
                overtaken.append(request)
            elif not other or request is not other[0]:
                for senior in overtaken:
                    senior.overtaken += 1
                return request, matched
        return None

    def _matched_if_fits(self, request: Request) -> list[int] | None:
        """The request's cached pages, all but its last token's at most, if the rest can be had now."""
        pool = self._pool
        most = (request.goal - 1) // self.config.page_tokens
        matched = pool.match(islice(self._names.of(request, most), most))
        fresh = pool.pages_for(request.goal) - len(matched)
        may_grow = 0 if request.prefill_only else len(self._running) + len(self._blocked)
        if fresh + pool.unheld(matched) + may_grow > pool.available:
            return None
        pinned = pool.pinned  # with none, one request may pin more than half
        if request.remote and pinned and pinned + pool.unpinned(matched) + fresh > pool.total // 2:
            return None
        return matched

    def _admit(self, request: Request, matched: list[int]) -> None:
        """Give a waiting request all of its pages."""
        self._withdraw(request)
        self._pool.take(matched)
        request.pages = matched + self._pool.allocate(self._pool.pages_for(request.goal) - len(matched))
        request.num_cached = len(matched) * self.config.page_tokens
        request.overtaken = 0
        if request.admitted_s is None:
            request.admitted_s = self._clock()
            self.prefix_query_tokens += request.goal
            self.prefix_hit_tokens += request.num_cached

    def _enqueue(self, request: Request, *, remote: bool) -> None:
        request.status = Status.WAITING
        request.remote = remote
        insort(self._remote if remote else self._local, request, key=seniority)

    def _withdraw(self, request: Request) -> None:
        queue = self._remote if request.remote else self._local
        index = bisect_left(queue, seniority(request), key=seniority)
        assert queue[index] is request
        del queue[index]

    # Running requests.

    def _run(self, request: Request) -> None:
        request.status = Status.RUNNING
        insort(self._running, request, key=seniority)

    def _grow(self, request: Request) -> bool:
        """Have a page for the next token's KV. False if the request itself was the one to preempt for it."""
        missing = self._pool.pages_for(request.num_computed + 1) - len(request.pages)
        while missing > self._pool.available:
            victim = self._running[-1]
            self._vacate(victim)
            self._enqueue(victim, remote=self.config.role is Role.DECODE)
            victim.preemptions += 1
            self.num_preemptions += 1
            if victim is request:
                return False
        if missing > 0:
            request.pages += self._pool.allocate(missing)
        return True

    def _compute(self, request: Request, draft: Draft) -> None:
        """Add the request's row, and open its slot if the ranks do not know it yet."""
        if request.slot < 0:
            request.slot = self._slots.open()
            request.num_pages_sent = 0
            params, history = (
                (None, []) if request.prefill_only else (request.params, request.prompt + request.output)
            )
            draft.adds.append(AddSlot(request.slot, params, history, len(request.prompt)))
        start = request.num_computed
        stop = min(request.goal, start + draft.budget)
        new_pages = request.pages[request.num_pages_sent :]
        request.num_pages_sent = len(request.pages)
        sample = stop == request.num_tokens
        draft.rows.append(Row(request.slot, start, request.tokens(start, stop), new_pages, sample))
        draft.requests.append(request)
        draft.budget -= stop - start
        if request.prefill_only:
            pages = tuple(request.pages)
            draft.chunks.append(Chunk(request.id, start, stop, pages, last=stop == request.goal))

    def _index(self, request: Request, start: int, stop: int) -> None:
        """The KV of tokens `[start, stop)` is there and sound: others may find the pages that it fills."""
        first, end = start // self.config.page_tokens, stop // self.config.page_tokens
        names = self._names.of(request, end)
        for index in range(first, end):
            self._pool.cache(request.pages[index], names[index])

    def _sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Emitted:
        self.num_sampled += 1
        request.output.append(token)
        finish = finish_reason(self.config, request)
        if finish is not None:
            self._end(request, finish)
        return Emitted(request, [token], [logprobs], finish)

    def _vacate(self, request: Request) -> None:
        """Take the request out of its queue, its pages and its slot; the caller says what becomes of it."""
        if request.status is Status.RUNNING:
            self._running.remove(request)
            if request.slot >= 0:
                self._slots.close(request.slot)
                request.slot = -1
        elif request.status is Status.BLOCKED:
            del self._blocked[request.id]
            self._pool.unpin(_pin_of(request))
        else:
            self._withdraw(request)
        self._pool.release(request.pages)
        request.pages = []
        request.num_computed = 0

    def _end(self, request: Request, finish: FinishReason, error: str | None = None) -> Emitted:
        self._vacate(request)
        request.status = Status.FINISHED
        del self._live[request.id]
        return Emitted(request, finish=finish, error=error)

    def check(self) -> None:
        """Assert that requests, pages and slots agree: linear in their number, for idle moments and tests."""
        self._pool.check()
        held = sum(len(request.pages) for request in self._live.values())
        assert self._pool.references == held + self._pool.pins, "a page is held by nobody we know"
        queued = [*self._local, *self._remote, *self._blocked.values(), *self._running]
        assert len(queued) == len(self._live), "a request is in no queue, or in two"
        assert all(self._live[request.id] is request for request in queued)
        self._slots.check([request.slot for request in self._running if request.slot >= 0])


def _decodes(request: Request) -> bool:
    return request.goal - request.num_computed == 1 and not request.prefill_only


def _pin_of(request: Request) -> Hashable:
    return "blocked", request.id
