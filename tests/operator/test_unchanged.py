from __future__ import annotations

from typing import Any

import pytest

from tandem_operator.unchanged import ANNOTATION_APPLIED, contains, stamped

BODY = {"kind": "Service", "metadata": {"name": "s", "annotations": {"theirs": "kept"}}, "spec": {"a": 1}}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ({"a": 1, "defaulted": True}, {"a": 1}),
        ({}, {"env": [], "annotations": {}}),
        ([{"name": "b", "x": 1}, {"name": "a"}, {"name": "theirs"}], [{"name": "a"}, {"name": "b"}]),
        ({"cpu": "1"}, {"cpu": "1000m"}),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}),
        ({"port": "8000"}, {"port": 8000}),
        ([{"to": 1, "more": 2}], [{"to": 1}]),
    ],
)
def test_more_than_wanted_is_as_wanted(found: Any, wanted: Any) -> None:
    assert contains(found, wanted)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ({"a": 1}, {"a": 2}),
        ({}, {"a": 1}),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 0}}),
        ([{"name": "a"}], [{"name": "a"}, {"name": "b"}]),
        ([{"to": 1}, {"to": 2}], [{"to": 1}]),
        (["a", "b"], ["b", "a"]),
        ({"cpu": "1"}, {"cpu": "1001m"}),
        ({"on": 1}, {"on": True}),
        ({"on": "true"}, {"on": True}),
        (None, {"a": 1}),
    ],
)
def test_anything_less_or_other_is_not(found: Any, wanted: Any) -> None:
    assert not contains(found, wanted)


def test_a_field_that_is_no_longer_sent_shows_in_the_stamp() -> None:
    """Otherwise the object, which still has it, would contain the smaller body."""
    before, after = stamped(BODY | {"spec": {"a": 1, "b": 2}}), stamped(BODY)
    assert contains(before, BODY)
    assert not contains(before, after)


def test_a_stamp_keeps_other_annotations_and_the_body() -> None:
    one = stamped(BODY)
    assert one["metadata"]["annotations"]["theirs"] == "kept"
    assert ANNOTATION_APPLIED not in BODY["metadata"]["annotations"]
    assert stamped(BODY) == one
