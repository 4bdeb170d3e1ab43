"""Which pods of a new generation count as able to stand in for old ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from worlds import World

from tandem_crds import names
from tandem_crds.role_config import Role
from tandem_operator import generations
from tandem_operator.generations import AVAILABLE_S
from tandem_operator.objects import CONFIG_MAP, labels_of, uid_of
from tandem_operator.observed import WorkerState
from tandem_operator.revision import stored_revisions
from tandem_operator.timestamps import text

if TYPE_CHECKING:
    from tandem_operator.objects import Obj


def ready_of_newest(world: World, role: Role = Role.DECODE) -> int:
    """How many of the newest generation the planner is told are ready."""
    observed = world.observe()
    newest = next(one for one in stored_revisions(observed.children[CONFIG_MAP]) if one.role is role)
    state = generations.role_state(observed, role, 2, newest, world.now)
    return next(one.ready for one in state.generations if one.revision == newest.name)


def say_paired(world: World, pod: Obj, *, paired: bool) -> None:
    world.workers[uid_of(pod)] = WorkerState(provider="net", paired=paired)


@pytest.fixture
def world() -> World:
    world = World()
    world.settle()
    world.now += 100
    return world


def test_a_pod_counts_once_routers_have_had_time_to_hear_of_it(world: World) -> None:
    pod = world.of_role("decode")[0]
    pod["status"]["conditions"][0]["lastTransitionTime"] = text(world.now)
    assert ready_of_newest(world) == 1
    assert world.plan().requeue_s == AVAILABLE_S
    world.now += AVAILABLE_S
    assert ready_of_newest(world) == 2


def test_a_decode_that_has_not_reached_its_prefill_does_not_count(world: World) -> None:
    for pod in world.of_role("decode"):
        say_paired(world, pod, paired=False)
    assert ready_of_newest(world) == 0
    for pod in world.of_role("decode"):
        say_paired(world, pod, paired=True)
    assert ready_of_newest(world) == 2


def test_without_a_prefill_of_its_key_there_is_nothing_to_reach(world: World) -> None:
    """New pairs of another KV key start decode and prefill together; neither may wait for the other."""
    for pod in world.of_role("prefill"):
        labels_of(pod)[names.LABEL_KV_KEY] = "another"
    for pod in world.of_role("decode"):
        say_paired(world, pod, paired=False)
    assert ready_of_newest(world) == 2


def test_prefill_pods_reach_out_to_nobody(world: World) -> None:
    for pod in world.of_role("prefill"):
        say_paired(world, pod, paired=False)
    assert ready_of_newest(world, Role.PREFILL) == 1


def test_old_pods_stay_until_new_ones_count(world: World) -> None:
    old = {uid_of(pod) for pod in world.of_role("decode")}
    world.edit(decode={"replicas": 2, "engine": {"maxSequences": 24}})
    for _ in range(60):
        world.run()
        world.tick()
        for pod in world.of_role("decode"):
            if uid_of(pod) not in old:
                say_paired(world, pod, paired=False)
    left = {uid_of(pod) for pod in world.of_role("decode")} & old
    assert len(left) == 1, "maxUnavailable is 1, and the new pod is of no use yet"
    for _ in range(60):
        world.run()
        world.tick()
        for pod in world.of_role("decode"):
            say_paired(world, pod, paired=True)
    assert not {uid_of(pod) for pod in world.of_role("decode")} & old
