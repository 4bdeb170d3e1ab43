"""What every container and every pod of ours has in common: security, environment, the API token.

Knows: PodSecurity *restricted*. Does not know: roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..objects import Obj
    from ..settings import Settings

USER = 65532
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"

SECURITY: Obj = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_SECURITY: Obj = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",  # a claim of weights is not walked at every start
    "seccompProfile": {"type": "RuntimeDefault"},
}
# IPC_LOCK does nothing for a user that is not root: measured, `mlock` fails with ENOMEM.
ROOT_SECURITY: Obj = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": False,
    "runAsUser": 0,
}
SCRATCH: Obj = {"name": "tandem-scratch", "emptyDir": {}}
SCRATCH_MOUNT: Obj = {"name": "tandem-scratch", "mountPath": "/tmp"}
TOKEN_MOUNT: Obj = {"name": "tandem-token", "mountPath": TOKEN_PATH, "readOnly": True}


def environment(settings: Settings, own: list[Obj]) -> list[Obj]:
    """The installation's variables, then ours, which win."""
    taken = {one["name"] for one in own}
    return [dict(one) for one in settings.runtime.env if one["name"] not in taken] + own


def field(name: str, path: str) -> Obj:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def token_volume() -> Obj:
    """The pod's own token, for the containers that mount it; nothing else in the pod can speak for it."""
    return {
        "name": "tandem-token",
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {
                    "downwardAPI": {
                        "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
                    }
                },
            ]
        },
    }


def http_probe(path: str, port: str, *, period_s: int, failures: int, timeout_s: int = 2) -> Obj:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
    }
