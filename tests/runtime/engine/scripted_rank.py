"""Ranks whose KV can be checked: what a token's KV holds is a digest of all tokens up to it.

A row whose page table does not hold exactly the KV of the tokens before it fails at once, whoever wrote over
it. The sampled token follows from the digest alone, so a request's output is known beforehand, however its
passes were cut, preempted or moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_crds.role_config import Role
from tandem_runtime.engine.pages import PagePool
from tandem_runtime.engine.request import FinishReason, Request, SamplingParams
from tandem_runtime.engine.scheduler import Planned, Remote, Scheduler, SchedulerConfig
from tandem_runtime.engine.step import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tandem_runtime.engine.scheduler import Emitted
    from tandem_runtime.engine.step import RowFault

VOCAB = 1000
EOS = 999
ROOT = 1


def digest(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 7) % (1 << 61)


def digests(tokens: Iterable[int]) -> list[int]:
    out, last = [], ROOT
    for token in tokens:
        last = digest(last, token)
        out.append(last)
    return out


def sampled_after(value: int) -> int:
    return value % EOS  # never the end of the sequence by chance


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    value, out = digests(prompt)[-1], []
    for _ in range(count):
        out.append(sampled_after(value))
        value = digest(value, out[-1])
    return out


@dataclass
class Ended:
    tokens: list[int]
    finish: FinishReason
    error: str | None


@dataclass
class World:
    """A scheduler, its pool, one rank and, on the other side of a transfer, whatever a test lets happen."""

    role: Role
    pages: int = 64
    page_tokens: int = 16
    budget: int = 64
    sequences: int = 8
    max_model_len: int = 4096
    memory: dict[tuple[int, int], int] = field(default_factory=dict)  # (page, offset) -> digest
    tables: dict[int, list[int]] = field(default_factory=dict)  # slot -> pages
    output: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Ended] = field(default_factory=dict)
    passes: int = 0

    def __post_init__(self) -> None:
        self.pool = PagePool(self.pages, self.page_tokens)
        config = SchedulerConfig(
            role=self.role,
            page_tokens=self.page_tokens,
            pages=self.pages,
            layers=3,
            max_batched_tokens=self.budget,
            max_sequences=self.sequences,
            max_model_len=self.max_model_len,
            eos_token_ids=frozenset({EOS}),
            vocab_size=VOCAB,
        )
        self.scheduler = Scheduler(config, self.pool)
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        return self.add_with(request_id, prompt, params, priority)

    def add_with(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> Request:
        prefill_only = self.role is Role.PREFILL
        request = Request(request_id, list(prompt), params, 0.0, prefill_only=prefill_only, priority=priority)
        assert self.scheduler.validate(request.prompt, params) is None
        self.requests[request_id] = request
        self.output[request_id] = []
        self.scheduler.add(request)
        return request

    def plan(self) -> Planned | None:
        return self.scheduler.plan()

    def compute(self, planned: Planned) -> list[int]:
        """What the rank does with a step; the tokens it samples."""
        step = planned.step
        assert step.counter_base == 3 * self.passes
        assert step.num_tokens <= self.budget
        self.passes += 1
        for slot in step.drops:
            del self.tables[slot]
        owner = {request.slot: request for request in self.requests.values() if request.slot >= 0}
        for add in step.adds:
            assert add.slot not in self.tables
            self.tables[add.slot] = []
            request = owner[add.slot]
            if self.role is not Role.PREFILL:
                assert add.history == request.prompt + request.output
                assert add.prompt_len == len(request.prompt)
        assert len({row.slot for row in step.rows}) == len(step.rows)
        tokens = []
        for row in step.rows:
            request = owner[row.slot]
            table = self.tables[row.slot]
            table += row.new_pages
            assert table == request.pages
            stop = row.start + len(row.tokens)
            assert row.tokens == request.tokens(row.start, stop)
            values = digests(request.tokens(0, stop))
            assert self.read(table, row.start) == values[: row.start], f"{request.id}: wrong KV"
            self.write(table, values, row.start, stop)
            if row.sample:
                assert stop == request.num_tokens
                tokens.append(sampled_after(values[-1]))
        return tokens

    def apply(
        self,
        planned: Planned,
        tokens: list[int],
        *,
        error: str | None = None,
        faults: Sequence[RowFault] = (),
    ) -> list[Emitted]:
        step_id = planned.step.step_id
        result = StepResult(step_id, tokens, [None] * len(tokens), faults=list(faults), error=error)
        if error is not None:
            result = StepResult(step_id, [], [], error=error)
        emitted = self.scheduler.apply(result)
        self.record(emitted)
        return emitted

    def step(self) -> Planned | None:
        planned = self.plan()
        if planned is not None:
            self.apply(planned, self.compute(planned))
        return planned

    def run(self, limit: int = 2000) -> int:
        """Passes until nothing is left to compute."""
        for count in range(limit):
            if self.step() is None:
                return count
            self.scheduler.check()
        raise AssertionError(f"not done after {limit} passes: {self.scheduler.counts()}")

    def record(self, emitted: Iterable[Emitted]) -> None:
        for item in emitted:
            request_id = item.request.id
            assert request_id not in self.ended, f"{request_id} goes on after its end"
            self.output[request_id] += item.tokens
            if item.finish is not None:
                self.ended[request_id] = Ended(self.output[request_id], item.finish, item.error)

    def read(self, table: Sequence[int], stop: int) -> list[int | None]:
        size = self.page_tokens
        return [self.memory.get((table[i // size], i % size)) for i in range(stop)]

    def write(self, table: Sequence[int], values: Sequence[int], start: int, stop: int) -> None:
        for i in range(start, stop):
            self.memory[table[i // self.page_tokens], i % self.page_tokens] = values[i]

    def land(self, remote: Remote) -> None:
        """A prefill worker's writes arrive: all tokens but the last, from the cached ones on."""
        tokens = remote.request.tokens(0, remote.request.num_tokens - 1)
        values = digests(tokens)[remote.cached_tokens :]
        assert len(values) == remote.tokens_to_move
        assert len(remote.pages) == self.pool.pages_for(len(values))
        self.write(remote.pages, values, 0, len(values))

    def serve_remote(self) -> int:
        """Block, land and ready everything that fits now; how many."""
        count = 0
        while (remote := self.scheduler.next_remote()) is not None:
            self.land(remote)
            self.scheduler.ready(remote.request.id)
            count += 1
        return count

    def run_decode(self, limit: int = 2000) -> None:
        for _ in range(limit):
            served = self.serve_remote()
            if self.step() is None and not served:
                return
            self.scheduler.check()
        raise AssertionError(f"not done after {limit} passes: {self.scheduler.counts()}")

    def assert_outputs_are_right(self) -> None:
        for request_id, ended in self.ended.items():
            prompt = self.requests[request_id].prompt
            assert ended.tokens == expected_output(prompt, len(ended.tokens)), request_id

    def assert_all_returned(self) -> None:
        self.scheduler.check()
        assert self.scheduler.idle
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total
        assert counts.pinned == 0


def rows_of(planned: Planned) -> list[tuple[int, int, int, int, bool]]:
    """Each row as `(slot, start, tokens, new pages, sample)`: what a table of exact steps compares."""
    return [
        (row.slot, row.start, len(row.tokens), len(row.new_pages), row.sample) for row in planned.step.rows
    ]
