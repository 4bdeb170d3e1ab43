"""One pass, with plans of the tests' own: what is read, written, skipped, told; and what a failure leaves."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from memory_kube import MemoryKube
from worlds import manifest, settings

from tandem_crds import names
from tandem_operator.desired import desired
from tandem_operator.kube import Conflict, Forbidden, Invalid, Unavailable
from tandem_operator.metrics import Metrics
from tandem_operator.objects import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    JOB,
    MODEL,
    POD,
    SECRET,
    SERVICE,
    owner_reference,
    uid_of,
)
from tandem_operator.plan import Deletion, Event, Plan
from tandem_operator.reconcile import Reconciler
from tandem_operator.recorder import Recorder
from tandem_operator.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tandem_operator.kube import KubeError
    from tandem_operator.objects import Obj
    from tandem_operator.observed import Observed, WorkerState
    from tandem_operator.settings import Settings

NAME = "m"


class Silent:
    """Pods that nobody can ask, and who was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def states(self, addresses: Mapping[str, str]) -> dict[str, WorkerState]:
        self.asked += addresses
        return {}

    async def arrivals(self, addresses: Mapping[str, str]) -> dict[str, float]:
        return {}


class Pass:
    """A server with one model, and a reconciler whose decisions a test gives."""

    def __init__(self, decide: Callable[[Observed, Settings, float], Plan]) -> None:
        self.kube = MemoryKube()
        parent = manifest()
        parent["metadata"] = {"name": NAME, "namespace": "default"}
        self.kube.put(parent)
        self.facts, self.metrics = Silent(), Metrics()
        self.now = 1_800_000_000.0
        self.read: list[int] = []
        self.reconciler = Reconciler(
            self.kube,
            self.facts,  # type: ignore[arg-type]
            Recorder(self.kube, "operator-0", self.metrics.events_failed.inc),
            self.metrics,
            settings(),
            decide,
            saw=lambda key, found: self.read.append(len(found)),
            clock=lambda: self.now,
        )

    @property
    def parent(self) -> Obj:
        found = self.kube.named(MODEL, NAME)
        assert found is not None
        return found

    async def run(self) -> float | None:
        return await self.reconciler.reconcile("default", NAME)

    async def writes(self) -> list[tuple[str, str, str]]:
        """Of one more pass."""
        self.kube.calls.clear()
        await self.run()
        return self.kube.writes()


def child(parent: Obj, kind: str = "Service", name: str = f"{NAME}-router", **fields: Any) -> Obj:
    api = {"Service": "v1", "Deployment": "apps/v1", "ConfigMap": "v1"}[kind]
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": {names.LABEL_MODEL: NAME},
            "ownerReferences": [owner_reference(parent)],
        },
        **fields,
    }


def applies(**fields: Any) -> Callable[[Observed, Settings, float], Plan]:
    return lambda observed, settings, now: Plan(apply=(child(observed.parent, **fields),))


async def test_a_pass_lists_each_kind_once_and_a_second_one_writes_nothing() -> None:
    one = Pass(applies(spec={"ports": [{"name": "http", "port": 80}]}))
    await one.run()
    lists = [kind for verb, kind, _ in one.kube.calls if verb == "list"]
    assert sorted(lists) == sorted(kind.kind for kind in (*CHILD_KINDS, POD))
    assert await one.writes() == []
    assert one.metrics.unchanged.labels(kind="Service")._value.get() == 1


async def test_an_edit_by_hand_is_undone_and_a_hands_addition_is_left() -> None:
    one = Pass(applies(spec={"ports": [{"name": "http", "port": 80}]}))
    await one.run()
    service = one.kube.named(SERVICE, f"{NAME}-router")
    assert service is not None
    spec = {"ports": [{"name": "http", "port": 81}], "externalName": "theirs"}
    one.kube.put({**service, "spec": spec})
    assert await one.writes() == [("apply", "Service", f"{NAME}-router")]
    service = one.kube.named(SERVICE, f"{NAME}-router")
    assert service is not None
    assert service["spec"] == {"ports": [{"name": "http", "port": 80}], "externalName": "theirs"}


async def test_a_foreign_object_at_our_name_is_told_and_never_touched() -> None:
    seen: list[int] = []

    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        seen.append(len(observed.foreign))
        return Plan(apply=() if observed.foreign else (child(observed.parent),))

    one = Pass(decide)
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{NAME}-router", "namespace": "default"},
        "spec": {"clusterIP": "None"},
    }
    one.kube.put(theirs)
    assert await one.writes() == []
    assert seen == [0, 1]


