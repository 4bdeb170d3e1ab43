"""Write the API's reference page: `python -m tandem_crds.reference`, with `--check` only compare it.

Knows: how the CRD's structural schema reads as tables. Does not know: any field.

An object is a section, under the dotted path that leads to it; objects that are alike in all but their place
share one. A bound, a default, a rule is on the page because the schema has it, so that the page cannot say
anything else than the API server does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .fields import DNS_LABEL, LABEL_KEY
from .generate import custom_resource_definition
from .model import API_VERSION, KIND, NAME_PATTERN, DisaggregatedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Schema = dict[str, Any]

FILE = Path(__file__).parents[3] / "docs" / "crd-reference.md"
ROOT = "DisaggregatedModel"
_NAME = "The model's name, and the beginning of the names of all its objects."

_HEADER = f"""<!-- Generated from tandem_crds: edit its models, run `python -m tandem_crds.reference`. -->
# {KIND} ({API_VERSION})

Every field with its bounds and its default, as the CRD has them; `kubectl explain dm.spec` shows the same.
What happens to running pods when a field changes is in [operations.md](operations.md).

- **required**: without it the server refuses the object that holds the field. A dash: there is no default.
- **quantity**: a whole number, or text such as `"500m"`, `"1.5"` or `"16Gi"`; never a floating-point number.
- "of its fields": the object is there even if you leave it out, with the defaults of its fields.
- A field that is not on this page is refused by `kubectl`, and dropped where a client asks for less.
"""

# What people call a pattern; others are shown as they are.
_PATTERNS = {
    DNS_LABEL: "a DNS label",
    NAME_PATTERN: "a DNS label that begins with a letter",
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": "a DNS name",
    LABEL_KEY: "a label's key",
    r"^[^\s]+$": "without spaces",
    r"^[-._a-zA-Z0-9]+$": "letters, digits, `-`, `.` and `_`",
    r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$": "an identifier",
}


@dataclass(frozen=True, slots=True)
class Section:
    """Objects with the same fields and rules; `paths` are in the order of the schema."""

    paths: tuple[str, ...]
    schema: Schema

    @property
    def title(self) -> str:
        return ", ".join(self.paths)

    @property
    def anchor(self) -> str:
        """As GitHub makes it of the title."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


def render() -> str:
    crd = custom_resource_definition()["spec"]
    (version,) = crd["versions"]
    root = _described(version["schema"]["openAPIV3Schema"])
    found = sections(root)
    anchors = {path: section.anchor for section in found for path in section.paths}
    parts = [_HEADER, _naming(crd), *(_section(one, anchors) for one in found)]
    parts += [_columns(version["additionalPrinterColumns"]), _scale(version["subresources"]["scale"])]
    return "\n".join(parts)


def sections(root: Schema) -> list[Section]:
    """Of the root and of every object below it, each before those that it holds."""
    alike: dict[str, list[tuple[str, Schema]]] = {}
    for path, schema in _objects(root, ""):
        same = {
            key: schema.get(key)
            for key in ("description", "properties", "required", "x-kubernetes-validations")
        }
        alike.setdefault(json.dumps(same, sort_keys=True), []).append((path or ROOT, schema))
    return [Section(tuple(path for path, _ in group), group[0][1]) for group in alike.values()]


