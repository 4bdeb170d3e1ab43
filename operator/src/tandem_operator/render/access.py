"""Who may do what: the account that discovers peers, and who reaches the messenger's ports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names
from tandem_crds.role_config import Role

from .. import objects
from .services import SERVER_PORT, WORKER_PORT

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel

    from ..objects import Kind, Obj

# Where libfabric providers have ports; a revision's RoleConfig names the same.
FABRIC_PORTS = (10000, 10999)


def service_account(model: DisaggregatedModel) -> Obj:
    body = _body(objects.SERVICE_ACCOUNT, model)
    # The token is projected only into containers that discover.
    return {**body, "automountServiceAccountToken": False}


def role(model: DisaggregatedModel) -> Obj:
    """Labels cannot narrow RBAC: it is every EndpointSlice of the namespace, to read."""
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    return {**_body(objects.ROLE, model), "rules": [rule]}


def role_binding(model: DisaggregatedModel) -> Obj:
    name = names.worker_account(model.metadata.name)
    return {
        **_body(objects.ROLE_BINDING, model),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name}],
    }


def network_policy(model: DisaggregatedModel) -> Obj:
    """Workers are reached by the model's own pods on every port of theirs, and on `worker` by anybody: its
    answers to strangers are health and counters (`/peer` asks for the key), and the kubelet's probes and the
    operator come from addresses that no selector knows.
    """
    name = model.metadata.name
    own = {"podSelector": {"matchLabels": {names.LABEL_MODEL: name}}}
    return {
        "apiVersion": objects.NETWORK_POLICY.api_version,
        "kind": objects.NETWORK_POLICY.kind,
        "metadata": {"name": names.network_policy(name), "labels": names.labels(name, "messenger")},
        "spec": {
            "podSelector": {
                "matchLabels": {names.LABEL_MODEL: name},
                "matchExpressions": [
                    {
                        "key": names.LABEL_ROLE,
                        "operator": "In",
                        "values": sorted([Role.PREFILL.value, Role.DECODE.value]),
                    }
                ],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [own],
                    "ports": [
                        {"protocol": "TCP", "port": SERVER_PORT},
                        {"protocol": "TCP", "port": FABRIC_PORTS[0], "endPort": FABRIC_PORTS[1]},
                    ],
                },
                {"ports": [{"protocol": "TCP", "port": WORKER_PORT}]},
            ],
        },
    }


def _body(kind: Kind, model: DisaggregatedModel) -> Obj:
    name = model.metadata.name
    metadata = {"name": names.worker_account(name), "labels": names.labels(name, "worker")}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
