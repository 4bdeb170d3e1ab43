"""A manifest is taken or refused with a line that names the field, its value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import manifest_examples
import pytest
import yaml
from manifest_examples import Example, manifest

from tandem_crds.model import DisaggregatedModel, ManifestError, load_manifest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def load(document: object) -> DisaggregatedModel:
    return load_manifest(yaml.safe_dump(document), "model.yaml")


def refusal(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        load_manifest(text, "model.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid_and_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 40
    assert load_manifest(text, path.name).metadata.name


@pytest.mark.parametrize("example", manifest_examples.RULES, ids=str)
def test_a_broken_rule_names_its_field_and_says_why(example: Example) -> None:
    expected = f"model.yaml: {example.field}: {example.says}"
    assert refusal(yaml.safe_dump(manifest(example.changes))) == expected


@pytest.mark.parametrize("example", manifest_examples.TYPES + manifest_examples.OURS, ids=str)
def test_a_wrong_value_is_shown_with_what_is_allowed(example: Example) -> None:
    message = refusal(yaml.safe_dump(manifest(example.changes)))
    assert message.startswith(f"model.yaml: {example.field} ")
    assert example.says in message


def test_defaults_are_filled_in() -> None:
    spec = load(manifest_examples.VALID).spec
    assert (spec.engine.page_size, spec.decode.replicas, spec.drain_seconds) == (16, 1, 600)
    assert (spec.rollout.max_surge, spec.rollout.max_unavailable) == (0, 1)


def test_a_misspelt_field_is_named_before_what_it_leaves_missing() -> None:
    error = refusal(yaml.safe_dump(manifest({"spec.model": None, "spec.modle": {"uri": "pvc://a/b"}})))
    assert error == "model.yaml: spec.modle is not a field; did you mean model? (and 1 more)"


def test_every_problem_is_kept_though_the_line_shows_the_first() -> None:
    changes = {"spec.decode.replicas": "2", "spec.engine.pageSize": 17}
    with pytest.raises(ManifestError) as caught:
        load(manifest(changes))
    assert len(caught.value.problems) == 2


def test_a_value_with_line_breaks_is_refused_in_one_line() -> None:
    error = refusal(yaml.safe_dump(manifest({"spec.model.uri": "pvc://a/b\n"})))
    assert error.startswith("model.yaml: spec.model.uri: uri pvc://a/b must be hf://ORG/NAME")


def test_null_means_unset() -> None:
    text = yaml.safe_dump(manifest({})) + "status: null\n"
    document = yaml.safe_load(text)
    document["spec"]["decode"] = {"replicas": None, "tolerations": None}
    assert load(document).spec.decode.replicas == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spec: [", "line 1, column 8: "),
        ("a: 1\nb:\n\t- c", "line 3, column 1: "),
        ("a: 1\na: 2\n", "line 2, column 1: a is written twice"),
        ("", "0 documents; exactly one DisaggregatedModel is expected"),
        ("a: 1\n---\nb: 2\n", "2 documents; exactly one DisaggregatedModel is expected"),
        ("- a\n- b\n", "['a', 'b'] is not an object; a DisaggregatedModel is expected"),
        ("just text", "'just text' is not an object; a DisaggregatedModel is expected"),
        ("a: \x07", "not YAML"),
    ],
)
def test_text_that_is_not_one_object_is_refused(text: str, says: str) -> None:
    assert says in refusal(text)


def test_unknown_fields_are_dropped_when_an_object_is_read_back_from_a_server() -> None:
    document = manifest({"spec.fabric.futureField": 1})
    assert DisaggregatedModel.model_validate(document).spec.fabric.profile == "tcp"


def test_a_model_is_written_with_the_names_of_the_api() -> None:
    model = load(manifest({"spec.scaling": {"targetQPS": "500m"}}))
    document = model.model_dump(exclude_unset=True)
    assert document["spec"]["scaling"] == {"targetQPS": "500m"}
    assert load(document) == model
