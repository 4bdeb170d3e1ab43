"""The reference page is what the CRD says: all of it, and nothing else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tandem_crds import reference
from tandem_crds.generate import custom_resource_definition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = reference.FILE.read_text(encoding="utf-8")
(VERSION,) = custom_resource_definition()["spec"]["versions"]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path of the object, name and schema of each of its fields."""
    for name, child in schema["properties"].items():
        yield path or reference.ROOT, name, child
        below, child = f"{path}.{name}" if path else name, child
        if child.get("type") == "array":
            below, child = f"{below}[]", child["items"]
        if "properties" in child:
            yield from fields(child, below)


FIELDS = list(fields(ROOT))


def page_sections() -> dict[str, str]:
    """Dotted path of an object -> the text of its section."""
    _, *parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    found = {}
    for part in parts:
        title, _, text = part.partition("\n")
        found |= dict.fromkeys(title.split(", "), text)
    return found


SECTIONS = page_sections()


def row(path: str, name: str) -> list[str]:
    (line,) = [one for one in SECTIONS[path].splitlines() if one.startswith(f"| `{name}` |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_committed_page_is_what_the_models_say() -> None:
    assert reference.main(["--check"]) == 0


def test_check_fails_when_the_page_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(reference, "FILE", page)
    assert reference.main(["--check"]) == 1
    assert "python -m tandem_crds.reference" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    page.write_text("older")
    assert reference.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("path", "name", "schema"), FIELDS, ids=[f"{path}.{name}" for path, name, _ in FIELDS]
)
def test_a_field_has_a_row_with_type_default_and_description(
    path: str, name: str, schema: dict[str, Any]
) -> None:
    _, kind, default, description = row(path, name)
    assert kind
    assert len(description) > 5
    assert description.endswith((".", ")"))
    if isinstance(schema.get("default"), str | int) and schema["default"] != "":
        assert default == f"`{schema['default']}`"
    for value in schema.get("enum", []):
        assert f"`{value}`" in kind
    for bound in ("minimum", "maximum", "maxItems", "maxProperties"):
        if bound in schema and "enum" not in schema:
            assert str(schema[bound]) in kind


def test_required_fields_are_marked() -> None:
    assert row("spec", "model")[2] == "**required**"
    assert row("spec.model", "uri")[2] == "**required**"
    assert row("spec.decode", "replicas")[2] == "`1`"
    assert row("spec.prefill", "replicas")[2] == "–"


def test_no_section_is_of_an_object_that_the_schema_does_not_have() -> None:
    assert SECTIONS.keys() - {path for path, _, _ in FIELDS} == {
        "Columns of `kubectl get dm`",
        "Scale subresource",
    }


def test_every_rule_is_told_in_the_section_of_its_object() -> None:
    def rules(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, str]]]:
        for rule in schema.get("x-kubernetes-validations", []):
            yield path, rule
        for name, child in schema.get("properties", {}).items():
            yield from rules(child, f"{path}.{name}" if path else name)

    found = list(rules(ROOT, ""))
    assert len(found) > 10
    for path, rule in found:
        assert f"- {rule['message']}\n" in SECTIONS[path]


def test_every_column_is_listed() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        assert f"| {column['name']} |" in SECTIONS["Columns of `kubectl get dm`"]


def test_patterns_are_told_in_words() -> None:
    assert (
        row("metadata", "name")[1] == "string, at most 40 characters, a DNS label that begins with a letter"
    )
    assert "^" not in PAGE


def test_links_to_sections_lead_to_one() -> None:
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    assert len(anchors) == len(headings)
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors


def test_tables_have_as_many_cells_as_their_heads() -> None:
    for table in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
