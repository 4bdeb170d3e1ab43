"""One step from the pods that run to the pods that are wanted: pure, for both roles together.

Knows: generations (one Deployment of a role each), the two knobs, which generations can pair. Does not know:
the API server, time.

For each role, with `wanted` pods:

    held     = pods of all generations, terminating ones included: they still hold their devices
    grow     = min(wanted - newest.replicas, wanted + maxSurge - held - pods asked for and not yet there)
    surplus  = ready pods of all generations - (wanted - maxUnavailable)
    shrink   = old pods: those not ready first, which cost nobody anything, then at most `surplus` ready ones

A step that shrinks does not grow in the same role until the pods are gone, so that on a full cluster the
devices of the old pod are free when the new one asks for them. Old generations shrink oldest-listed first;
scale-up goes to the newest, scale-down takes old pods first and then the newest's.

Only pods with equal KV keys pair. While the keys differ, the last ready pods that serve are kept on purpose:
  * an old prefill generation keeps one ready pod as long as decode pods of its key are ready and the newest
    key has no ready pair yet, or decode pods of its key still run and are not all replaced;
  * an old decode generation gives up its last ready pod only when the newest key has a ready prefill.
Where both roles wait for each other like that and no knob allows one pod more (maxSurge 0 and a single
replica), progress wins: decode's last pod goes, and `waiting_for` says that serving pauses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Generation:
    """One Deployment of a role; `ready` and `pods` leave out terminating pods."""

    revision: str
    kv_key: str
    replicas: int
    ready: int
    pods: int
    terminating: int

    @property
    def held(self) -> int:
        """Pods that hold devices or are about to: those asked for and not yet made count."""
        return max(self.replicas, self.pods) + self.terminating


@dataclass(frozen=True, slots=True)
class RoleState:
    """The newest generation may be absent: it is not created yet."""

    wanted: int
    newest: str
    newest_kv_key: str
    generations: tuple[Generation, ...]

    @property
    def current(self) -> Generation:
        absent = Generation(self.newest, self.newest_kv_key, 0, 0, 0, 0)
        return next((one for one in self.generations if one.revision == self.newest), absent)

    @property
    def old(self) -> tuple[Generation, ...]:
        return tuple(one for one in self.generations if one.revision != self.newest)

    @property
    def ready(self) -> int:
        return sum(one.ready for one in self.generations)

    @property
    def held(self) -> int:
        return sum(one.held for one in self.generations)

    def ready_with(self, kv_key: str) -> int:
        return sum(one.ready for one in self.generations if one.kv_key == kv_key)


@dataclass(frozen=True, slots=True)
class Step:
    """Replicas by revision; an old generation stays listed at 0 until its last pod is gone."""

    prefill: Mapping[str, int]
    decode: Mapping[str, int]
    done: bool
    waiting_for: str


@dataclass(slots=True)
class _Move:
    """A role's replicas after this step, and why it does not go further."""

    replicas: dict[str, int]
    reasons: list[str] = field(default_factory=list)
    kept: bool = False  # a pod stays only so that a pair stays


def next_step(prefill: RoleState, decode: RoleState, *, max_surge: int, max_unavailable: int) -> Step:
    moves = {
        "prefill": _move("prefill", prefill, max_surge, max_unavailable, _keep_prefill(prefill, decode)),
        "decode": _move("decode", decode, max_surge, max_unavailable, _keep_decode(prefill, decode)),
    }
    states = {"prefill": prefill, "decode": decode}
    if any(move.kept for move in moves.values()) and not any(
        _changes(states[name], moves[name]) or _settling(states[name], moves[name]) for name in moves
    ):
        for name, state in states.items():
            moves[name] = _move(name, state, max_surge, max_unavailable, frozenset())
            moves[name].reasons.append("serving pauses: the knobs leave no room for a pod of each KV key")
    done = all(_done(states[name], moves[name]) for name in moves)
    reasons = [reason for move in moves.values() for reason in move.reasons]
    return Step(moves["prefill"].replicas, moves["decode"].replicas, done, "" if done else "; ".join(reasons))


