"""Labels, annotations and the names of derived objects: what the operator writes and everybody selects by.

Every name fits a DNS label: at most 40 characters of the model's name plus at most 19 of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kv_key import LENGTH as KV_KEY_LENGTH

if TYPE_CHECKING:
    from .role_config import Role

LABEL_MODEL = "tandem.dev/model"
LABEL_ROLE = "tandem.dev/role"
LABEL_REVISION = "tandem.dev/revision"
LABEL_KV_KEY = "tandem.dev/kv-key"
RESERVED_PREFIX = "tandem.dev/"

ANNOTATION_POD_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

HASH_LENGTH = 10  # of a revision or a KV key inside a name
ROUTER = "router"


def labels(model: str, component: str) -> dict[str, str]:
    """On every object of `model`; `component` is a role or `ROUTER`. Nothing here ever changes, so all may
    be selected by.
    """
    return {
        "app.kubernetes.io/name": "tandem",
        "app.kubernetes.io/instance": model,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "tandem",
        "app.kubernetes.io/managed-by": "tandem-operator",
        LABEL_MODEL: model,
    }


def role_labels(model: str, role: Role, revision: str, kv_key: str) -> dict[str, str]:
    """On the pods and the Deployment of one revision of a role."""
    assert len(kv_key) == KV_KEY_LENGTH
    return labels(model, role.value) | {
        LABEL_ROLE: role.value,
        LABEL_REVISION: revision,
        LABEL_KV_KEY: kv_key,
    }


def decode_selector(model: str) -> str:
    """The scale subresource's selector: decode pods of all revisions."""
    return f"{LABEL_MODEL}={model},{LABEL_ROLE}=decode"


def role_name(model: str, role: Role, key: str) -> str:
    """Deployment, ConfigMap (key: the revision) or headless Service (key: the KV key) of a role."""
    return f"{model}-{role.value}-{key[:HASH_LENGTH]}"


def disruption_budget(model: str, role: Role) -> str:
    return f"{model}-{role.value}"


def router(model: str) -> str:
    """Deployment and Service: the address that clients use."""
    return f"{model}-router"


def router_revision(model: str, revision: str) -> str:
    """ConfigMap that keeps the router's rendered pod template."""
    return f"{model}-{ROUTER}-{revision[:HASH_LENGTH]}"


def worker_account(model: str) -> str:
    """ServiceAccount, Role and RoleBinding of the pods that discover peers."""
    return f"{model}-worker"


def peer_secret(model: str) -> str:
    return f"{model}-peer-key"


def network_policy(model: str) -> str:
    return f"{model}-messenger"


def inspect_job(model: str, key: str) -> str:
    """Job that reads the model's facts, and the ConfigMap that keeps them; `key` hashes the model's spec."""
    return f"{model}-inspect-{key[:HASH_LENGTH]}"
