"""`helm install`, `kubectl apply`, an answer: what the README promises, on real nodes."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING

import yaml

from e2e import clients
from e2e.kubectl import ready

from .conftest import EXAMPLE, MODEL

if TYPE_CHECKING:
    from e2e.installation import Installation
    from e2e.kubectl import Kubectl


def test_the_chart_tests_itself(installation: Installation) -> None:
    assert "Succeeded" in installation.test()


def test_the_applied_manifest_is_the_example(kubectl: Kubectl, serving: str) -> None:
    """`kubectl apply` keeps what it was given: nothing was patched to make it run here."""
    kept = kubectl.get("dm", MODEL)["metadata"]["annotations"]
    given = yaml.safe_load(EXAMPLE.read_text())
    applied = json.loads(kept["kubectl.kubernetes.io/last-applied-configuration"])
    assert applied["spec"] == given["spec"]


def test_prefill_and_decode_answer_across_nodes(
    kubectl: Kubectl, serving: str, expected: dict[str, list[int]]
) -> None:
    """Each decode pod takes its KV cache from the one prefill, and one of them from another node."""
    (prefill,) = kubectl.pods(MODEL, "prefill")
    decodes = kubectl.pods(MODEL, "decode")
    assert all(map(ready, [prefill, *decodes]))
    assert {pod["spec"]["nodeName"] for pod in decodes} == {"node1", "node2"}
    for pod in decodes:
        assert clients.answers(f"http://{pod['status']['podIP']}:8000", MODEL) == expected
        state = json.load(urllib.request.urlopen(f"http://{pod['status']['podIP']}:8001/state", timeout=5))
        assert list(state["peers"]) == [prefill["metadata"]["name"]]
        assert state["counters"]["writes"] > 0


def test_the_service_answers_with_the_ids_of_tandem_up(serving: str, expected: dict[str, list[int]]) -> None:
    assert clients.answers(serving, MODEL) == expected


def test_a_chat_answer(serving: str) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": MODEL, "temperature": 0, "messages": [question]}).encode()
    request = urllib.request.Request(
        f"{serving}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(request, timeout=30))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_what_kubectl_shows(kubectl: Kubectl, serving: str) -> None:
    header, row = kubectl("get", "dm", MODEL, "-o", "wide").splitlines()
    columns = dict(zip(header.split(), row.split(), strict=True))
    assert columns["READY"] == "True"
    assert (columns["PREFILL"], columns["DECODE"], columns["DESIRED"]) == ("1", "2", "2")
    kubectl("wait", "--for=condition=Ready", f"dm/{MODEL}", "--timeout=5s")
    assert "KV cache" in kubectl("explain", "dm.spec.decode.engine.kvCacheMemory")
    conditions = {one["type"]: one for one in kubectl.get("dm", MODEL)["status"]["conditions"]}
    assert {name: one["status"] for name, one in conditions.items()} == {
        "Ready": "True",
        "Reconciled": "True",
        "Available": "True",
        "Progressing": "False",
        "Compatible": "True",
        "FabricReady": "True",
        "ScalingActive": "False",
    }


def test_pods_are_what_podsecurity_restricted_wants(kubectl: Kubectl, serving: str) -> None:
    """The namespace enforces it; and none holds a token that it does not need."""
    assert kubectl.get("namespace", "default")["metadata"]["labels"][
        "pod-security.kubernetes.io/enforce"
    ] == ("restricted")
    (prefill,) = kubectl.pods(MODEL, "prefill")
    mounts = prefill["spec"]["containers"][0]["volumeMounts"]
    assert not [one for one in mounts if "serviceaccount" in one["mountPath"]]
