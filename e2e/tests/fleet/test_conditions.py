"""Every reason of every condition, brought about on a real API server, scheduler and controllers.

What kubelets and containers would say, a test writes and answers in their place; what a real kubelet says is
in `serving/`. `SHOWN` collects the reasons; the last test holds it against all there are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from e2e.fake_pods import WORKER_PORT, FakeContainer, container_status, running, worker_state, write_status
from e2e.kubectl import ready
from tandem_operator.autoscale import ScalingReason
from tandem_operator.reasons import Reason

from .conftest import held, manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from e2e.kubectl import Kubectl

Test = TypeVar("Test", bound="Callable[..., None]")
# Where it is shown that is not in this file.
SHOWN: dict[str, set[Reason] | set[ScalingReason]] = {
    "test_older_crd.py": {Reason.INVALID_SPEC, Reason.NAME_TOO_LONG},
    "test_permissions.py": {Reason.FORBIDDEN},
    "test_autoscaling.py": set(ScalingReason),
}


def shows(*reasons: Reason) -> Callable[[Test], Test]:
    def note(test: Test) -> Test:
        SHOWN[test.__name__] = set(reasons)
        return test

    return note


def until(kubectl: Kubectl, name: str, **reasons: str) -> dict[str, str]:
    """The messages, once each of the conditions has its reason at the same time."""
    told: dict[str, str] = {}

    def satisfied() -> object:
        document = kubectl.get("dm", name)
        found = {one["type"]: one for one in document.get("status", {}).get("conditions", [])}
        told.update({one["type"]: one["message"] for one in found.values()})
        have = {kind: found.get(kind, {}).get("reason", "") for kind in reasons}
        return have == reasons or f"{have}: {told}"

    kubectl.until(f"{name}: {reasons}", satisfied, 40)
    return told


def one_pod(kubectl: Kubectl, name: str, role: str) -> dict[str, Any]:
    """The role's only pod, once it is there and scheduled."""
    found: list[dict[str, Any]] = []

    def satisfied() -> object:
        found[:] = [one for one in kubectl.pods(name, role) if one["spec"].get("nodeName")]
        return len(found) == 1 or f"{len(found)} pods"

    kubectl.until(f"a {role} pod of {name}", satisfied)
    return found[0]


def touch(kubectl: Kubectl, name: str, value: str) -> None:
    """Has the operator look."""
    kubectl("annotate", "dm", name, f"e2e.example/touched={value}", "--overwrite")


@shows(
    *(Reason.RECONCILED, Reason.PAIR_READY, Reason.READY, Reason.COMPLETE, Reason.AGREED),
    *(Reason.NOT_REPORTED, Reason.SCALING_DISABLED),
)
def test_a_model_that_serves_whose_workers_say_nothing(models: Kubectl, name: str) -> None:
    models.apply([manifest(name)])
    told = until(
        models,
        name,
        Ready="Ready",
        Reconciled="Reconciled",
        Available="PairReady",
        Progressing="Complete",
        Compatible="Agreed",
        FabricReady="NotReported",
        ScalingActive="ScalingDisabled",
    )
    assert "no worker has told which libfabric provider it uses" in told["FabricReady"]
    models("wait", "--for=condition=Ready", f"dm/{name}", "--timeout=5s")


@shows(Reason.PARKED)
def test_a_parked_model(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, decode={"replicas": 0})])
    assert "scale it to 1 or more" in until(models, name, Available="Parked", Ready="Parked")["Available"]


@shows(Reason.NO_READY_PREFILL, Reason.STARTING)
def test_a_prefill_that_starts(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, prefill={"podTemplate": held()})])
    until(models, name, Available="NoReadyPrefill", Progressing="Starting")


@shows(Reason.NO_READY_DECODE)
def test_a_decode_that_starts(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, decode={"podTemplate": held()})])
    until(models, name, Available="NoReadyDecode", Ready="NoReadyDecode")


@shows(Reason.ROUTER_NOT_READY)
def test_a_router_that_is_not_ready(models: Kubectl, name: str) -> None:
    models.apply([manifest(name)])
    until(models, name, Ready="Ready")
    (router,) = models.find("pods", f"tandem.dev/model={name},app.kubernetes.io/component=router")
    write_status(
        models, router["metadata"]["name"], **running(router, router["status"]["podIP"], ready=False)
    )
    until(models, name, Ready="RouterNotReady", Available="PairReady")


@shows(Reason.ROLLING_OUT, Reason.NO_MATCHING_PAIR)
def test_a_rollout_whose_old_decode_dies_while_the_new_prefill_starts(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, rollout={"maxSurge": 1, "maxUnavailable": 0})])
    until(models, name, Ready="Ready", Progressing="Complete")
    old = one_pod(models, name, "decode")
    patch = {"engine": {"pageSize": 32}, "prefill": {"podTemplate": held()}}
    models("patch", "dm", name, "--type=merge", "-p", json.dumps({"spec": patch}))
    models.until("a new decode pod", lambda: sum(map(ready, models.pods(name, "decode"))) == 2)
    until(models, name, Progressing="RollingOut", Available="PairReady")
    write_status(models, old["metadata"]["name"], **running(old, old["status"]["podIP"], ready=False))
    until(models, name, Available="NoMatchingPair", Ready="NoMatchingPair")


