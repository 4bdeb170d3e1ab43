"""From `kubectl apply` to Ready, in stages, as the objects' own timestamps tell: in whole seconds."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kubectl import Document, Kubectl


def stages(kubectl: Kubectl, model: str) -> list[tuple[str, float]]:
    """Names and durations in s of what the first start waited for: each until the last pod had done it."""
    document = kubectl.get("dm", model)
    # The Job that read the model's facts is gone by now; the ConfigMap that keeps them is not.
    (facts,) = kubectl.find("configmaps", f"tandem.dev/model={model},app.kubernetes.io/component=inspect")
    pods = [pod for role in ("prefill", "decode") for pod in kubectl.pods(model, role)]
    moments = [
        ("apply", _time(document["metadata"]["creationTimestamp"])),
        ("inspect the model", _time(facts["metadata"]["creationTimestamp"])),
        ("make the pods", max(_time(pod["metadata"]["creationTimestamp"]) for pod in pods)),
        ("schedule", max(_transition(pod, "PodScheduled") for pod in pods)),
        ("images and start", max(_started(pod) for pod in pods)),
        ("load", max(_transition(pod, "Ready") for pod in pods)),
        ("handshake", _transition(document, "FabricReady")),
    ]
    return [
        (name, max(0.0, (at - before).total_seconds()))
        for (_, before), (name, at) in itertools.pairwise(moments)
    ]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _transition(document: Document, kind: str) -> datetime:
    return next(
        _time(one["lastTransitionTime"]) for one in document["status"]["conditions"] if one["type"] == kind
    )


def _started(pod: Document) -> datetime:
    return max(_time(one["state"]["running"]["startedAt"]) for one in pod["status"]["containerStatuses"])
