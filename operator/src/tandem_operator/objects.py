"""Kubernetes objects as plain dicts, and the kinds that the operator touches.

Knows: how an object is named and owned. Does not know: the API server, what any field means.

Dicts, because the server validates (`fieldValidation=Strict`) and typed models would refuse or re-serialise
what it accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem_crds.model import API_VERSION, KIND

Obj = dict[str, Any]

# One field manager for every child, one for the replicas that the autoscaler writes.
FIELD_MANAGER = "tandem-operator"
SCALING_FIELD_MANAGER = "tandem-autoscaler"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that the operator reads or writes."""

    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        """Empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The URL path; `namespace` None lists all namespaces."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


MODEL = Kind(API_VERSION, KIND, "disaggregatedmodels")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
POD = Kind("v1", "Pod", "pods")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
JOB = Kind("batch/v1", "Job", "jobs")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
EVENT = Kind("events.k8s.io/v1", "Event", "events")

# Kinds of which a model has children, in the order in which they are applied: what pods mount or refer to
# before the pods. Secrets are not listed: the peer Secret is created once and never read again.
CHILD_KINDS = (
    SERVICE_ACCOUNT, ROLE, ROLE_BINDING, NETWORK_POLICY, CONFIG_MAP, SERVICE, JOB, DISRUPTION_BUDGET,
    DEPLOYMENT,
)  # fmt: skip
KINDS = {kind.kind: kind for kind in (MODEL, *CHILD_KINDS, SECRET, POD, LEASE, EVENT)}


def kind_of(obj: Obj) -> Kind:
    return KINDS[obj["kind"]]


def name_of(obj: Obj) -> str:
    return str(obj["metadata"]["name"])


def namespace_of(obj: Obj) -> str:
    return str(obj["metadata"]["namespace"])


def uid_of(obj: Obj) -> str:
    return str(obj["metadata"]["uid"])


def labels_of(obj: Obj) -> dict[str, str]:
    labels: dict[str, str] = obj["metadata"].get("labels") or {}
    return labels


def is_terminating(obj: Obj) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def owner_reference(parent: Obj) -> Obj:
    """The reference that makes `parent` the controller of a child, so that garbage collection takes it along.

    `blockOwnerDeletion` stays unset: nothing of ours must delay a deletion.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name_of(parent),
        "uid": uid_of(parent),
        "controller": True,
    }


def is_controlled_by(obj: Obj, parent_uid: str) -> bool:
    """Whether the controller reference of `obj` names that very parent, not an older one of the same name."""
    references = obj["metadata"].get("ownerReferences") or []
    return any(one.get("controller") and one["uid"] == parent_uid for one in references)