@shows(Reason.INSPECTING, Reason.INSPECT_FAILED)
def test_a_model_that_cannot_be_read(models: Kubectl, name: str) -> None:
    """Nobody answers for this URI, so the pod's end is written here."""
    models.apply([manifest(name, model={"uri": "pvc://models/absent"})])
    until(models, name, Reconciled="Inspecting", Available="NoReadyPrefill")
    pods: list[dict[str, Any]] = []

    def inspecting() -> object:
        pods[:] = models.find("pods", f"tandem.dev/model={name}")
        return bool(pods) and bool(pods[0]["status"].get("podIP"))

    models.until("the inspecting pod", inspecting)
    said = "pvc://models/absent: there is no config.json"
    end = container_status("inspect", terminated={"exitCode": 2, "reason": "Error", "message": said})
    write_status(models, pods[0]["metadata"]["name"], phase="Failed", containerStatuses=[end])
    assert said in until(models, name, Reconciled="InspectFailed", Ready="InspectFailed")["Reconciled"]


@shows(Reason.DOES_NOT_FIT)
def test_a_spec_that_the_model_does_not_fit(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, engine={"maxModelLen": 100_000})])
    assert "8192" in until(models, name, Reconciled="DoesNotFit", Compatible="DoesNotFit")["Reconciled"]


def test_a_model_that_the_runtime_image_cannot_compute(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, model={"uri": "hf://refused/DeepSeek-R1"})])
    told = until(models, name, Reconciled="DoesNotFit", Ready="DoesNotFit")
    assert "DeepseekV3ForCausalLM" in told["Reconciled"]


@shows(Reason.UNKNOWN_PROFILE)
def test_a_profile_that_is_not_there(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, fabric={"profile": "myrinet"})])
    told = until(models, name, Reconciled="UnknownProfile", Ready="UnknownProfile")["Reconciled"]
    assert "efa, infiniband, roce, tcp" in told


@shows(Reason.NOT_IMPLEMENTED)
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"fabric": {"deviceClassName": "nic.example"}}, "DRA"),
        ({"decode": {"tensorParallel": 16}}, "gpusPerNode"),
    ],
    ids=["DRA", "replica over nodes"],
)
def test_what_there_is_no_code_for(models: Kubectl, name: str, spec: dict[str, Any], says: str) -> None:
    models.apply([manifest(name, accelerator={"type": "GPU"}, **spec)])
    assert says in until(models, name, Reconciled="NotImplemented")["Reconciled"]


@shows(Reason.NAME_TAKEN)
def test_a_name_that_somebody_else_has(models: Kubectl, name: str) -> None:
    """It is told and left alone; the rest of the model is made."""
    models("create", "service", "clusterip", f"{name}-router", "--tcp=80:80")
    before = models.get("service", f"{name}-router")
    models.apply([manifest(name)])
    told = until(models, name, Reconciled="NameTaken", Available="PairReady", Ready="NameTaken")
    assert f"Service {name}-router exists and is not ours" in told["Reconciled"]
    assert models.get("service", f"{name}-router") == before
    models("delete", "service", f"{name}-router")
    touch(models, name, "again")
    until(models, name, Ready="Ready")


@shows(Reason.INVALID_CHILD)
def test_a_pod_template_that_the_server_refuses(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, decode={"podTemplate": {"spec": {"priority": "high", "colour": "red"}}})])
    told = until(models, name, Reconciled="InvalidChild", Ready="InvalidChild")["Reconciled"]
    assert "Deployment" in told
    assert "colour" in told


