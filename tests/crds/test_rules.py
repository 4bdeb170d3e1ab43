"""Each rule is one piece of data with a CEL form and a Python form; `manifest_examples` holds for both."""

from __future__ import annotations

import re

import manifest_examples
import pytest

from tandem_crds.model import DisaggregatedModel
from tandem_crds.rules import ApiModel, Rule


def models_below(kind: type[ApiModel]) -> set[type[ApiModel]]:
    found = {kind}
    for child in kind.__subclasses__():
        found |= models_below(child)
    return found


ALL_RULES = [rule for kind in models_below(ApiModel) if "rules" in vars(kind) for rule in kind.rules]


def test_there_are_rules() -> None:
    assert issubclass(DisaggregatedModel, ApiModel)
    assert len(ALL_RULES) >= 13


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.cel[:60])
def test_every_rule_has_an_example_that_breaks_it(rule: Rule) -> None:
    pattern = ".+".join(re.escape(part) for part in re.split(r"\{[A-Za-z.]+\}", rule.message))
    assert any(re.fullmatch(pattern, example.says) for example in manifest_examples.RULES)


def test_a_message_with_values_becomes_a_format_expression_with_a_plain_fallback() -> None:
    rule = Rule("self.a <= self.b", lambda self: self.a <= self.b, "a {a} is over b {b}, 100 %", "a")
    assert rule.to_cel() == {
        "rule": "self.a <= self.b",
        "message": "a is over b, 100 %",
        "messageExpression": "'a %s is over b %s, 100 %%'.format([self.a, self.b])",
        "fieldPath": ".a",
    }


def test_messages_can_stand_in_a_cel_string() -> None:
    for rule in ALL_RULES:
        assert "'" not in rule.message
        assert "\\" not in rule.message
