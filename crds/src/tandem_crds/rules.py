"""A validation rule, written once: as CEL for the API server and as Python for `tandem up`, with one message.

Knows: how rules hang on a model and how messages are filled in. Does not know: which rules there are.

The API server skips rules once a type or an enum is wrong, and so do we: pydantic runs them after the fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Callable

_placeholder = re.compile(r"\{([A-Za-z.]+)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """`holds(self)` is what `cel` says, for the pydantic model the rule hangs on.

    `message` may name fields as `{minReplicas}`; each must be set whenever the rule can be broken.
    `field` is the one that a user should look at, relative to the model.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    field: str = ""

    def message_for(self, model: BaseModel) -> str:
        return _placeholder.sub(lambda match: str(_value(model, match[1])), self.message)

    def to_cel(self) -> dict[str, str]:
        """One entry of `x-kubernetes-validations`."""
        rule = {"rule": self.cel, "message": re.sub(r" \{[A-Za-z.]+\}", "", self.message)}
        if fields := _placeholder.findall(self.message):
            # `format`, because string(int) with + exceeds the API server's cost budget a hundredfold.
            text = _placeholder.sub("%s", self.message.replace("%", "%%"))
            rule["messageExpression"] = f"'{text}'.format([{', '.join(f'self.{field}' for field in fields)}])"
        if self.field:
            rule["fieldPath"] = f".{self.field}"
        return rule


def _value(model: BaseModel, path: str) -> object:
    value: Any = model
    for alias in path.split("."):
        name = next(
            name for name, field in type(value).model_fields.items() if (field.alias or name) == alias
        )
        value = getattr(value, name)
    return value


class ApiModel(BaseModel):
    """A node of the API. Unknown fields are dropped, as servers prune them; `load_manifest` refuses them."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="ignore",
        frozen=True,
        serialize_by_alias=True,
        validate_by_alias=True,
        validate_by_name=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if not rule.holds(self):
                raise PydanticCustomError(
                    "rule", "{message}", {"message": rule.message_for(self), "field": rule.field}
                )
        return self
