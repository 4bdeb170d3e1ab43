"""The rendered objects, by the schemas of a real API server and by what pods must be given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from worlds import FACTS, World, settings

from tandem_operator.objects import DEPLOYMENT, JOB, NETWORK_POLICY, Obj
from tandem_operator.render.overlay import merge

if TYPE_CHECKING:
    from tandem_crds.role_config import ModelFacts

EXAMPLES = Path(__file__).parents[2] / "examples"
VERSION = "1.36"
LARGE = FACTS.model_copy(
    update={
        "heads": 96, "kv_heads": 8, "head_dim": 128, "layers": 62, "hidden_size": 6144,
        "max_position_embeddings": 262_144, "weights_nbytes": 960_000_000_000,
    }
)  # fmt: skip


def world(example: str, *, facts: ModelFacts = LARGE, **settings_: Any) -> World:
    parent = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    parent["metadata"] |= {"namespace": "default", "uid": "parent-1", "generation": 1}
    one = World(parent)
    one.facts = facts
    one.settle(settings(**settings_))
    return one


def worker(one: World, role: str) -> Obj:
    """The pod's spec of a role."""
    (found,) = (
        deployment
        for (kind, _), deployment in one.objects.items()
        if kind == DEPLOYMENT and deployment["metadata"]["labels"].get("tandem.dev/role") == role
    )
    spec: Obj = found["spec"]["template"]["spec"]
    return spec


def job(one: World) -> Obj:
    """The inspect Job, which goes once its facts are kept."""
    (found,) = (body for body in World(one.parent).plan().apply if body["kind"] == JOB.kind)
    return found


def small() -> World:
    return world("smollm2", facts=FACTS)


EVERY = ["smollm2", "deepseek-r1", "qwen3-coder-480b"]


@pytest.mark.parametrize("example", EVERY)
def test_every_object_passes_the_servers_schema(example: str) -> None:
    one = world(example, facts=FACTS if example == "smollm2" else LARGE)
    assert len(one.objects) >= 12
    for body in (job(one), *one.objects.values()):
        clean = {key: value for key, value in body.items() if key != "status"}
        kubernetes_validate.validate(clean, VERSION, strict=True)


@pytest.mark.parametrize("example", EVERY)
def test_every_pod_meets_the_restricted_standard(example: str) -> None:
    one = world(example, facts=FACTS if example == "smollm2" else LARGE)
    for body in (job(one), *one.objects.values()):
        if body["kind"] not in (DEPLOYMENT.kind, JOB.kind):
            continue
        pod = body["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [name for name in pod if name.startswith("host")]
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True


def test_only_who_discovers_gets_a_token() -> None:
    one = small()
    for role, expected in (("prefill", False), ("decode", True)):
        pod = worker(one, role)
        assert pod["automountServiceAccountToken"] is False
        assert any(volume["name"] == "tandem-token" for volume in pod["volumes"]) == expected
    assert "tandem-token" not in str(job(one))


def test_a_gpu_pod_is_guaranteed_with_whole_cpus_and_its_nics() -> None:
    container = worker(world("qwen3-coder-480b"), "decode")["containers"][0]
    asked = container["resources"]
    assert asked["limits"] == asked["requests"]
    assert asked["limits"] == {
        "cpu": "64", "hugepages-2Mi": "5120Mi", "memory": "256Gi", "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "32",
    }  # fmt: skip


def test_efa_keeps_prefill_and_decode_on_different_hosts() -> None:
    apart = worker(world("qwen3-coder-480b"), "prefill")["affinity"]["podAntiAffinity"]
    (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"]["tandem.dev/role"] == "decode"


def test_packing_looks_for_pods_of_either_role() -> None:
    near = worker(world("deepseek-r1"), "decode")["affinity"]["podAffinity"]
    (term,) = near["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    assert term["labelSelector"]["matchExpressions"] == [{"key": "tandem.dev/role", "operator": "Exists"}]


def test_locked_memory_by_capability_makes_the_container_root_and_says_so() -> None:
    profile = {
        "providers": ["verbs"], "resourceName": "rdma/hca", "nicsPerGPU": 1, "memlock": "RootCapability",
        "annotations": {"k8s.v1.cni.cncf.io/networks": "roce"},
    }  # fmt: skip
    one = world("deepseek-r1", profiles={"infiniband": profile})
    container = worker(one, "decode")["containers"][0]
    assert container["securityContext"]["runAsUser"] == 0
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    (template,) = (
        body["spec"]["template"]
        for (kind, _), body in one.objects.items()
        if kind == DEPLOYMENT and body["metadata"]["labels"].get("tandem.dev/role") == "decode"
    )
    assert template["metadata"]["annotations"] == {
        "k8s.v1.cni.cncf.io/networks": "roce",
        "tandem.dev/memlock": "root with all capabilities dropped but IPC_LOCK",
    }


def test_a_large_model_may_load_for_hours_and_a_small_one_may_not() -> None:
    def minutes(pod: Obj) -> float:
        probe = pod["containers"][0]["startupProbe"]
        return float(probe["failureThreshold"] * probe["periodSeconds"] / 60)

    assert minutes(worker(world("qwen3-coder-480b"), "decode")) > 120
    assert minutes(worker(small(), "decode")) < 10


def test_a_pod_has_time_to_leave_and_to_drain() -> None:
    pod = worker(small(), "decode")
    assert pod["terminationGracePeriodSeconds"] == 5 + 600 + 15
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_hub_weights_are_fetched_before_the_worker_starts() -> None:
    (fetch,) = worker(world("qwen3-coder-480b"), "prefill")["initContainers"]
    assert fetch["command"][-1] == "hf://Qwen/Qwen3-Coder-480B-A35B-Instruct"
    assert fetch["env"][-1]["valueFrom"]["secretKeyRef"] == {"name": "hf-token", "key": "token"}


def test_the_messengers_ports_are_open_to_the_models_own_pods_only() -> None:
    (policy,) = (body for (kind, _), body in small().objects.items() if kind == NETWORK_POLICY)
    own, health = policy["spec"]["ingress"]
    assert own["from"] == [{"podSelector": {"matchLabels": {"tandem.dev/model": "smollm2"}}}]
    assert [port["port"] for port in own["ports"]] == [8000, 10000]
    assert [port["port"] for port in health["ports"]] == [8001]


MERGES = [
    ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
    ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
    (
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
        {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
    ),
    (
        {"volumeMounts": [{"name": "v", "mountPath": "/a"}]},
        {"volumeMounts": [{"name": "v", "mountPath": "/b"}]},
        {"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
    ),
    ({"args": ["x"]}, {"args": ["y"]}, {"args": ["x", "y"]}),
]


@pytest.mark.parametrize(("below", "above", "expected"), MERGES)
def test_templates_merge(below: Obj, above: Obj, expected: Obj) -> None:
    assert merge(below, above) == expected