async def test_the_steps_come_in_the_plans_order_and_the_status_before_the_events() -> None:
    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        old = observed.named(CONFIG_MAP, "old")
        return Plan(
            peer_secret="m-peer-key",
            pod_costs={"p": 3},
            apply=(child(observed.parent),),
            delete=(Deletion(CONFIG_MAP, "old", uid_of(old)),) if old else (),
            decode_replicas=2,
            status={"selector": "x"},
            events=(Event("Normal", "BecameReady", "Reconcile", "it serves"),),
        )

    one = Pass(decide)
    one.kube.put(child(one.parent, "ConfigMap", "old"))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "default",
            "labels": {names.LABEL_MODEL: NAME},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}
            ],
        },
    }
    one.kube.put(pod)
    assert [call[:2] for call in await one.writes()] == [
        ("create", "Secret"),
        ("merge", "Pod"),
        ("apply", "Service"),
        ("delete", "ConfigMap"),
        ("merge", "DisaggregatedModel/scale"),
        ("merge", "DisaggregatedModel/status"),
        ("create", "Event"),
    ]
    assert one.parent["spec"]["decode"]["replicas"] == 2
    assert one.parent["status"] == {"selector": "x"}
    found = one.kube.named(POD, "p")
    assert found is not None
    assert found["metadata"]["annotations"] == {names.ANNOTATION_POD_DELETION_COST: "3"}


async def test_the_peer_key_is_made_once_and_survives_a_restart_of_the_operator() -> None:
    one = Pass(
        lambda observed, settings, now: Plan(
            peer_secret=None if observed.peer_secret_exists else "m-peer-key"
        )
    )
    await one.run()
    first = one.kube.named(SECRET, "m-peer-key")
    assert first is not None
    assert len(first["data"]["current"]) >= 64
    assert await one.writes() == []
    again = Pass(one.reconciler._decide)
    again.kube.objects = one.kube.objects
    await again.run()
    assert one.kube.named(SECRET, "m-peer-key") == first


async def test_a_status_that_did_not_change_is_not_written_and_a_removed_field_goes() -> None:
    status: dict[str, Any] = {"a": {"x": 1, "y": 2}, "conditions": [{"type": "Ready"}]}
    one = Pass(lambda observed, settings, now: Plan(status=json.loads(json.dumps(status))))
    await one.run()
    assert await one.writes() == []
    status["a"] = {"y": 3}
    await one.run()
    assert one.parent["status"]["a"] == {"y": 3}


async def test_a_status_is_never_written_over_a_spec_it_was_not_made_for() -> None:
    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        edited = one.parent
        one.kube.put({**edited, "spec": {**edited["spec"], "prefill": {"replicas": 7}}})
        return Plan(status={"observedGeneration": 1}, events=(Event("Normal", "X", "Y", "z"),))

    one = Pass(decide)
    with pytest.raises(Conflict):
        await one.run()
    assert "status" not in one.parent
    assert not any(kind == EVENT.kind for kind, _, _ in one.kube.objects)


def refusing(error: KubeError, kind: str = "Service") -> Callable[[str, str, str], KubeError | None]:
    return lambda verb, of, name: error if (verb, of) == ("apply", kind) else None


async def test_an_object_that_the_server_refuses_stops_nothing_else_and_is_told() -> None:
    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        bodies = (child(observed.parent), child(observed.parent, "ConfigMap", "other"))
        return Plan(apply=bodies, status={"rejected": list(observed.rejected)})

    one = Pass(decide)
    one.kube.fails = refusing(Invalid(".spec.bogus: field not declared in schema"))
    again_s = await one.run()
    assert one.kube.named(CONFIG_MAP, "other") is not None
    assert one.parent["status"] == {
        "rejected": [f"Service {NAME}-router: .spec.bogus: field not declared in schema"]
    }
    assert again_s == 600.0
    # The same body is not sent again before that, and the status stands still.
    assert await one.writes() == []
    one.now += 601
    assert await one.writes() == [("apply", "Service", f"{NAME}-router")]
    one.kube.fails = lambda verb, kind, name: None
    one.now += 601
    await one.run()
    assert one.parent["status"] == {"rejected": []}


async def test_with_the_real_decisions_a_refused_object_is_a_condition() -> None:
    one = Pass(desired)
    one.kube.fails = refusing(Invalid("spec is wrong"), "Job")
    await one.run()
    conditions = {found["type"]: found for found in one.parent["status"]["conditions"]}
    assert conditions["Reconciled"]["reason"] == "InvalidChild"
    assert "spec is wrong" in conditions["Reconciled"]["message"]
    assert await one.writes() == []


async def test_a_namespace_on_its_way_out_is_left_alone() -> None:
    one = Pass(applies())
    one.kube.fails = refusing(Forbidden("…because it is being terminated", terminating=True))
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    queue.add(("default", NAME))
    await worked(one, queue)
    assert one.metrics.passes.labels(result="gone")._value.get() == 1
    assert not queue._timers