ENDS = [
    (
        Reason.WORKER_REFUSED,
        {"terminated": {"exitCode": 2, "message": "no CUDA device"}},
        'refuses to start: container worker said "no CUDA device"',
    ),
    (
        Reason.IMAGE_NOT_PULLED,
        {"waiting": {"reason": "ImagePullBackOff", "message": "rpc error: not found"}},
        "check the image's name",
    ),
    (
        Reason.CONTAINER_NOT_CREATED,
        {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "x" not found'}},
        'secret "x" not found',
    ),
    (
        Reason.OUT_OF_MEMORY,
        {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
        "raise resources.limits.memory",
    ),
    (
        Reason.WORKER_EXITED,
        {"terminated": {"exitCode": 1, "message": "Bus error"}},
        'exited with 1 and said "Bus error"',
    ),
]


@shows(*(one[0] for one in ENDS))
@pytest.mark.parametrize(("reason", "state", "says"), ENDS, ids=[str(one[0]) for one in ENDS])
def test_a_container_that_does_not_run(
    models: Kubectl, name: str, reason: Reason, state: dict[str, Any], says: str
) -> None:
    models.apply([manifest(name, decode={"podTemplate": held()})])
    pod = one_pod(models, name, "decode")
    write_status(models, pod["metadata"]["name"], containerStatuses=[container_status("worker", **state)])
    told = until(models, name, Progressing=reason, Ready="NoReadyDecode")
    assert says in told["Progressing"]
    assert says in told["Ready"], "a user reads Ready first"


@shows(Reason.MODEL_NOT_FETCHED, Reason.POD_FAILED)
def test_a_download_that_fails_and_an_evicted_pod(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, decode={"podTemplate": held()})])
    pod = one_pod(models, name, "decode")["metadata"]["name"]
    end: dict[str, Any] = {"terminated": {"exitCode": 1, "message": "hf://a/b: 401: a token is needed"}}
    write_status(models, pod, initContainerStatuses=[container_status("model", **end)])
    assert "a token is needed" in until(models, name, Progressing="ModelNotFetched")["Progressing"]
    write_status(
        models, pod, phase="Failed", reason="Evicted", message="low on disk", initContainerStatuses=[]
    )
    assert "Evicted: low on disk" in until(models, name, Progressing="PodFailed")["Progressing"]


@shows(Reason.PODS_NOT_CREATED)
def test_a_quota_that_leaves_no_room(models: Kubectl, name: str) -> None:
    models.apply([manifest(name)])
    until(models, name, Ready="Ready")
    models("create", "quota", "full", "--hard=pods=0")
    try:
        models("scale", f"dm/{name}", "--replicas=2")
        assert "quota" in until(models, name, Progressing="PodsNotCreated")["Progressing"]
    finally:
        models("delete", "quota", "full")


@shows(Reason.UNSCHEDULABLE, Reason.SCHEDULING_GATED)
def test_pods_that_find_no_node(models: Kubectl, name: str) -> None:
    models.apply([manifest(name, accelerator={"type": "GPU"})])
    told = until(models, name, Progressing="Unschedulable")["Progressing"]
    assert "no node has enough free nvidia.com/gpu" in told
    gate = {"spec": {"schedulingGates": [{"name": "kueue.example/admission"}]}}
    models.apply([manifest(f"{name}-g", decode={"podTemplate": gate})])
    told = until(models, f"{name}-g", Progressing="SchedulingGated")["Progressing"]
    assert "kueue.example/admission" in told


@pytest.fixture
def answering(models: Kubectl, name: str) -> Iterator[list[FakeContainer]]:
    """A model whose two workers answer at their addresses, prefill first."""
    models.apply([manifest(name, prefill={"podTemplate": held()}, decode={"podTemplate": held()})])
    workers = []
    for number, role in enumerate(("prefill", "decode"), 1):
        pod = one_pod(models, name, role)
        address = f"127.77.{hash(name) % 250}.{number}"
        workers.append(FakeContainer(address, WORKER_PORT, worker_state(role)))
        write_status(models, pod["metadata"]["name"], **running(pod, address))
    yield workers
    for worker in workers:
        worker.close()


@shows(Reason.PROVIDER_IN_USE)
def test_workers_that_are_paired(models: Kubectl, name: str, answering: list[FakeContainer]) -> None:
    assert "tcp" in until(models, name, Ready="Ready", FabricReady="ProviderInUse")["FabricReady"]


@shows(Reason.OTHER_PROVIDER)
def test_a_worker_on_another_provider(models: Kubectl, name: str, answering: list[FakeContainer]) -> None:
    answering[1].state = worker_state("decode", provider="sockets", paired=False)
    told = until(models, name, FabricReady="OtherProvider")["FabricReady"]
    assert "profile tcp wants net or tcp" in told


@shows(Reason.PEERS_DISAGREE)
def test_workers_that_disagree(models: Kubectl, name: str, answering: list[FakeContainer]) -> None:
    answering[1].state = worker_state("decode", paired=False, incompatible={"p-1": "page size 16, not 32"})
    told = until(models, name, Compatible="PeersDisagree", Ready="PeersDisagree")["Ready"]
    assert "stays apart from p-1: page size 16, not 32" in told


@shows(Reason.PAIRING, Reason.NOT_PAIRED)
def test_workers_that_do_not_reach_each_other(
    models: Kubectl, name: str, answering: list[FakeContainer]
) -> None:
    answering[1].state = worker_state("decode", paired=False)
    until(models, name, FabricReady="Pairing", Ready="Pairing")
    told = until(models, name, FabricReady="NotPaired", Ready="NotPaired")["Ready"]
    assert "lets the pods' fabric ports through" in told
    answering[1].state = worker_state("decode")
    until(models, name, Ready="Ready", FabricReady="ProviderInUse")


def test_every_reason_is_shown() -> None:
    shown = {str(reason) for reasons in SHOWN.values() for reason in reasons}
    assert shown == {str(reason) for reason in (*Reason, *ScalingReason)}
