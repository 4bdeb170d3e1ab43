"""Random schedules: requests come, leave, fail and move in any order, and every end is the right one.

Tickets are modelled with the one property that matters here: until a ticket ends, late writes may land in its
pages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from scripted_rank import EOS, World, digests, expected_output

from tandem_crds.role_config import Role
from tandem_runtime.engine.request import FinishReason
from tandem_runtime.engine.step import RowFault

if TYPE_CHECKING:
    from tandem_runtime.engine.scheduler import Planned, Remote


@dataclass
class Schedule:
    """One random life of a worker. Whatever may happen next is drawn from the seed."""

    role: Role
    seed: int
    failures: bool = True
    remotes: dict[str, tuple[str, Remote]] = field(default_factory=dict)  # request -> ticket, what it moves
    stray: dict[str, Remote] = field(default_factory=dict)  # tickets whose request left them
    sources: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)  # pin -> pages, prompt
    in_flight: Planned | None = None
    added: int = 0

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.world = World(
            self.role,
            pages=rng.choice((8, 16, 40)),
            page_tokens=rng.choice((4, 16)),
            budget=rng.choice((1, 16, 64, 64, 1000)),
            sequences=rng.choice((1, 4, 8, 8)),
        )
        self.start = [rng.randrange(EOS) for _ in range(400)]

    def event(self, kinds: tuple[str, ...]) -> None:
        getattr(self, self.rng.choice(kinds))()
        self.world.scheduler.check()

    def add(self) -> None:
        rng, world = self.rng, self.world
        longest = min(world.pages * world.page_tokens, 120)
        shortest = 2 if self.role is Role.PREFILL else 1
        count = rng.choice((rng.randint(shortest, longest), rng.choice((2, 15, 16, 17, 32, 33))))
        count = max(shortest, min(count, longest))
        shared = rng.choice((0, count // 2, count))  # many prompts start alike, some are equal
        prompt = self.start[:shared] + [rng.randrange(EOS) for _ in range(count - shared)]
        max_tokens = rng.choice((rng.randint(1, 8), rng.randint(20, 80)))
        world.add(str(self.added), prompt, max_tokens, priority=rng.choice((0, 0, 0, 1)))
        self.added += 1

    def plan(self) -> None:
        if self.in_flight is None:
            self.in_flight = self.world.plan()
            if self.in_flight is not None and self.role is Role.PREFILL:
                for request in self.in_flight.admitted:
                    self.world.pool.pin(f"source {request.id}", request.pages)
                    self.sources[f"source {request.id}"] = (list(request.pages), request.prompt[:-1])

    def apply(self) -> None:
        if self.in_flight is None:
            return
        planned, self.in_flight = self.in_flight, None
        tokens = self.world.compute(planned)
        error, faults = None, []
        if self.failures and self.rng.random() < 0.01:
            error = "the pass failed"
        elif self.failures and self.rng.random() < 0.02:
            index = self.rng.randrange(len(planned.step.rows))
            faults = [RowFault(index, "the row failed")]
            if planned.step.rows[index].sample:
                tokens[sum(row.sample for row in planned.step.rows[:index])] = -1
        self.world.apply(planned, tokens, error=error, faults=faults)

    def abort(self) -> None:
        live = [request_id for request_id in self.world.requests if request_id not in self.world.ended]
        if not self.failures or not live or self.rng.random() < 0.8:
            return
        request_id = self.rng.choice(live)
        emitted = self.world.scheduler.abort(request_id)
        if emitted is not None:
            self.world.record([emitted])
            self.leave_ticket(request_id)

    def leave_ticket(self, request_id: str) -> None:
        if request_id in self.remotes:
            ticket, remote = self.remotes.pop(request_id)
            self.stray[ticket] = remote

    def dispatch(self) -> None:
        remote = self.world.scheduler.next_remote()
        if remote is None:
            return
        if remote.tokens_to_move == 0:
            self.world.scheduler.ready(remote.request.id)
            return
        ticket = f"ticket {self.rng.random()}"
        self.world.pool.pin(ticket, remote.pages)
        self.remotes[remote.request.id] = (ticket, remote)

    def land(self) -> None:
        if self.remotes:
            request_id = self.rng.choice(list(self.remotes))
            ticket, remote = self.remotes.pop(request_id)
            self.world.land(remote)
            self.world.scheduler.ready(request_id)
            self.world.pool.unpin(ticket)

    def fail_transfer(self) -> None:
        if not self.failures or not self.remotes or self.rng.random() < 0.5:
            return
        request_id = self.rng.choice(list(self.remotes))
        self.leave_ticket(request_id)
        match self.rng.choice(("requeue", "requeue", "run_local", "fail")):
            case "requeue":
                self.world.scheduler.requeue(request_id)
            case "run_local":
                self.world.scheduler.run_local(request_id)
            case "fail":
                self.world.record([self.world.scheduler.fail(request_id, "prefill is gone")])

    def late_write(self) -> None:
        for remote in self.stray.values():
            for page in remote.pages:
                for offset in range(self.world.page_tokens):
                    self.world.memory[page, offset] = -1

    def end_ticket(self) -> None:
        if self.stray:
            ticket = self.rng.choice(list(self.stray))
            del self.stray[ticket]
            self.world.pool.unpin(ticket)

    def end_source(self) -> None:
        """The last write from these pages has completed; it must have read what the prompt's pass wrote."""
        done = [owner for owner in self.sources if owner.split()[1] in self.world.ended]
        if done:
            owner = self.rng.choice(done)
            pages, tokens = self.sources.pop(owner)
            if self.world.ended[owner.split()[1]].finish is FinishReason.STOP:
                assert self.world.read(pages, len(tokens)) == digests(tokens)
            self.world.pool.unpin(owner)


