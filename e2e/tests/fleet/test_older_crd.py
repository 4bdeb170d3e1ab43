"""Operator and CRD of different releases, on an API server of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from e2e.cluster import lifecycle
from e2e.cluster.layout import Layout
from e2e.kubectl import Kubectl
from e2e.operator_process import OperatorProcess

from .conftest import CRD, manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def bare() -> Iterator[Kubectl]:
    """etcd and the API server: enough for what the operator says and writes."""
    layout = Layout("older", index=3, nodes=0, bare=True)
    lifecycle.up(layout)
    yield Kubectl(layout)
    lifecycle.down(layout.name)


def without(schema: Any, *keys: str) -> Any:
    if isinstance(schema, dict):
        return {key: without(value, *keys) for key, value in schema.items() if key not in keys}
    return [without(one, *keys) for one in schema] if isinstance(schema, list) else schema


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def test_an_older_schema(bare: Kubectl, tmp_path: Path) -> None:
    """One that lacks a field is named until it has it; one without rules lets wrong models through, which are
    told so and stop no other.
    """
    crd = yaml.safe_load(CRD.read_text())
    older = copy.deepcopy(crd)
    del schema_of(older)["properties"]["spec"]["properties"]["topology"]
    with OperatorProcess(bare.layout.kubeconfig(), tmp_path, ready=False) as operator:
        bare.until("not ready", lambda: "apply the CRD" in operator.get("/readyz"))
        bare.apply([older])
        bare.until("its word", lambda: "lacks spec.topology" in operator.get("/readyz"))
        assert operator.get("/healthz") == "ok", "a restart would not help"
        version = crd["spec"]["versions"][0]
        version["schema"]["openAPIV3Schema"] = without(
            schema_of(crd), "x-kubernetes-validations", "pattern", "maxLength", "minimum"
        )
        bare.apply([crd])
        operator.until_ready()
        bare.apply(
            [
                manifest("a" * 41),
                manifest("nothing-to-scale-by", scaling={"mode": "QPS"}),
                manifest("negative", decode={"replicas": 1, "tensorParallel": -1}),
                manifest("well"),
            ]
        )
        told = bare.until_condition("a" * 41, "Reconciled", "False", "NameTooLong")["message"]
        assert "at most 40" in told
        told = bare.until_condition("nothing-to-scale-by", "Reconciled", "False", "InvalidSpec")["message"]
        assert "mode QPS needs targetQPS and maxReplicas" in told
        told = bare.until_condition("negative", "Reconciled", "False", "InvalidSpec")["message"]
        assert "spec.decode.tensorParallel" in told
        bare.until_condition("well", "Reconciled", "Unknown", "Inspecting")
