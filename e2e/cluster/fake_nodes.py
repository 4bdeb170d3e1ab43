"""Nodes that are not there: kwok plays their kubelets, so that a fleet of GPUs and NICs can be scheduled
onto.

Pods on them are Running at once and answer nobody. The nodes carry a taint: only pods that tolerate it go
there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .commands import run
from .processes import must_run, pid_of, spawn

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .layout import Layout

TAINT = {"key": "tandem.dev/fake", "value": "true", "effect": "NoSchedule"}
TOLERATION = {"key": TAINT["key"], "operator": "Exists", "effect": "NoSchedule"}
_MARK = "kwok.x-k8s.io/node"


def start(layout: Layout, tools: Path) -> None:
    """kwok, if it does not run yet."""
    if pid_of(layout, "kwok") is not None:
        return
    stages = sorted(tools.glob("stage-*.yaml"))
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
