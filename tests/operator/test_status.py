"""What people are told in each situation: conditions, counters, events."""

from dataclasses import replace

import pytest
from worlds import World, container, ended, manifest, settings, status

from tandem_crds.model import DisaggregatedModel
from tandem_operator import pods as pods_of
from tandem_operator.conditions import PAIRING_S
from tandem_operator.desired import PAIRING_S as PAIRING_AGAIN_S
from tandem_operator.desired import desired
from tandem_operator.generations import AVAILABLE_S
from tandem_operator.objects import SERVICE
from tandem_operator.observed import Arrivals, WorkerState
from tandem_operator.timestamps import text

QPS = {"mode": "QPS", "targetQPS": "1", "minReplicas": 1, "maxReplicas": 4}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 1 Insufficient cpu, 2 Insufficient nvidia.com/gpu. preemption: …",
}


def settled(parent=None):
    world = World(parent)
    world.settle()
    return world


def stuck(pod_status, role="decode", parent=None):
    """A model of which one role's pods never get further than `pod_status`."""
    world = World(parent)
    world.becomes_ready = lambda pod: pod["metadata"]["labels"].get("tandem.dev/role") != role
    for _ in range(6):
        world.run()
        world.tick()
    for pod in world.of_role(role):
        pod["status"] = pod_status
    world.run()
    return world


def report(world, role, **state):
    for pod in world.of_role(role):
        world.workers[pod["metadata"]["uid"]] = WorkerState(**state)


def test_all_seven_conditions_are_there_from_the_first_pass():
    world = World()
    world.run()
    assert world.conditions() == {
        "Ready": "False/Inspecting",
        "Reconciled": "Unknown/Inspecting",
        "Available": "False/NoReadyPrefill",
        "Progressing": "True/Inspecting",
        "Compatible": "Unknown/Inspecting",
        "FabricReady": "Unknown/NotReported",
        "ScalingActive": "False/ScalingDisabled",
    }


def test_a_model_that_serves_says_so_and_fits_the_api():
    world = settled()
    assert world.conditions() == {
        "Ready": "True/Ready",
        "Reconciled": "True/Reconciled",
        "Available": "True/PairReady",
        "Progressing": "False/Complete",
        "Compatible": "True/Agreed",
        "FabricReady": "Unknown/NotReported",
        "ScalingActive": "False/ScalingDisabled",
    }
    reported = world.parent["status"]
    assert reported["url"] == "http://smollm2-router.default.svc:80/v1"
    assert reported["selector"] == "tandem.dev/model=smollm2,tandem.dev/role=decode"
    assert reported["observedGeneration"] == 1
    assert reported["decode"] == {
        "replicas": 2,
        "ready": 2,
        "updated": 2,
        "revision": reported["decode"]["revision"],
    }
    DisaggregatedModel.model_validate({**world.parent, "status": reported}, by_alias=True, by_name=False)