async def test_a_child_deleted_since_it_was_seen_is_not_made_on_old_facts() -> None:
    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        if observed.named(SERVICE, f"{NAME}-router") is not None:
            one.kube.remove(SERVICE, f"{NAME}-router")
        return Plan(apply=(child(observed.parent, spec={"edited": now}),))

    one = Pass(decide)
    await one.run()
    one.now += 1
    with pytest.raises(Conflict):
        await one.run()
    assert one.kube.named(SERVICE, f"{NAME}-router") is None


async def test_an_api_server_that_does_not_answer_ends_the_pass_at_once() -> None:
    one = Pass(
        lambda observed, settings, now: Plan(
            apply=(child(observed.parent), child(observed.parent, "ConfigMap", "o"))
        )
    )
    one.kube.fails = lambda verb, kind, name: Unavailable("down") if verb == "apply" else None
    with pytest.raises(Unavailable):
        await one.run()
    assert len(one.kube.writes()) == 1


async def test_no_plan_is_made_on_a_partial_view() -> None:
    one = Pass(lambda observed, settings, now: pytest.fail("decided"))
    one.kube.fails = lambda verb, kind, name: (
        Unavailable("down") if (verb, kind) == ("list", "Deployment") else None
    )
    with pytest.raises(Unavailable):
        await one.run()


async def test_a_model_that_is_gone_or_going_is_not_decided_on() -> None:
    one = Pass(lambda observed, settings, now: pytest.fail("decided"))
    one.kube.put(
        {
            **one.parent,
            "metadata": {**one.parent["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"},
        }
    )
    assert await one.run() is None
    one.kube.remove(MODEL, NAME)
    assert await one.run() is None
    assert one.read[-1] == 0


async def test_a_bug_in_one_model_stops_no_other() -> None:
    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        if observed.parent["metadata"]["name"] == NAME:
            raise KeyError("bug")
        return Plan(status={"selector": "fine"})

    one = Pass(decide)
    other = manifest()
    other["metadata"] = {"name": "other", "namespace": "default"}
    one.kube.put(other)
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    for name in (NAME, "other"):
        queue.add(("default", name))
    await worked(one, queue)
    found = one.kube.named(MODEL, "other")
    assert found is not None
    assert found["status"] == {"selector": "fine"}
    assert one.metrics.passes.labels(result="bug")._value.get() == 1


async def test_a_model_made_anew_under_its_name_starts_from_nothing() -> None:
    watched: list[float] = []

    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        watched.append(observed.watched_s)
        return Plan(recommendation=3)

    one = Pass(decide)
    await one.run()
    one.now += 50
    await one.run()
    parent = one.parent
    one.kube.remove(MODEL, NAME)
    one.kube.put({**parent, "metadata": {"name": NAME, "namespace": "default"}})
    await one.run()
    assert watched == [0.0, 50.0, 0.0]


async def test_candidates_of_a_scale_down_are_asked_before_they_are_chosen() -> None:
    asked_when: list[tuple[bool, list[str]]] = []

    def decide(observed: Observed, settings: Settings, now: float) -> Plan:
        asked_when.append((bool(observed.workers), list(one.facts.asked)))
        return Plan(pod_costs={"p": 0})

    one = Pass(decide)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "default",
            "labels": {names.LABEL_MODEL: NAME, names.LABEL_ROLE: "decode"},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}
            ],
        },
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    one.kube.put(pod)
    await one.run()
    uid = uid_of(one.kube.named(POD, "p") or {})
    assert [asked for _, asked in asked_when] == [[uid], [uid, uid]]


async def test_with_the_real_decisions_a_model_gets_its_objects_and_then_rest() -> None:
    """Until the inspect Job answers; the rest of a model's life is the pure tests' and the cluster's."""
    one = Pass(desired)
    await one.run()
    kinds = {kind for kind, _, _ in one.kube.objects}
    assert {JOB.kind, SERVICE.kind, DEPLOYMENT.kind, SECRET.kind} <= kinds
    assert await one.writes() == []


async def test_events_of_the_same_words_are_counted_not_repeated() -> None:
    one = Pass(lambda observed, settings, now: Plan(events=(Event("Normal", "Scaled", "Scale", "n"),)))
    for _ in range(3):
        await one.run()
    events = [found for (kind, _, _), found in one.kube.objects.items() if kind == EVENT.kind]
    assert [found["series"]["count"] for found in events] == [3]


async def test_an_event_that_cannot_be_written_is_a_metric_and_no_failure() -> None:
    one = Pass(lambda observed, settings, now: Plan(events=(Event("Normal", "Scaled", "Scale", "n"),)))
    one.kube.fails = lambda verb, kind, name: Forbidden("no") if kind == EVENT.kind else None
    await one.run()
    assert one.metrics.events_failed._value.get() == 1


async def worked(one: Pass, queue: WorkQueue[tuple[str, str]]) -> None:
    """All that waits now."""
    task = asyncio.create_task(one.reconciler.work(queue))
    while len(queue) or queue._processing:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
