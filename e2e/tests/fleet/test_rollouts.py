"""Rollouts where every GPU of the fleet is taken, and edits in the middle of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import published
import pytest

from e2e.cluster import fake_nodes, tools

from .conftest import manifest

if TYPE_CHECKING:
    from e2e.kubectl import Kubectl

FULL = {"full": "true"}


@pytest.fixture(scope="module")
def full(admin: Kubectl) -> None:
    """Five nodes of 8 GPUs: just what one prefill and four decode pods of 8 hold."""
    nodes = [f"full-{number}" for number in range(1, 6)]
    fake_nodes.add(admin.layout, tools.directory(), nodes, {"nvidia.com/gpu": "8"}, FULL)


def fleet(name: str, **spec: Any) -> dict[str, Any]:
    role = {"tensorParallel": 8, "nodeSelector": FULL, "engine": {"kvCacheMemory": "8Gi"}}
    return manifest(
        name,
        model={"uri": published.QWEN3_URI},
        accelerator={"type": "GPU"},
        prefill={"replicas": 1, **role},
        decode={"replicas": 4, **role},
        rollout={"maxSurge": 0, "maxUnavailable": 1},
        **spec,
    )


def change(models: Kubectl, name: str, **spec: Any) -> None:
    models("patch", "dm", name, "--type=merge", "-p", json.dumps({"spec": spec}))


def finished(models: Kubectl, name: str) -> dict[str, str]:
    """Revisions by role, once all pods are of them."""
    models.until_condition(name, "Progressing", "False", "Complete", timeout=90)
    models.until_condition(name, "Ready", "True")
    status = models.get("dm", name)["status"]
    for role, count in (("prefill", 1), ("decode", 4)):
        pods = models.pods(name, role)
        assert len(pods) == count
        assert {pod["metadata"]["labels"]["tandem.dev/revision"] for pod in pods} == {
            status[role]["revision"]
        }
    return {role: status[role]["revision"] for role in ("prefill", "decode")}


def test_on_a_full_cluster_without_surge(full: None, models: Kubectl, name: str) -> None:
    models.apply([fleet(name)])
    first = finished(models, name)
    change(models, name, decode={"engine": {"maxSequences": 24}})
    second = finished(models, name)
    assert second["decode"] != first["decode"]
    assert second["prefill"] == first["prefill"]
    # A change of the KV key, where prefill has one pod and no device is free: serving pauses, and it ends.
    change(models, name, engine={"pageSize": 32})
    third = finished(models, name)
    assert third["prefill"] != second["prefill"]


def test_back_and_on_in_the_middle_of_a_rollout(full: None, models: Kubectl, name: str) -> None:
    """A to B and back: A's revisions are those of before. A to B to C: B is never finished."""
    models.apply([fleet(name)])
    first = finished(models, name)
    change(models, name, decode={"engine": {"maxSequences": 24}})
    models.until_condition(name, "Progressing", "True", "RollingOut")
    change(models, name, decode={"engine": {"maxSequences": None}})
    assert finished(models, name) == first
    change(models, name, decode={"engine": {"maxSequences": 24}})
    models.until_condition(name, "Progressing", "True", "RollingOut")
    second = models.get("dm", name)["status"]["decode"]["revision"]
    change(models, name, decode={"engine": {"maxSequences": 20}})
    last = finished(models, name)
    assert last["decode"] not in (first["decode"], second)
    deployments = models.find("deployments", f"tandem.dev/model={name},tandem.dev/role=decode")
    assert [one["metadata"]["labels"]["tandem.dev/revision"] for one in deployments] == [last["decode"]]
