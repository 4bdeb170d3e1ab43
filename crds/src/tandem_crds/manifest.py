"""One object from YAML text, or an error that a person can act on: path, value, what is allowed.

Stricter than an API server in three ways, each a mistake that one would otherwise hunt for: unknown fields
(servers prune them), keys written twice (YAML keeps the last), several documents (one command serves one
model). Null means unset, as on a server.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from .rules import ApiModel

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_T = TypeVar("_T", bound=ApiModel)


class ManifestError(Exception):
    """The manifest is wrong. The text is one line about the first problem; `problems` has a line for each."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems = [" ".join(problem.split()) for problem in problems]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{source}: {problems[0]}{more}")


class _DuplicateKey(yaml.MarkedYAMLError):
    pass


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise _DuplicateKey(problem=f"{key} is written twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse(text: str, source: str, kind: type[_T]) -> _T:
    """The one object of `kind` in `text`. Raises ManifestError."""
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ManifestError(source, [f"{where}{error.problem or 'not YAML'}"]) from error
    except yaml.YAMLError as error:
        raise ManifestError(source, [f"not YAML: {' '.join(str(error).split())}"]) from error
    if len(documents) != 1:
        raise ManifestError(source, [f"{len(documents)} documents; exactly one {kind.__name__} is expected"])
    document = _without_nulls(documents[0])
    if not isinstance(document, dict):
        raise ManifestError(source, [f"{_show(document)} is not an object; a {kind.__name__} is expected"])
    try:
        return kind.model_validate(document, strict=True, extra="forbid", by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(source, problems(kind, error)) from error


def problems(kind: type[ApiModel], error: ValidationError) -> list[str]:
    """A line for each thing that is wrong with an object of `kind`: path, value, what is allowed."""
    return [_problem(kind, details) for details in _by_weight(error)]


def _by_weight(error: ValidationError) -> list[ErrorDetails]:
    """What explains the rest comes first: the wrong kind of object, then misspelt fields."""
    details = error.errors(include_url=False)
    wrong_kind = [one for one in details if one["type"] == "literal_error" and len(one["loc"]) == 1]
    return wrong_kind or sorted(details, key=lambda one: one["type"] != "extra_forbidden")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_nulls(child) for child in value]
    return value


def _problem(kind: type[ApiModel], details: ErrorDetails) -> str:
    """One line: path, value, what is allowed."""
    model, path = _locate(kind, details["loc"])
    context = details.get("ctx", {})
    value = _show(details["input"])
    match details["type"]:
        case "rule":
            field = f"{path}.{context['field']}" if context["field"] else path
            return f"{field.lstrip('.')}: {context['message']}"
        case "missing":
            return f"{path} is missing"
        case "extra_forbidden":
            known = [field.alias or name for name, field in model.model_fields.items()]
            name = str(details["loc"][-1])
            close = difflib.get_close_matches(name.lower(), [one.lower() for one in known], 1)
            meant = next((one for one in known if close and one.lower() == close[0]), None)
            hint = f"did you mean {meant}?" if meant else f"known: {', '.join(known)}"
            return f"{path} is not a field; {hint}"
        case "literal_error":
            choices = context["expected"].replace("'", "").replace(" or ", ", ")
            allowed = f"one of {choices}" if "," in choices else choices
        case "string_pattern_mismatch":
            allowed = f"text that matches {context['pattern']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            allowed = "an object"
        case "list_type":
            allowed = "a list"
        case "int_type" | "int_from_float":
            allowed = "a whole number"
        case "string_type":
            allowed = 'text (in quotes: "...")'
        case "value_error":
            allowed = str(context["error"]).removeprefix("must be ")
        case _:  # bounds, which pydantic words well: "Input should be less than or equal to 64"
            allowed = details["msg"].removeprefix("Input should be ").removeprefix("Value should have ")
            allowed = allowed.replace("String should have", "text of").replace(
                "items after validation", "items"
            )
    return f"{path} is {value}; it must be {allowed}"


def _locate(kind: type[ApiModel], loc: tuple[int | str, ...]) -> tuple[type[ApiModel], str]:
    """The innermost model on the way to `loc`, and the path as a user writes it.

    They differ where pydantic adds the name of a union's member.
    """
    model, path = kind, ""
    here: Any = kind
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        nested = next((one for one in _models(here)), None)
        if nested is None and part in ("int", "str", "[key]"):
            continue
        path += f".{part}" if path else part
        if nested is None:
            here = None
            continue
        model = nested
        field = next((f for name, f in nested.model_fields.items() if (f.alias or name) == part), None)
        here = field.annotation if field is not None else None
    return model, path


def _models(annotation: Any) -> list[type[ApiModel]]:
    """The models in an annotation such as `list[Toleration]` or `Cache | None`."""
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
