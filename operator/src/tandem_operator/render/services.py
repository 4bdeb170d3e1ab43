"""Services: one headless per (role, KV key), by whose labels peers select each other, and the router's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names

from ..objects import SERVICE

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel
    from tandem_crds.role_config import Role

    from ..objects import Obj

SERVER_PORT, WORKER_PORT = 8000, 8001


def role_service(model: DisaggregatedModel, role: Role, kv_key: str) -> Obj:
    """Its labels reach its EndpointSlices. Not-ready pods are listed there as such, so none are published
    as ready.
    """
    name = model.metadata.name
    selector = {names.LABEL_MODEL: name, names.LABEL_ROLE: role.value, names.LABEL_KV_KEY: kv_key}
    return {
        "apiVersion": SERVICE.api_version,
        "kind": SERVICE.kind,
        "metadata": {
            "name": names.role_name(name, role, kv_key),
            "labels": names.labels(name, role.value) | selector,
        },
        "spec": {
            "clusterIP": "None",
            "selector": selector,
            "ports": [
                {"name": "server", "port": SERVER_PORT, "targetPort": SERVER_PORT, "protocol": "TCP"},
                {"name": "worker", "port": WORKER_PORT, "targetPort": WORKER_PORT, "protocol": "TCP"},
            ],
        },
    }


def router_service(model: DisaggregatedModel) -> Obj:
    name, wanted = model.metadata.name, model.spec.router.service
    labels = names.labels(name, names.ROUTER)
    return {
        "apiVersion": SERVICE.api_version,
        "kind": SERVICE.kind,
        "metadata": {"name": names.router(name), "labels": labels},
        "spec": {
            "type": wanted.type,
            "selector": labels,
            "ports": [{"name": "http", "port": wanted.port, "targetPort": "http", "protocol": "TCP"}],
        },
    }