def _keep_prefill(prefill: RoleState, decode: RoleState) -> frozenset[str]:
    """KV keys of which an old prefill generation must keep a ready pod."""
    key = prefill.newest_kv_key
    new_serves = prefill.current.ready > 0 and decode.ready_with(key) > 0
    return frozenset(
        one.kv_key
        for one in prefill.old
        if one.kv_key != key
        and one.ready
        and decode.ready_with(one.kv_key)
        and not (new_serves and _leaving(decode, one.kv_key))
    )


def _keep_decode(prefill: RoleState, decode: RoleState) -> frozenset[str]:
    """KV keys of which an old decode generation must keep a ready pod."""
    key = decode.newest_kv_key
    new_serves = prefill.ready_with(key) > 0 and decode.ready_with(key) > 0
    if new_serves:
        return frozenset()
    return frozenset(
        one.kv_key for one in decode.old if one.kv_key != key and one.ready and prefill.ready_with(one.kv_key)
    )


def _leaving(decode: RoleState, kv_key: str) -> bool:
    """Every decode generation of that key has been told to go to 0."""
    return all(one.replicas == 0 for one in decode.generations if one.kv_key == kv_key)


def _move(name: str, state: RoleState, max_surge: int, max_unavailable: int, keep: frozenset[str]) -> _Move:
    move = _Move({one.revision: one.replicas for one in state.old})
    move.replicas[state.newest] = state.current.replicas
    shrunk = _retire(name, state, max_unavailable, keep, move)
    excess = state.current.replicas - state.wanted
    if excess > 0:
        # A scale-down is what the user asked for: it is not an unavailability.
        move.replicas[state.newest] = state.wanted
    elif excess < 0 and not shrunk:
        room = state.wanted + max_surge - state.held
        grown = min(-excess, max(0, room))
        move.replicas[state.newest] += grown
        if not grown:
            _explain_full(name, state, move)
    if state.current.ready < min(state.wanted, move.replicas[state.newest]):
        missing = f"{move.replicas[state.newest] - state.current.ready} of {move.replicas[state.newest]}"
        move.reasons.append(f"{name}: {missing} pods of revision {state.newest} are not available yet")
    return move


def _retire(name: str, state: RoleState, max_unavailable: int, keep: frozenset[str], move: _Move) -> bool:
    """Takes from old generations what may go; whether anything went."""
    shrunk = False
    over = max(0, state.wanted - state.current.replicas)  # old pods that still stand in for new ones
    surplus = max(0, state.ready - max(0, state.wanted - max_unavailable))
    for one in state.old:
        # Not ready, or never made: nobody is served by them, and they hold what the new ones need.
        idle = max(0, one.replicas - one.ready)
        if idle:
            move.replicas[one.revision] -= idle
            shrunk = True
        ready = min(one.replicas, one.ready)
        floor = 1 if one.kv_key in keep else 0
        takes = min(surplus, max(0, ready - floor))
        if state.wanted == 0:
            takes = ready
        if takes:
            move.replicas[one.revision] -= takes
            surplus -= takes
            shrunk = True
        elif ready and floor and surplus:
            move.kept = True
            move.reasons.append(f"{name}: a pod of revision {one.revision} stays until the new KV key serves")
        elif ready and over:
            move.reasons.append(f"{name}: revision {one.revision} still serves")
    return shrunk


def _explain_full(name: str, state: RoleState, move: _Move) -> None:
    if leaving := sum(one.terminating for one in state.generations):
        move.reasons.append(f"{name}: {leaving} pods are terminating and hold their devices")


def _changes(state: RoleState, move: _Move) -> bool:
    before = {one.revision: one.replicas for one in state.generations}
    return any(before.get(revision, 0) != count for revision, count in move.replicas.items())


def _settling(state: RoleState, move: _Move) -> bool:
    """Pods are on their way in or out: the world will look different without us."""
    return any(one.terminating or one.pods != one.replicas for one in state.generations) or (
        state.current.ready < state.current.replicas
    )


def _done(state: RoleState, move: _Move) -> bool:
    old_gone = all(one.replicas == 0 and one.pods == 0 and one.terminating == 0 for one in state.old)
    return old_gone and state.current.ready == state.current.replicas == state.wanted
