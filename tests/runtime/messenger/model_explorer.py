"""Breadth-first search over every reachable state, and what it finds.

Safety: the model raises Violation in the move that breaks an invariant. Ending: from every state some state
must be reachable, by fair moves alone, in which every ticket has ended and every page is back; so no ticket
depends on luck, and none on a frame that may have been lost (a state in which all frames were just lost is
among them).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from model_world import EVERY_TICKET_ENDS, Model, Violation, World

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


@dataclass(frozen=True)
class Finding:
    """`broken` names the invariant, with the moves that lead there; None when all hold."""

    states: int
    moves: int
    seconds: float
    broken: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        summary = f"{self.states} states, {self.moves} moves, {self.seconds:.1f} s"
        return summary if self.broken is None else "\n  ".join((f"{self.broken}: {summary}", *self.trace))


class Explorable(Protocol):
    def start(self) -> Hashable: ...
    def moves(self, state: Hashable) -> Iterable[tuple[str, bool, Hashable]]: ...
    def ended(self, state: Hashable) -> bool: ...


class Alone:
    """One pair."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.start = model.start
        self.ended = model.ended

    def moves(self, state: World) -> Iterable[tuple[str, bool, World]]:
        return (move[:3] for move in self._model.moves(state))


class Together:
    """Several pairs that share one process, whose crash they share: several prefills of one decode
    (`shared` = "decode"), or the reverse. A state is the numbers of the pairs' worlds; a pair's own moves
    are worked out once.
    """

    def __init__(self, model: Model, pairs: int, shared: str) -> None:
        self._model = model
        self._pairs = pairs
        self._shared = shared
        self._worlds: list[World] = []
        self._numbers: dict[World, int] = {}
        self._moves: dict[int, list[tuple[str, bool, int]]] = {}
        self._crashes: dict[int, int] = {}
        self._ended: dict[int, bool] = {}

    def start(self) -> tuple[int, ...]:
        return (self._number(self._model.start()),) * self._pairs

    def ended(self, state: tuple[int, ...]) -> bool:
        for number in state:
            if number not in self._ended:
                self._ended[number] = self._model.ended(self._worlds[number])
        return all(self._ended[number] for number in state)

    def moves(self, state: tuple[int, ...]) -> Iterable[tuple[str, bool, tuple[int, ...]]]:
        # The pairs are alike, so which is which is only a name: states are sorted.
        for at, number in enumerate(state):
            rest = state[:at] + state[at + 1 :]
            for name, fair, to in self._moves.get(number) or self._work_out(number):
                yield name, fair, tuple(sorted((*rest, to)))
        crashed = [self._crashes[number] for number in state]
        if -1 not in crashed:
            yield f"{self._shared} crashes", False, tuple(sorted(crashed))

    def _work_out(self, number: int) -> list[tuple[str, bool, int]]:
        world = self._worlds[number]
        self._crashes[number] = -1
        self._moves[number] = moves = []
        for move in self._model.moves(world):
            if move.crash == self._shared:
                self._crashes[number] = self._number(move.world)
            else:
                moves.append((move.name, move.fair, self._number(move.world)))
        return moves

    def _number(self, world: World) -> int:
        number = self._numbers.setdefault(world, len(self._worlds))
        if number == len(self._worlds):
            self._worlds.append(world)
        return number


def explore(model: Model | Together, max_states: int) -> Finding:
    subject: Explorable = Alone(model) if isinstance(model, Model) else model
    began = time.process_time()
    start = subject.start()
    number: dict[Hashable, int] = {start: 0}
    worlds = [start]
    came: list[tuple[int, str]] = [(0, "")]
    fair: list[list[int]] = []  # fair[i]: states with a fair move into i
    moves = 0

    def finding(broken: str | None = None, at: int = 0, last: str = "") -> Finding:
        trace = [last] if last else []
        while at:
            at, name = came[at]
            trace.append(name)
        return Finding(len(worlds), moves, time.process_time() - began, broken, tuple(reversed(trace)))

    at = 0
    fair.append([])
    while at < len(worlds):
        try:
            for name, is_fair, world in subject.moves(worlds[at]):
                moves += 1
                to = number.setdefault(world, len(worlds))
                if to == len(worlds):
                    worlds.append(world)
                    came.append((at, name))
                    fair.append([])
                if is_fair and to != at:
                    fair[to].append(at)
        except Violation as violation:
            return finding(str(violation), at, "… and then it breaks")
        assert len(worlds) <= max_states, f"more than {max_states} states"
        at += 1
    ends = [i for i, world in enumerate(worlds) if subject.ended(world)]
    reaches = bytearray(len(worlds))
    for i in ends:
        reaches[i] = 1
    while ends:
        for i in fair[ends.pop()]:
            if not reaches[i]:
                reaches[i] = 1
                ends.append(i)
    stuck = reaches.find(0)
    return finding(EVERY_TICKET_ENDS, stuck) if stuck >= 0 else finding()
