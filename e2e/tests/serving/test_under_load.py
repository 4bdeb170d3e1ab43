"""What operators of clusters do while clients that never retry are being served: not one answer may suffer.

Every answer is a greedy stream, compared token by token with what `tandem up` says; see `clients.Load`.
"""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from e2e import environment
from e2e.clients import Load
from e2e.cluster import control_plane, processes, tools
from e2e.kubectl import ready

from .conftest import EXAMPLE, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.installation import Installation
    from e2e.kubectl import Kubectl

ROLLOUT_S = 240.0


@pytest.fixture
def load(serving: str, expected: dict[str, list[int]], kubectl: Kubectl) -> Iterator[Load]:
    """Asks from before the test's change until after it; then all must have been well."""
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    with Load(serving, MODEL, expected) as load:
        load.more(4)
        yield load
        load.more(4)
    assert load.wrong[:3] == []
    assert load.answered >= 8


def uids(kubectl: Kubectl, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in kubectl.pods(MODEL, role)}


def until_ready(kubectl: Kubectl, role: str, count: int) -> None:
    def satisfied() -> object:
        pods = kubectl.pods(MODEL, role)
        return (len(pods) == count and all(map(ready, pods))) or f"{len(pods)} pods"

    kubectl.until(f"{count} {role} pods", satisfied, ROLLOUT_S)


def patch(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    kubectl("patch", "dm", MODEL, "--type=merge", "-p", json.dumps({"spec": spec}))


def test_decode_scales_to_one_to_three_and_back(load: Load, kubectl: Kubectl) -> None:
    for replicas in (1, 3, 1, 2):
        kubectl("scale", f"dm/{MODEL}", f"--replicas={replicas}")
        until_ready(kubectl, "decode", replicas)
        kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
        load.more(2)


def test_a_prefill_that_is_deleted_is_replaced_and_its_requests_are_tried_elsewhere(
    load: Load, kubectl: Kubectl
) -> None:
    patch(kubectl, {"prefill": {"replicas": 2}})
    until_ready(kubectl, "prefill", 2)
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    for pod in kubectl.pods(MODEL, "prefill")[:1]:
        kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        load.more(4)
    until_ready(kubectl, "prefill", 2)
    load.more(4)
    for pod in kubectl.pods(MODEL, "prefill")[:1]:  # no time to drain
        kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1", "--wait=false")
        load.more(4)
    until_ready(kubectl, "prefill", 2)
    patch(kubectl, {"prefill": {"replicas": 1}})
    until_ready(kubectl, "prefill", 1)


def test_an_edit_that_keeps_the_kv_key_rolls_pod_by_pod(load: Load, kubectl: Kubectl) -> None:
    before = uids(kubectl, "decode")
    key = kubectl.get("dm", MODEL)["status"]["kvKey"]
    prefill = uids(kubectl, "prefill")
    patch(kubectl, {"decode": {"engine": {"maxSequences": 24}}})
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    assert not before & uids(kubectl, "decode")
    assert prefill == uids(kubectl, "prefill"), "the other role is left alone"
    assert kubectl.get("dm", MODEL)["status"]["kvKey"] == key
    patch(kubectl, {"decode": {"engine": {"maxSequences": None}}})
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)


def test_an_edit_that_changes_the_kv_key_rolls_both_roles_in_pairs(load: Load, kubectl: Kubectl) -> None:
    before = uids(kubectl, "decode") | uids(kubectl, "prefill")
    key = kubectl.get("dm", MODEL)["status"]["kvKey"]
    # Its one prefill pod can be replaced without a pause only where a second may stand beside it.
    patch(kubectl, {"engine": {"pageSize": 32}, "rollout": {"maxSurge": 1}})
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    assert not before & (uids(kubectl, "decode") | uids(kubectl, "prefill"))
    assert kubectl.get("dm", MODEL)["status"]["kvKey"] != key
    patch(kubectl, {"engine": {"pageSize": None}})
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    assert kubectl.get("dm", MODEL)["status"]["kvKey"] == key
    kubectl("apply", "-f", EXAMPLE)


def test_an_api_server_that_is_away_stops_nothing(load: Load, kubectl: Kubectl) -> None:
    before = uids(kubectl, "decode")
    processes.end(kubectl.layout, "kube-apiserver")
    time.sleep(30)
    load.more(4)
    control_plane.start_api_server(kubectl.layout, tools.directory())
    load.more(4)
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    assert uids(kubectl, "decode") == before
    # And what the pods know is current again.
    kubectl("scale", f"dm/{MODEL}", "--replicas=3")
    until_ready(kubectl, "decode", 3)
    load.more(6)
    kubectl("scale", f"dm/{MODEL}", "--replicas=2")
    until_ready(kubectl, "decode", 2)


def test_an_operator_that_is_killed_at_random_moments_of_a_rollout_finishes_it(
    load: Load, kubectl: Kubectl, installation: Installation
) -> None:
    before = uids(kubectl, "decode")
    patch(kubectl, {"decode": {"engine": {"maxSequences": 20}}})
    random.seed(4)
    for _ in range(4):
        time.sleep(random.uniform(0.5, 6.0))
        installation.kubectl("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false")
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    assert not before & uids(kubectl, "decode")
    patch(kubectl, {"decode": {"engine": {"maxSequences": None}}})
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)


def test_another_operator_version_and_default_image_restart_no_pod(
    load: Load, kubectl: Kubectl, installation: Installation
) -> None:
    """The installation's overlay changes what the operator renders; its image is one that does not exist."""
    before = {role: uids(kubectl, role) for role in ("prefill", "decode")}
    template = environment.values()["runtime"]["podTemplate"]
    changed = template | {"metadata": {"annotations": {"example.com/version": "2"}}}
    runtime = environment.values()["runtime"] | {
        "podTemplate": changed,
        "image": {"repository": "localhost/absent", "tag": "2", "pullPolicy": "Never"},
    }
    installation.install(runtime=runtime)
    try:
        time.sleep(10)
        kubectl.until_condition(MODEL, "Reconciled", "True")
        assert before == {role: uids(kubectl, role) for role in ("prefill", "decode")}
    finally:
        installation.install()


def test_uninstalled_and_installed_again_the_operator_finds_its_models(
    load: Load, kubectl: Kubectl, installation: Installation
) -> None:
    before = {role: uids(kubectl, role) for role in ("prefill", "decode", "router")}
    installation.uninstall()
    assert kubectl.get("dm", MODEL), "the CRD stays, and the models with it"
    load.more(4)
    kubectl("scale", f"dm/{MODEL}", "--replicas=3")  # kept for whoever comes
    installation.install()
    until_ready(kubectl, "decode", 3)
    kubectl.until_condition(MODEL, "Ready", "True", timeout=ROLLOUT_S)
    now = {role: uids(kubectl, role) for role in ("prefill", "decode", "router")}
    assert before["prefill"] == now["prefill"]
    assert before["decode"] < now["decode"]
    assert before["router"] == now["router"]
    kubectl("apply", "-f", EXAMPLE)
    kubectl("scale", f"dm/{MODEL}", "--replicas=2")
    until_ready(kubectl, "decode", 2)
