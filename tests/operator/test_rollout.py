"""The rollout planner against a tiny cluster: pods take a round to start and a round to end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from tandem_operator.rollout import Generation, RoleState, next_step

KEYS = {"a": "k1", "b": "k1", "c": "k2"}


@dataclass
class Role:
    """What Deployments, ReplicaSets and kubelets make of a plan. `capacity` devices exist for the role."""

    wanted: int
    capacity: int
    replicas: dict[str, int] = field(default_factory=dict)
    starting: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    ending: dict[str, int] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()  # revisions whose pods never get ready

    def state(self, newest: str) -> RoleState:
        known = {*self.replicas, *self.starting, *self.ready, *self.ending}
        return RoleState(
            self.wanted,
            newest,
            KEYS[newest],
            tuple(
                Generation(
                    one,
                    KEYS[one],
                    self.replicas.get(one, 0),
                    self.ready.get(one, 0),
                    self.ready.get(one, 0) + self.starting.get(one, 0),
                    self.ending.get(one, 0),
                )
                for one in sorted(known)
                if one == newest
                or self.replicas.get(one)
                or self.ready.get(one)
                or self.starting.get(one)
                or self.ending.get(one)
            ),
        )

    @property
    def held(self) -> int:
        return sum(sum(one.values()) for one in (self.starting, self.ready, self.ending))

    def tick(self) -> None:
        self.ending.clear()
        for one in list(self.starting):
            if one not in self.broken:
                self.ready[one] = self.ready.get(one, 0) + self.starting.pop(one)
        for one, count in self.replicas.items():
            surplus = self.ready.get(one, 0) + self.starting.get(one, 0) - count
            for place in (self.starting, self.ready):  # a ReplicaSet ends pods that are not ready first
                goes = min(max(0, surplus), place.get(one, 0))
                place[one] = place.get(one, 0) - goes
                self.ending[one] = self.ending.get(one, 0) + goes
                surplus -= goes
        for one, count in self.replicas.items():
            missing = count - self.ready.get(one, 0) - self.starting.get(one, 0)
            starts = min(max(0, missing), max(0, self.capacity - self.held))
            self.starting[one] = self.starting.get(one, 0) + starts


class Cluster:
    def __init__(self, prefill: int, decode: int, *, surge: int, unavailable: int, spare: int = 0) -> None:
        self.surge, self.unavailable = surge, unavailable
        self.prefill, self.decode = Role(prefill, prefill + spare), Role(decode, decode + spare)
        self.trace: list[tuple[dict[str, int], dict[str, int]]] = []
        self.pauses = 0

    def serves(self) -> bool:
        return any(
            self.prefill.ready.get(one) and self.decode.ready.get(other)
            for one, other in itertools.product(KEYS, KEYS)
            if KEYS[one] == KEYS[other]
        )

    def step(self, newest: str) -> bool:
        step = next_step(
            self.prefill.state(newest),
            self.decode.state(newest),
            max_surge=self.surge,
            max_unavailable=self.unavailable,
        )
        for role, replicas in ((self.prefill, step.prefill), (self.decode, step.decode)):
            ready_before = sum(role.ready.values())
            cut = sum(
                max(0, min(role.ready.get(one, 0), role.ready.get(one, 0) - count))
                for one, count in replicas.items()
            )
            if role.wanted and cut and "serving pauses" not in step.waiting_for:
                floor = role.wanted - self.unavailable
                assert ready_before - cut >= min(floor, ready_before) or ready_before > role.wanted, replicas
            role.replicas = dict(replicas)
        self.trace.append((dict(step.prefill), dict(step.decode)))
        if not step.done:
            assert step.waiting_for or self._moved(), "nothing moves and nobody is told why"
        return step.done

    def _moved(self) -> bool:
        return (
            len(self.trace) < 2
            or self.trace[-1] != self.trace[-2]
            or self.prefill.held + self.decode.held > 0
        )

    def run(self, newest: str, rounds: int = 60) -> int:
        """Rounds until done. Fails if it never ends, or if more devices are asked for than may be."""
        served = self.serves()
        for count in range(rounds):
            if self.step(newest):
                return count
            for role in (self.prefill, self.decode):
                asked = sum(role.replicas.values()) + sum(role.ending.values())
                before = max(role.held, role.wanted + self.surge)
                assert asked <= before, f"{asked} pods asked for, {role.wanted} wanted"
            self.prefill.tick()
            self.decode.tick()
            self.pauses += served and not self.serves()
        raise AssertionError(f"not done after {rounds} rounds: {self.trace[-3:]}")


def started(prefill: int, decode: int, *, surge: int, unavailable: int, spare: int = 0) -> Cluster:
    cluster = Cluster(prefill, decode, surge=surge, unavailable=unavailable, spare=spare)
    cluster.run("a")
    cluster.pauses = 0
    return cluster


KNOBS = [(surge, unavailable) for surge in (0, 1, 2) for unavailable in (0, 1, 2) if surge or unavailable]


@pytest.mark.parametrize(("surge", "unavailable"), KNOBS)
@pytest.mark.parametrize("wanted", list(itertools.product((1, 2, 3, 4), (1, 2, 4))))
@pytest.mark.parametrize("path", ["b", "c", "ba", "bc", "cb", "cab"])
def test_every_rollout_ends_within_its_knobs(
    wanted: tuple[int, int], surge: int, unavailable: int, path: str
) -> None:
    cluster = started(*wanted, surge=surge, unavailable=unavailable, spare=surge)
    for newest in path[:-1]:  # overtaken after two rounds
        for _ in range(2):
            cluster.step(newest)
            cluster.prefill.tick()
            cluster.decode.tick()
    cluster.run(path[-1])
    assert cluster.decode.ready[path[-1]] == wanted[1]
    assert cluster.prefill.ready[path[-1]] == wanted[0]


@pytest.mark.parametrize("newest", ["b", "c"])
def test_a_full_cluster_without_a_spare_device_finishes(newest: str) -> None:
    cluster = started(2, 4, surge=0, unavailable=1)
    cluster.run(newest)
    assert cluster.decode.ready[newest] == 4


@pytest.mark.parametrize("wanted", [(1, 1), (1, 2), (2, 3)])
def test_a_change_of_kv_key_with_a_surge_never_leaves_clients_without_a_pair(wanted: tuple[int, int]) -> None:
    cluster = started(*wanted, surge=1, unavailable=0, spare=1)
    cluster.run("c")
    assert cluster.pauses == 0


def test_two_of_each_change_their_kv_key_without_a_spare_device_and_without_a_pause() -> None:
    cluster = started(2, 2, surge=0, unavailable=1)
    cluster.run("c")
    assert cluster.pauses == 0


def test_one_of_each_and_no_surge_pauses_and_says_so() -> None:
    cluster = started(1, 1, surge=0, unavailable=1)
    said = []
    for _ in range(20):
        step = next_step(
            cluster.prefill.state("c"), cluster.decode.state("c"), max_surge=0, max_unavailable=1
        )
        said.append(step.waiting_for)
        if cluster.step("c"):
            break
        cluster.prefill.tick()
        cluster.decode.tick()
    assert any("serving pauses" in one for one in said), said


def test_an_old_revision_that_never_got_ready_does_not_hold_up_the_next() -> None:
    cluster = started(1, 3, surge=0, unavailable=1)
    cluster.decode.broken = frozenset("b")
    for _ in range(6):
        cluster.step("b")
        cluster.prefill.tick()
        cluster.decode.tick()
    assert cluster.decode.ready["a"] == 2, "more than maxUnavailable went to pods that never got ready"
    cluster.run("c")


def test_a_revision_that_never_gets_ready_stops_at_what_the_knobs_allow() -> None:
    cluster = started(1, 4, surge=1, unavailable=0, spare=1)
    cluster.decode.broken = frozenset("b")
    for _ in range(20):
        assert not cluster.step("b")
        cluster.prefill.tick()
        cluster.decode.tick()
    assert cluster.decode.ready["a"] == 4


def test_scaling_up_goes_to_the_newest_and_down_takes_the_old_first() -> None:
    old, new = Generation("a", "k1", 2, 2, 2, 0), Generation("b", "k1", 1, 1, 1, 0)
    one = RoleState(1, "b", "k1", (Generation("b", "k1", 1, 1, 1, 0),))
    up = next_step(one, RoleState(5, "b", "k1", (old, new)), max_surge=0, max_unavailable=1)
    assert up.decode == {"a": 2, "b": 3}
    down = next_step(one, RoleState(1, "b", "k1", (old, new)), max_surge=0, max_unavailable=0)
    assert down.decode == {"a": 0, "b": 1}


def test_nothing_wanted_parks_every_generation() -> None:
    parked = RoleState(0, "b", "k1", (Generation("a", "k1", 2, 2, 2, 0), Generation("b", "k1", 1, 0, 1, 0)))
    none = RoleState(0, "b", "k1", ())
    step = next_step(none, parked, max_surge=0, max_unavailable=1)
    assert step.decode == {"a": 0, "b": 0}
    assert step.prefill == {"b": 0}