def _objects(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, child in schema["properties"].items():
        below = f"{path}.{name}" if path else name
        if child.get("type") == "array":
            child, below = child["items"], f"{below}[]"
        if "properties" in child:
            yield from _objects(child, below)


def _described(root: Schema) -> Schema:
    """The server describes what all kinds of objects have; here the models do."""
    fields = DisaggregatedModel.model_fields
    own = {"apiVersion": fields["api_version"], "kind": fields["kind"], "metadata": fields["metadata"]}
    properties = dict(root["properties"])
    for name, field in own.items():
        properties[name] = {**properties[name], "description": field.description}
    named = {**properties["metadata"]["properties"]["name"], "description": _NAME}
    properties["metadata"]["properties"] = {"name": named}
    return {**root, "properties": properties, "required": [*own, *root["required"]]}


# --- parts of the page --------------------------------------------------------------------------------


def _naming(crd: Schema) -> str:
    names = crd["names"]
    rows = [
        ("group, version", API_VERSION),
        ("kind", names["kind"]),
        ("resource", f"{names['plural']}, {names['singular']}, {', '.join(names['shortNames'])}"),
        ("category", ", ".join(names["categories"])),
        ("scope", crd["scope"]),
    ]
    return _table(("", ""), [(name, f"`{value}`") for name, value in rows])


def _section(section: Section, anchors: dict[str, str]) -> str:
    schema = section.schema
    required = schema.get("required", [])
    rows = [
        (
            f"`{name}`",
            _type(child, anchors.get(_below(section.paths[0], name, child))),
            "**required**" if name in required else _default(child),
            child["description"],
        )
        for name, child in schema["properties"].items()
    ]
    text = f"## {section.title}\n{schema['description']}\n\n"
    text += _table(("field", "type", "default", "what it is"), rows)
    if rules := schema.get("x-kubernetes-validations"):
        text += "\nRules:\n" + "".join(f"- {rule['message']}\n" for rule in rules)
    return text


def _columns(columns: list[Schema]) -> str:
    rows = [
        (
            one["name"],
            "`-o wide`" if one["priority"] else "always",
            f"`{one['jsonPath']}`",
            one["description"],
        )
        for one in columns
    ]
    return "## Columns of `kubectl get dm`\n" + _table(("column", "shown", "from", "what it is"), rows)


def _scale(scale: Schema) -> str:
    rows = [
        ("`spec.replicas`", f"`{scale['specReplicasPath']}`"),
        ("`status.replicas`", f"`{scale['statusReplicasPath']}`"),
        ("`status.selector`", f"`{scale['labelSelectorPath']}`"),
    ]
    text = "What `kubectl scale`, a HorizontalPodAutoscaler and KEDA read and write.\n\n"
    return f"## Scale subresource\n{text}" + _table(("of the Scale", "is"), rows)


# --- cells --------------------------------------------------------------------------------------------


def _below(path: str, name: str, child: Schema) -> str:
    below = name if path == ROOT else f"{path}.{name}"
    return f"{below}[]" if child.get("type") == "array" else below


def _type(schema: Schema, anchor: str | None = None) -> str:
    """The type with its bounds; an object links to its section."""
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    match schema["type"]:
        case "array":
            keys = schema.get("x-kubernetes-list-map-keys")
            merged = f", merged by `{', '.join(keys)}`" if keys else ""
            return f"list of {_type(schema['items'], anchor)}; at most {schema['maxItems']} items{merged}"
        case "object" if "additionalProperties" in schema:
            values = _type(schema["additionalProperties"])
            return f"map of string to {values}; at most {schema['maxProperties']} entries"
        case "object" if schema.get("x-kubernetes-preserve-unknown-fields"):
            return "object of any fields"
        case "object":
            return f"[object](#{anchor})"
        case "string" if schema.get("format") == "date-time":
            return "time"
        case "string":
            return ", ".join(("string", *_string_bounds(schema)))
        case other:
            return ", ".join((other, *_integer_bounds(schema)))


def _string_bounds(schema: Schema) -> Iterator[str]:
    if most := schema.get("maxLength"):
        least = schema.get("minLength")
        yield f"{least}–{most} characters" if least else f"at most {most} characters"
    if pattern := schema.get("pattern"):
        yield _PATTERNS.get(pattern) or f"`{pattern}`".replace("|", "\\|")


def _integer_bounds(schema: Schema) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None:
        yield f"{least}–{most}" if most is not None else f"at least {least}"
    if "multipleOf" in schema:
        yield f"in steps of {schema['multipleOf']}"


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return "–"
    value = schema["default"]
    return "of its fields" if isinstance(value, dict) else f"`{value}`" if value != "" else "empty"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tandem_crds.reference", description="Write docs/crd-reference.md."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page is not what the models say"
    )
    check: bool = parser.parse_args(argv).check
    text = render()
    if not check:
        FILE.write_text(text, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != text:
        print(f"{FILE} is not what the models say; run `python -m tandem_crds.reference`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
