"""Properties of the plan: a fixpoint that heals, does not depend on order, and restarts nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from worlds import World, manifest, settings

from tandem_operator.objects import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, JOB, labels_of

SPECS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "ratio": {"prefill": {}, "scaling": {"ratio": {"prefill": 1, "decode": 2}}, "decode": {"replicas": 3}},
    "parked": {"decode": {"replicas": 0}},
    "packed": {"topology": {"pack": {"key": "topology.kubernetes.io/zone"}}},
    "hub": {"model": {"uri": "hf://a/b", "cache": {"claimName": "c"}, "secretRef": {"name": "s"}}},
}


def settled(name: str = "as it is") -> World:
    world = World(manifest(**SPECS[name]))
    world.settle()
    return world


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_run_on_its_own_world_writes_nothing(name: str) -> None:
    world = settled(name)
    before = world.writes
    world.run()
    assert world.writes == before


@pytest.mark.parametrize("name", SPECS)
def test_the_order_of_what_was_read_makes_no_difference(name: str) -> None:
    from tandem_operator.desired import desired

    world = settled(name)
    plans = [repr(desired(world.observe(random.Random(seed)), settings(), world.now)) for seed in range(5)]
    assert len(set(plans)) == 1


@limits(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_children_are_deleted_come_back(data: st.DataObject) -> None:
    world = settled()
    names = sorted((kind.kind, name) for kind, name in world.objects if kind != JOB)
    kinds = {kind.kind: kind for kind in CHILD_KINDS}
    for kind, name in data.draw(st.lists(st.sampled_from(names), unique=True)):
        world.remove(kinds[kind], name)
    world.settle()
    back = {(kind.kind, name) for kind, name in world.objects}
    assert set(names) <= back
    assert world.condition("Ready") == ("True", "Ready")


def templates(world: World) -> dict[str, str]:
    return {
        name: json.dumps(one["spec"]["template"], sort_keys=True)
        for (kind, name), one in world.objects.items()
        if kind == DEPLOYMENT
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"image": "registry.example/tandem:2"},
        {"runtime": {"env": [{"name": "NEW", "value": "1"}]}},
        {"profiles": {"tcp": {"providers": ["tcp"], "env": {"FI_LOG_LEVEL": "warn"}}}},
        {"runtime": {"podTemplate": {"spec": {"priorityClassName": "high"}}}},
    ],
)
def test_another_operator_or_installation_restarts_no_pod(changed: dict[str, Any]) -> None:
    world = settled()
    before, pods = templates(world), set(world.pods)
    other = settings(**changed)
    world.settle(other)
    assert templates(world) == before
    assert set(world.pods) == pods


def test_a_revert_uses_the_revision_that_is_still_there() -> None:
    world = settled()
    first = templates(world)
    world.edit(drainSeconds=5)
    world.run()
    world.tick()
    world.edit(drainSeconds=600)
    world.settle()
    assert templates(world) == first


def test_ended_revisions_leave_nothing_behind() -> None:
    world = settled()
    for seconds in (5, 6, 7):
        world.edit(drainSeconds=seconds)
        world.settle()
    revisions = {
        labels_of(one).get("tandem.dev/revision")
        for (kind, _), one in world.objects.items()
        if kind in (CONFIG_MAP, DEPLOYMENT) and "tandem.dev/role" in labels_of(one)
    }
    assert len(revisions) == 2  # one of each role


def test_a_model_that_is_being_deleted_gets_nothing_new() -> None:
    world = World()
    world.parent["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    plan = world.plan()
    assert (plan.apply, plan.delete, plan.status, plan.peer_secret) == ((), (), None, None)