PASS = (*("plan", "apply") * 6, "abort")
TRANSFER = (*("dispatch", "land") * 2, "fail_transfer", "late_write", "end_ticket")
EVENTS = {Role.MIXED: PASS, Role.PREFILL: (*PASS, "end_source"), Role.DECODE: (*PASS, *TRANSFER)}


def live(schedule: Schedule) -> None:
    for _ in range(600):
        schedule.event((*EVENTS[schedule.role], "add"))
    for _ in range(60_000):
        if schedule.world.scheduler.idle and not schedule.stray and not schedule.sources:
            break
        schedule.event(EVENTS[schedule.role])


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("role", list(Role))
def test_every_request_ends_once_with_the_right_tokens_and_every_page_returns(role: Role, seed: int) -> None:
    schedule = Schedule(role, seed)
    live(schedule)
    assert schedule.added > 0
    assert set(schedule.world.ended) == set(schedule.world.requests)
    schedule.world.assert_outputs_are_right()
    schedule.world.assert_all_returned()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_without_failures_every_request_gets_all_of_its_tokens(role: Role, seed: int) -> None:
    schedule = Schedule(role, 1000 + seed, failures=False)
    live(schedule)
    world = schedule.world
    assert set(world.ended) == set(world.requests)
    for request_id, ended in world.ended.items():
        request = world.requests[request_id]
        room = world.pages * world.page_tokens + 1 - len(request.prompt)
        assert ended.finish is FinishReason.LENGTH
        assert ended.tokens == expected_output(request.prompt, min(request.params.max_tokens, room))
    schedule.world.assert_all_returned()


def test_the_schedules_above_reach_what_they_are_meant_to_reach() -> None:
    """Preemption and sharing must happen in them, or they prove little."""
    for role in (Role.MIXED, Role.DECODE):
        schedules = [Schedule(role, seed) for seed in range(12)]
        for schedule in schedules:
            live(schedule)
        assert sum(schedule.world.scheduler.num_preemptions for schedule in schedules) > 10
        assert sum(schedule.world.scheduler.prefix_hit_tokens for schedule in schedules) > 500
