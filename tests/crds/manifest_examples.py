"""Manifests that break one rule each, and what a user is told: the same list holds for `load_manifest` and
for an API server.

`RULES` holds for both, because those rules are stated in CEL too; `TYPES` for both with other words; `OURS`
is what only we refuse.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

VALID: dict[str, Any] = {
    "apiVersion": "tandem.dev/v1alpha1",
    "kind": "DisaggregatedModel",
    "metadata": {"name": "smollm2"},
    "spec": {
        "model": {"uri": "pvc://models/smollm2"},
        "accelerator": {"type": "CPU"},
        "prefill": {"replicas": 1},
    },
}


class Example(NamedTuple):
    """`changes` maps dotted paths to values (None deletes); `field` and `says` are what the refusal names."""

    changes: dict[str, Any]
    field: str
    says: str


def manifest(changes: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(VALID)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = out
        for name in parents:
            node = node.setdefault(name, {})
        if value is None:
            del node[last]
        else:
            node[last] = value
    return out


URI_FORMS = "must be hf://ORG/NAME, pvc://CLAIM/PATH, oci://IMAGE or file:///PATH"
REPLICAS_OR_RATIO = "exactly one of prefill.replicas and scaling.ratio must be set"

RULES = [
    Example({"spec.model.uri": "s3://bucket/x"}, "spec.model.uri", f"uri s3://bucket/x {URI_FORMS}"),
    Example({"spec.model.uri": "hf://lonely"}, "spec.model.uri", f"uri hf://lonely {URI_FORMS}"),
    Example({"spec.model.uri": "file://relative"}, "spec.model.uri", f"uri file://relative {URI_FORMS}"),
    Example(
        {"spec.model.uri": "pvc://a/../b"},
        "spec.model.uri",
        "uri pvc://a/../b must not climb out of its volume with ..",
    ),
    Example(
        {"spec.model.revision": "main"},
        "spec.model.revision",
        "revision main has a meaning only for hf:// models",
    ),
    Example(
        {"spec.model.cache": {"claimName": "a"}},
        "spec.model.cache",
        "cache has a meaning only for hf:// models",
    ),
    Example(
        {"spec.model.secretRef": {"name": "a"}},
        "spec.model.secretRef",
        "secretRef has a meaning only for hf:// models; images are pulled with runtime.imagePullSecrets",
    ),
    Example(
        {"spec.model.uri": "hf://a/b", "spec.model.cache": {"claimName": "a", "sizeLimit": "1Gi"}},
        "spec.model.cache",
        "exactly one of claimName and sizeLimit must be set",
    ),
    Example(
        {"spec.model.uri": "hf://a/b", "spec.model.cache": {}},
        "spec.model.cache",
        "exactly one of claimName and sizeLimit must be set",
    ),
    Example(
        {"spec.decode.engine": {"kvCacheMemory": 0}},
        "spec.decode.engine.kvCacheMemory",
        "kvCacheMemory must be more than 0",
    ),
    Example(
        {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 0}},
        "spec.rollout",
        "maxSurge and maxUnavailable must not both be 0: nothing could move",
    ),
    Example({"spec.scaling": {"targetQPS": "0"}}, "spec.scaling.targetQPS", "targetQPS must be more than 0"),
    Example(
        {"spec.scaling": {"mode": "QPS", "targetQPS": "1"}},
        "spec.scaling.mode",
        "mode QPS needs targetQPS and maxReplicas",
    ),
    Example(
        {"spec.scaling": {"minReplicas": 5, "maxReplicas": 2}},
        "spec.scaling.minReplicas",
        "minReplicas 5 must not exceed maxReplicas 2",
    ),
    Example({"spec.prefill.replicas": None}, "spec.prefill.replicas", REPLICAS_OR_RATIO),
    Example(
        {"spec.scaling": {"ratio": {"prefill": 1, "decode": 2}}}, "spec.prefill.replicas", REPLICAS_OR_RATIO
    ),
    Example(
        {"spec.fabric": {"nicsPerGPU": 1}},
        "spec.fabric",
        "nicsPerGPU and deviceClassName have a meaning only with accelerator GPU",
    ),
]

TYPES = [
    Example({"spec.decode.replicas": "2"}, "spec.decode.replicas", "is '2'; it must be a whole number"),
    Example({"spec.decode.replicas": 1.5}, "spec.decode.replicas", "is 1.5; it must be a whole number"),
    Example({"spec.decode.replicas": True}, "spec.decode.replicas", "is True; it must be a whole number"),
    Example(
        {"spec.decode.replicas": -1}, "spec.decode.replicas", "is -1; it must be greater than or equal to 0"
    ),
    Example(
        {"spec.decode.tensorParallel": 65},
        "spec.decode.tensorParallel",
        "is 65; it must be less than or equal to 64",
    ),
    Example(
        {"spec.accelerator.type": "TPU"}, "spec.accelerator.type", "is 'TPU'; it must be one of GPU, CPU"
    ),
    Example(
        {"spec.engine.pageSize": 17}, "spec.engine.pageSize", "is 17; it must be one of 8, 16, 32, 64, 128"
    ),
    Example({"spec.model.uri": None}, "spec.model.uri", "is missing"),
    Example({"spec.model": "pvc://a/b"}, "spec.model", "is 'pvc://a/b'; it must be an object"),
    Example({"spec.decode.nodeSelector": {"a": 1}}, "spec.decode.nodeSelector.a", "is 1; it must be text"),
    Example({"spec.decode.tolerations": {}}, "spec.decode.tolerations", "is {}; it must be a list"),
    Example(
        {"spec.decode.tolerations": [{"effect": "Never"}]},
        "spec.decode.tolerations[0].effect",
        "is 'Never'; it must be one of NoSchedule, PreferNoSchedule, NoExecute",
    ),
    Example(
        {"spec.decode.engine": {"kvCacheMemory": "1Xi"}},
        "spec.decode.engine.kvCacheMemory",
        "is '1Xi'; it must be a quantity",
    ),
    Example({"spec.scaling": {"targetQPS": 1.5}}, "spec.scaling.targetQPS", "is 1.5; it must be a quantity"),
    Example({"metadata.name": "Smol_LM"}, "metadata.name", "is 'Smol_LM'; it must be text that matches"),
    Example({"metadata.name": "2fast"}, "metadata.name", "is '2fast'; it must be text that matches"),
    Example(
        {"metadata.name": "a" * 41},
        "metadata.name",
        f"is '{'a' * 41}'; it must be text of at most 40 characters",
    ),
]

OURS = [
    Example({"spec.fabric.profil": "tcp"}, "spec.fabric.profil", "is not a field; did you mean profile?"),
    Example(
        {"spec.prefill.tensor_parallel": 2},
        "spec.prefill.tensor_parallel",
        "is not a field; did you mean tensorParallel?",
    ),
    Example(
        {"spec.decode.tolerations": [{"kye": "a"}]},
        "spec.decode.tolerations[0].kye",
        "is not a field; did you mean key?",
    ),
    Example({"metadata.lables": {}}, "metadata.lables", "is not a field; did you mean labels?"),
    Example({"spec.topology.colour": "red"}, "spec.topology.colour", "is not a field; known: pack, spread"),
    Example({"kind": "Deployment"}, "kind", "is 'Deployment'; it must be DisaggregatedModel"),
    Example({"apiVersion": "v1"}, "apiVersion", "is 'v1'; it must be tandem.dev/v1alpha1"),
    Example(
        {"spec.decode.podTemplate": {"spec": {"hostNetwork": True}}},
        "spec.decode.podTemplate",
        "it must be without spec.hostNetwork",
    ),
]
