"""Write the CRD's YAML from the models: `python -m tandem_crds.generate`, with `--check` only compare it.

Knows: what Kubernetes calls a structural schema. Does not know: any field.

pydantic's schema is not structural: it has `$ref`, `title`, `null`, `const`, `patternProperties` and
`additionalProperties: false`. References are put in place with the property's own keys on top, null
disappears (an absent field is unset), and a default that is an object becomes `{}`, since each field inside
states its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic.json_schema import GenerateJsonSchema

from .model import GROUP, KIND, NAME_MAX_LENGTH, NAME_PATTERN, VERSION, DisaggregatedModel
from .rules import ApiModel

if TYPE_CHECKING:
    from pydantic_core import core_schema

_ROOT = Path(__file__).parents[3]
# For `kubectl apply -f crds/`, and for the Helm chart.
FILES = (
    _ROOT / "crds" / "disaggregatedmodels.tandem.dev.yaml",
    _ROOT / "charts" / "tandem" / "files" / "disaggregatedmodels.tandem.dev.yaml",
)

_HEADER = "# Generated from the models of tandem_crds: edit those and run `make crds`.\n"

_METADATA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": NAME_MAX_LENGTH, "pattern": NAME_PATTERN}},
}

_READY = '.status.conditions[?(@.type=="Ready")].status'
# Name, type, path, description, priority (1: only with `-o wide`).
_COLUMNS = (
    ("Ready", "string", _READY, "Everything wanted is there and works.", 0),
    ("Prefill", "integer", ".status.prefill.ready", "Ready prefill pods.", 0),
    ("Decode", "integer", ".status.decode.ready", "Ready decode pods.", 0),
    ("Desired", "integer", ".spec.decode.replicas", "Decode pods wanted.", 1),
    ("Model", "string", ".spec.model.uri", "Where the weights are.", 1),
    ("Revision", "string", ".status.decode.revision", "Newest revision of decode.", 1),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation.", 0),
)


def custom_resource_definition() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"disaggregatedmodels.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": "disaggregatedmodels",
                "singular": "disaggregatedmodel",
                "shortNames": ["dm"],
                "categories": ["tandem"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [
                        dict(
                            zip(("name", "type", "jsonPath", "description", "priority"), column, strict=True)
                        )
                        for column in _COLUMNS
                    ],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.decode.replicas",
                            "statusReplicasPath": ".status.decode.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": _root()},
                }
            ],
        },
    }


def render() -> str:
    return _HEADER + yaml.dump(custom_resource_definition(), Dumper=_Dumper, sort_keys=False, width=120)


def _root() -> dict[str, Any]:
    schema = DisaggregatedModel.model_json_schema(schema_generator=_Absent, mode="validation")
    root: dict[str, Any] = _structural(schema, schema.pop("$defs"))
    root["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": _METADATA,
    }
    root["properties"]["status"].pop("default")  # the status subresource is the operator's to write
    root["required"] = ["spec"]
    return root


class _Absent(GenerateJsonSchema):
    """Unset is absent: no null among the types, no title, and each model carries its rules."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> dict[str, Any]:
        result = super().default_schema(schema)
        if result.get("default", ...) is None:
            del result["default"]
        return result

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        result = super().model_schema(schema)
        result.pop("title", None)
        kind = schema["cls"]
        if issubclass(kind, ApiModel) and kind.rules:
            result["x-kubernetes-validations"] = [rule.to_cel() for rule in kind.rules]
        return result


def _structural(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_structural(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    if reference := node.get("$ref"):
        definition = definitions[reference.removeprefix("#/$defs/")]
        own = {key: value for key, value in node.items() if key != "$ref"}
        if "default" in own:
            own["default"] = _object_default(definition)
        node = definition | own
    out: dict[str, Any] = {}
    for key, value in node.items():
        match key:
            case "properties":
                out[key] = {name: _structural(child, definitions) for name, child in value.items()}
            case "const":
                out["enum"] = [value]
            case "propertyNames":
                pass  # structural schemas cannot bound the keys of a map
            case "patternProperties":
                (values,) = value.values()
                out["additionalProperties"] = _structural(values, definitions)
            case "default" | "enum" | "required" | "x-kubernetes-validations":
                out[key] = value
            case "additionalProperties" if value is False or value is True:
                pass
            case _:
                out[key] = _structural(value, definitions)
    if out.get("default") == {} and out.get("type") == "object" and "properties" not in out:
        del out["default"]  # an empty map is no map
    if out.get("default") == []:
        del out["default"]
    return out


def _object_default(definition: dict[str, Any]) -> dict[str, Any]:
    """`{}`, except below rules: the server checks a default against them before it fills it in."""
    if "x-kubernetes-validations" not in definition:
        return {}
    children = definition["properties"].items()
    return {name: child["default"] for name, child in children if "default" in child and "$ref" not in child}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tandem_crds.generate", description="Write the CRD's YAML."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a file is not what the models say"
    )
    check: bool = parser.parse_args(argv).check
    text = render()
    for file in FILES:
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file} is not what the models say; run `make crds`", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