STUCK = {
    "the image is not there": (
        status(
            container(
                "worker",
                image="registry.example/nope:1",
                waiting={
                    "reason": "ImagePullBackOff",
                    "message": "Back-off pulling image: ErrImagePull: rpc error: code = NotFound",
                },
            )
        ),
        "ImageNotPulled",
        "cannot pull image registry.example/nope:1 (code = NotFound); check the image's name",
    ),
    "no node has the device": (
        status(conditions=(UNSCHEDULABLE,)),
        "Unschedulable",
        "no node has enough free cpu, nvidia.com/gpu",
    ),
    "a claim does not exist": (
        status(
            conditions=({**UNSCHEDULABLE, "message": '0/3 nodes: persistentvolumeclaim "models" not found.'},)
        ),
        "Unschedulable",
        'persistentvolumeclaim "models" not found',
    ),
    "a gate holds it": (
        status(conditions=({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"},)),
        "SchedulingGated",
        "scheduling gate",
    ),
    "the worker refuses": (
        status(
            container(
                "worker",
                waiting={"reason": "CrashLoopBackOff"},
                last=ended(2, "engine.dtype float8 is not supported\n"),
            )
        ),
        "WorkerRefused",
        'refuses to start: container worker said "engine.dtype float8 is not supported"',
    ),
    "the worker crashes": (
        status(container("worker", running={}, last=ended(1))),
        "WorkerExited",
        "exited with 1 and said nothing; see kubectl logs",
    ),
    "it needs more memory": (
        status(container("worker", running={}, last=ended(137, reason="OOMKilled"))),
        "OutOfMemory",
        "raise resources.limits.memory",
    ),
    "a secret is missing": (
        status(
            container(
                "worker",
                waiting={"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'},
            )
        ),
        "ContainerNotCreated",
        'secret "hf-token" not found',
    ),
    "the model cannot be fetched": (
        status(initContainerStatuses=[container("model", running={}, last=ended(1, "disk is full"))]),
        "ModelNotFetched",
        "disk is full",
    ),
    "it was evicted": (
        status(phase="Failed", reason="Evicted", message="low on memory"),
        "PodFailed",
        "Evicted: low on memory",
    ),
}


@pytest.mark.parametrize("situation", STUCK)
def test_what_keeps_pods_from_being_ready_is_told_with_what_to_do(situation):
    pod_status, reason, words = STUCK[situation]
    world = stuck(pod_status)
    assert world.condition("Progressing") == ("False", reason)
    assert words in world.message("Progressing")
    assert world.condition("Available") == ("False", "NoReadyDecode")
    assert words in world.message("Available")
    assert world.condition("Ready")[0] == "False"
    assert world.condition("Reconciled") == ("True", "Reconciled")
    assert reason in world.events


def test_the_gate_is_named():
    gated = status(conditions=({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"},))
    pod = {
        "metadata": {"name": "p"},
        "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        "status": gated,
    }
    found = pods_of.trouble(pod)
    assert found is not None
    assert "kueue.x-k8s.io/admission" in found.message


def test_a_pull_that_fails_again_and_again_is_told_in_the_same_words():
    """The kubelet alternates between two reasons, and every change of a message is a write."""

    def told(reason, message):
        waiting = container("worker", waiting={"reason": reason, "message": message})
        return pods_of.trouble({"metadata": {"name": "p"}, "spec": {}, "status": status(waiting)})

    first = told("ErrImagePull", "rpc error: code = NotFound")
    assert first == told(
        "ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: rpc error: code = NotFound'
    )


def test_a_crashing_worker_is_told_in_the_same_words_while_it_runs_and_while_it_waits():
    end = ended(1, "boom")
    running = container("worker", running={}, last=end)
    waiting = container("worker", waiting={"reason": "CrashLoopBackOff"}, last=end)
    stopped = container("worker", terminated=end)
    told = {
        pods_of.trouble({"metadata": {"name": "p"}, "spec": {}, "status": status(one)})
        for one in (running, waiting, stopped)
    }
    assert len(told) == 1


def test_of_several_troubles_the_worst_is_told_whatever_the_order():
    world = stuck(status(conditions=(UNSCHEDULABLE,)))
    first, second = world.of_role("decode")
    for one in (first, second):
        other = second if one is first else first
        one["status"] = status(container("worker", running={}, last=ended(2, "no")))
        other["status"] = status(conditions=(UNSCHEDULABLE,))
        world.run()
        assert world.condition("Progressing") == ("False", "WorkerRefused")
        assert world.message("Progressing").endswith("(and 1 more pods)")


def test_pods_that_are_refused_by_quota_or_admission_are_told_by_their_deployment():
    world = stuck(status())
    (deployment,) = world.deployments("decode")
    deployment["status"] = {
        "conditions": [
            {
                "type": "ReplicaFailure",
                "status": "True",
                "reason": "FailedCreate",
                "message": "exceeded quota: gpus",
            }
        ]
    }
    world.run()
    assert world.condition("Progressing") == ("False", "PodsNotCreated")
    assert "exceeded quota: gpus" in world.message("Progressing")


def test_loading_is_told_in_quarters():
    world = stuck(status(container("worker", running={}), phase="Running"))
    report(world, "decode", loaded_percent=63)
    world.run()
    assert world.parent["status"]["decode"]["loadedPercent"] == 50
    assert world.condition("Progressing") == ("True", "Starting")
    assert "decode has loaded 50 % of its weights" in world.message("Progressing")
    report(world, "decode", loaded_percent=74)
    assert not world.run()
    assert world.plan().requeue_s == 10


def test_a_parked_model_says_how_to_wake_it():
    world = settled(manifest(decode={"replicas": 0}))
    assert world.condition("Available") == ("False", "Parked")
    assert world.condition("Ready") == ("False", "Parked")
    assert world.condition("Progressing") == ("False", "Complete")
    assert "scale it to 1 or more" in world.message("Available")


def test_ready_pods_of_unequal_kv_keys_are_no_pair():
    world = settled()
    for pod in world.of_role("prefill"):
        pod["metadata"]["labels"]["tandem.dev/kv-key"] = "0" * 16
    world.run()
    assert world.condition("Available") == ("False", "NoMatchingPair")


def test_without_a_router_nothing_can_be_reached():
    world = settled()
    for pod in world.pods.values():
        if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "router":
            pod["status"] = status(conditions=(UNSCHEDULABLE,))
    world.run()
    assert world.condition("Available") == ("True", "PairReady")
    assert world.condition("Ready") == ("False", "RouterNotReady")


def test_a_spec_that_does_not_fit_the_model_names_field_and_values():
    world = settled(manifest(decode={"replicas": 1, "tensorParallel": 4}))
    assert world.condition("Compatible") == ("False", "DoesNotFit")
    assert world.condition("Reconciled") == ("False", "DoesNotFit")
    assert "spec.decode.tensorParallel is 4; the model's 9 heads and 3 KV heads" in world.message(
        "Compatible"
    )


def test_workers_that_stay_apart_are_told():
    world = settled()
    report(world, "decode", incompatible={"smollm2-prefill-x": "wire version 1 against 2"})
    world.run()
    assert world.condition("Compatible") == ("False", "PeersDisagree")
    assert "wire version 1 against 2" in world.message("Compatible")
    assert world.condition("Ready") == ("False", "PeersDisagree")


@pytest.mark.parametrize(
    ("state", "condition", "words"),
    [
        ({"provider": "net", "paired": True}, ("True", "ProviderInUse"), "net"),
        ({"provider": "shm"}, ("False", "OtherProvider"), "profile tcp wants net or tcp"),
        ({"provider": "net", "paired": False}, ("False", "NotPaired"), "has not reached any prefill pod"),
        ({}, ("Unknown", "NotReported"), "no worker has told"),
        ({"error": "timed out"}, ("Unknown", "NotReported"), "no worker has told"),
    ],
)
def test_the_fabric_is_what_workers_say_it_is(state, condition, words):
    world = settled()
    world.now += PAIRING_S
    report(world, "decode", **state)
    world.run()
    assert world.condition("FabricReady") == condition
    assert words in world.message("FabricReady")


def test_workers_have_a_while_to_pair_before_it_is_a_fault_and_are_asked_again_meanwhile():
    world = settled()
    world.now += 100
    ready = world.of_role("prefill")[0]["status"]["conditions"][0]
    ready["lastTransitionTime"] = text(world.now)
    report(world, "decode", provider="net", paired=False)
    plan = world.plan()
    world.run()
    assert world.condition("FabricReady") == ("Unknown", "Pairing")
    assert world.condition("Ready") == ("False", "Pairing")
    assert plan.requeue_s == PAIRING_AGAIN_S
    report(world, "decode", provider="net", paired=True)
    world.run()
    assert world.condition("Ready") == ("True", "Ready")
    world.now += AVAILABLE_S
    assert world.plan().requeue_s is None


def test_a_prefill_that_has_gone_is_not_a_pairing_fault():
    """Available tells that; the fabric did nothing wrong."""
    world = settled()
    world.now += 100
    for pod in world.of_role("prefill"):
        pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}
    report(world, "decode", provider="net", paired=False)
    world.run()
    assert world.condition("FabricReady") == ("True", "ProviderInUse")


def test_a_foreign_object_at_our_name_is_named_and_left_alone():
    world = World()
    world.foreign = [
        {"kind": "Service", "metadata": {"name": "smollm2-router", "namespace": "default", "uid": "x"}}
    ]
    world.settle()
    assert world.condition("Reconciled") == ("False", "NameTaken")
    assert "Service smollm2-router exists and is not ours" in world.message("Reconciled")
    assert "smollm2-router" not in world.names(SERVICE)
    assert world.condition("Available") == ("True", "PairReady")
    world.foreign = []
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


def test_an_object_of_an_earlier_model_of_the_name_is_waited_for():
    world = World()
    owner = {"kind": "DisaggregatedModel", "name": "smollm2", "uid": "parent-0", "controller": True}
    metadata = {"name": "smollm2-router", "namespace": "default", "uid": "x", "ownerReferences": [owner]}
    world.foreign = [{"kind": "Deployment", "metadata": metadata}]
    world.run()
    assert "belongs to an earlier model of this name" in world.message("Reconciled")


def test_what_rbac_refuses_is_a_condition():
    world = settled()
    plan = desired(replace(world.observe(), forbidden=("create deployments",)), settings(), world.now)
    assert plan.status is not None
    reconciled = next(one for one in plan.status["conditions"] if one["type"] == "Reconciled")
    assert (reconciled["status"], reconciled["reason"]) == ("False", "Forbidden")
    assert "may not create deployments in namespace default" in reconciled["message"]


def test_a_transition_time_moves_only_when_the_status_flips():
    world = stuck(status(conditions=(UNSCHEDULABLE,)))
    since = world.message_of("Available")["lastTransitionTime"]
    world.now += 60
    for pod in world.of_role("decode"):
        pod["status"] = status(container("worker", running={}, last=ended(1, "boom")))
    world.run()
    assert "boom" in world.message("Available")
    assert world.message_of("Available")["lastTransitionTime"] == since
    for pod in world.of_role("decode"):
        pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    world.now += 60
    world.run()
    assert world.message_of("Available")["lastTransitionTime"] == text(world.now)


def test_events_are_told_once_per_transition():
    world = settled()
    assert world.events == ["BecameReady"]
    world.settle()
    assert world.events == ["BecameReady"]
    for pod in world.of_role("decode"):
        pod["status"] = status(container("worker", running={}, last=ended(1, "boom")))
    world.run()
    world.run()
    assert sorted(world.events) == ["BecameReady", "BecameUnavailable", "WorkerExited"]


def test_a_rollout_is_told_at_its_beginning_and_end():
    world = settled()
    world.edit(drainSeconds=5)
    world.settle()
    assert [name for name in world.events if name.startswith("Rollout")] == [
        "RolloutStarted",
        "RolloutFinished",
    ]


def test_a_scaling_decision_is_stored_when_it_changes_and_not_when_the_rate_does():
    world = settled(manifest(scaling=QPS))
    world.arrivals = Arrivals(rate_per_s=2.0, window_s=60, age_s=1, routers=1, routers_asked=1)
    world.run()
    told = world.parent["status"]["scaling"]
    assert world.condition("ScalingActive")[0] == "True"
    world.now += 15
    world.arrivals = Arrivals(rate_per_s=1.99, window_s=60, age_s=2, routers=1, routers_asked=1)
    world.run()
    assert world.parent["status"]["scaling"] == told
    assert world.plan().requeue_s == 15


def test_qps_scales_decode_through_the_scale_subresource_and_prefill_by_ratio():
    parent = manifest(
        prefill={}, decode={"replicas": 1}, scaling={**QPS, "ratio": {"prefill": 1, "decode": 2}}
    )
    world = settled(parent)
    world.arrivals = Arrivals(rate_per_s=3.6, window_s=60, age_s=1, routers=1, routers_asked=1)
    world.settle()
    assert world.parent["spec"]["decode"]["replicas"] == 4
    assert len(world.of_role("prefill")) == 2
    assert "Scaled" in world.events


def test_missing_arrivals_leave_the_number_alone():
    world = settled(manifest(scaling=QPS))
    assert world.parent["spec"]["decode"]["replicas"] == 2
    assert world.condition("ScalingActive")[0] != "True"
