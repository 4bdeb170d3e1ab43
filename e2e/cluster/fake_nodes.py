"""Nodes that are not there: kwok plays their kubelets, so that a fleet of GPUs and NICs can be scheduled
onto.

Knows: kwok's stages: a scheduled pod is Running and ready at once; one with the annotation HELD waits for
somebody to write its status; pods of an inspect Job end with the facts that they were given. Does not know:
what pods are for. Their addresses are of the loopback range: nobody answers there, unless a test listens.

The nodes carry a taint: only pods that tolerate it go there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .commands import run
from .processes import must_run, pid_of, spawn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .layout import Layout

TAINT = {"key": "tandem.dev/fake", "value": "true", "effect": "NoSchedule"}
TOLERATION = {"key": TAINT["key"], "operator": "Exists", "effect": "NoSchedule"}
HELD = "e2e.example/held"
_MARK = "kwok.x-k8s.io/node"
_STAGES = Path(__file__).with_name("stages")


def start(layout: Layout, tools: Path, facts: Mapping[str, str] | None = None) -> None:
    """kwok, if it does not run yet. `facts` maps a model's URI to the message of pods that inspect it."""
    if pid_of(layout, "kwok") is not None:
        return
    inspected = layout.state / "inspected.json"
    documents = [_inspected(number, *one) for number, one in enumerate((facts or {}).items())]
    inspected.write_text("\n---\n".join(map(json.dumps, documents)))
    stages = [*sorted(_STAGES.glob("*.yaml")), *([inspected] if documents else [])]
    spawn(
        layout,
        "kwok",
        tools / "kwok",
        *("--kubeconfig", layout.kubeconfig("kwok"), "--cidr", layout.fake_pods),
        *(f"--manage-nodes-with-annotation-selector={_MARK}=fake", "--node-lease-duration-seconds", "40"),
        *(word for stage in stages for word in ("-c", str(stage))),
    )
    must_run(layout, "kwok")


def add(
    layout: Layout,
    tools: Path,
    names: list[str],
    resources: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
) -> None:
    capacity = {"cpu": "192", "memory": "2Ti", "pods": "250", "ephemeral-storage": "1Ti", **resources}
    nodes: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "annotations": {_MARK: "fake"},
                "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})},
            },
            "spec": {"taints": [TAINT]},
            "status": {"allocatable": capacity, "capacity": capacity},
        }
        for name in names
    ]
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes})
    run(tools / "kubectl", "--kubeconfig", layout.kubeconfig(), "apply", "-f", "-", input=documents)


def _inspected(number: int, uri: str, message: str) -> dict[str, Any]:
    """The stage of pods whose command names that URI."""
    ended = {"exitCode": 0, "reason": "Completed", "message": message}
    status = {"name": "inspect", "image": "fake", "imageID": "", "ready": False, "restartCount": 0}
    patch = {"phase": "Succeeded", "containerStatuses": [{**status, "state": {"terminated": ended}}]}
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": f"pod-inspected-{number}"},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
            "selector": {
                "matchExpressions": [
                    {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"},
                    {"key": ".status.phase", "operator": "In", "values": ["Running"]},
                    {"key": ".spec.containers.[].command.[]", "operator": "In", "values": [uri]},
                ]
            },
            "next": {"statusTemplate": json.dumps(patch)},
        },
    }
