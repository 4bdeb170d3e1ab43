"""The committed CRD is what the models say, structural, bounded, and kind to people who read `kubectl
explain`.

The linter's rules: what kube-apiserver refuses (structural schemas, defaults that do not validate) and what
API reviewers ask for (no floats, no booleans, bounded strings and lists, list types, formats,
descriptions).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tandem_crds import generate
from tandem_crds.model import DisaggregatedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CRD: dict[str, Any] = yaml.safe_load(generate.FILES[0].read_text())
(VERSION,) = CRD["spec"]["versions"]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]

KNOWN_KEYS = {
    *{"type", "format", "description", "default", "enum", "pattern", "properties", "required", "items"},
    *{"additionalProperties", "anyOf", "minimum", "maximum", "multipleOf", "minLength", "maxLength"},
    *{"minItems", "maxItems", "maxProperties"},
    *{"x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"},
    *{"x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"},
}
INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


NODES = list(nodes(ROOT))
OURS = [(path, node) for path, node in NODES if path.startswith((".spec", ".status"))]


def problems(node: dict[str, Any]) -> Iterator[str]:
    if unknown := node.keys() - KNOWN_KEYS:
        yield f"keys {unknown}"
    if node.get("x-kubernetes-int-or-string"):
        if node.get("anyOf") != INT_OR_STRING or "type" in node:
            yield "int-or-string is not spelt as Kubernetes spells it"
    elif "anyOf" in node:
        yield "anyOf outside int-or-string"
    elif node.get("type") not in ("object", "array", "string", "integer"):
        yield f"type {node.get('type')!r}: no floats, no booleans, no untyped nodes"
    if node.get("type") == "string" and not ("maxLength" in node or "enum" in node):
        yield "unbounded string"
    if node.get("type") == "integer" and node.get("format") not in ("int32", "int64"):
        yield "integer without format"
    if node.get("type") == "array":
        if "maxItems" not in node:
            yield "unbounded list"
        kind = node.get("x-kubernetes-list-type")
        if kind not in ("atomic", "set", "map"):
            yield "list without list type"
        for key in node.get("x-kubernetes-list-map-keys", []):
            item = node["items"]
            if key not in item.get("required", []) and "default" not in item["properties"][key]:
                yield f"list map key {key} is neither required nor defaulted"
    if node.get("type") == "object":
        if "properties" in node and "additionalProperties" in node:
            yield "properties beside additionalProperties"
        if "additionalProperties" in node and "maxProperties" not in node:
            yield "unbounded map"
        if not node.keys() & {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"}:
            yield "object of nothing"
    for name in node.get("required", []):
        if "default" in node["properties"][name]:
            yield f"{name} is required and has a default"
    for name in node.get("properties", {}):
        if not re.fullmatch(r"[a-z][A-Za-z0-9]*", name):
            yield f"{name} is not camelCase"
    for rule in node.get("x-kubernetes-validations", []):
        if not rule.get("message") or "\n" in rule["message"]:
            yield "rule without a message"
    if "enum" in node and "default" in node and node["default"] not in node["enum"]:
        yield "default is not in enum"


def test_the_committed_files_are_what_the_models_say() -> None:
    assert generate.main(["--check"]) == 0


def test_check_fails_when_a_file_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "crd.yaml", tmp_path / "chart.yaml"
    monkeypatch.setattr(generate, "FILES", (first, second))
    assert generate.main(["--check"]) == 1
    assert "make crds" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    second.write_text("older")
    assert generate.main(["--check"]) == 1
    assert "chart.yaml is not what the models say" in capsys.readouterr().err


@pytest.mark.parametrize(("path", "node"), OURS, ids=[path for path, _ in OURS])
def test_a_node_is_structural_and_bounded(path: str, node: dict[str, Any]) -> None:
    assert list(problems(node)) == []
    if not path.endswith("{}") and not (path.endswith("[]") and node["type"] == "string"):
        assert len(node["description"]) > 5


def test_the_linter_catches_what_it_is_for() -> None:
    for bad in (
        {"type": "number"},
        {"type": "boolean"},
        {"description": "untyped"},
        {"type": "string"},
        {"type": "integer"},
        {"type": "array", "items": {}, "maxItems": 3},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "patternProperties": {}},
        {"anyOf": INT_OR_STRING},
        {"type": "string", "enum": ["a"], "default": "b"},
        {"type": "string", "$ref": "#/x", "maxLength": 1},
    ):
        assert list(problems(bad)), bad


def test_the_schema_restricts_of_the_metadata_only_the_name() -> None:
    assert ROOT["properties"]["metadata"].keys() == {"type", "properties"}
    assert ROOT["properties"]["metadata"]["properties"].keys() == {"name"}
    assert ROOT["required"] == ["spec"]


def test_defaults_inside_absent_parents_apply() -> None:
    """A server fills in an absent object's defaults only if the object itself has one."""
    means_something_when_absent = {"apiKeySecretRef", "pack", "spread"}
    for path, node in NODES:
        for name, child in node.get("properties", {}).items():
            inside = any("default" in inner for _, inner in nodes(child))
            if path.startswith(".spec") and child.get("type") == "object" and inside:
                required = name in node.get("required", [])
                assert "default" in child or required or name in means_something_when_absent, f"{path}.{name}"


def test_a_default_satisfies_the_rules_of_its_object_before_it_is_filled_in() -> None:
    """kube-apiserver evaluates them on the bare default: `no such key: maxSurge` refuses the whole CRD."""
    for path, node in OURS:
        if "default" in node and "x-kubernetes-validations" in node:
            inside = {name for name, child in node["properties"].items() if "default" in child}
            assert node["default"].keys() == inside, path


def test_pydantic_and_the_api_server_agree_on_every_default() -> None:
    spec = DisaggregatedModel.model_validate(
        {
            "apiVersion": "tandem.dev/v1alpha1",
            "kind": "DisaggregatedModel",
            "metadata": {"name": "a"},
            "spec": {"model": {"uri": "pvc://a/b"}, "prefill": {"replicas": 1}},
        }
    ).spec

    def check(schema: dict[str, Any], value: Any, path: str) -> None:
        for name, child in schema.get("properties", {}).items():
            if "default" in child and child.get("type") != "object":
                assert value[name] == child["default"], f"{path}.{name}"
            if child.get("type") == "object" and isinstance(value.get(name), dict):
                check(child, value[name], f"{path}.{name}")

    check(ROOT["properties"]["spec"], spec.model_dump(), "spec")


def test_the_scale_subresource_reads_and_writes_fields_that_exist() -> None:
    scale = VERSION["subresources"]["scale"]
    paths = dict(NODES)
    assert paths[scale["specReplicasPath"]]["default"] == 1  # /scale fails where it is unset
    assert paths[scale["statusReplicasPath"]]["type"] == "integer"
    assert paths[scale["labelSelectorPath"]]["type"] == "string"
    assert VERSION["subresources"]["status"] == {}


def test_printer_columns_read_fields_that_exist() -> None:
    paths = dict(NODES)
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"]
        if path.startswith((".spec", ".status")) and "[" not in path:
            assert paths[path]["type"] == column["type"]


def test_the_crd_is_small() -> None:
    assert len(generate.FILES[0].read_bytes()) < 100_000
