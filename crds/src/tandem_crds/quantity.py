"""Kubernetes quantities ("16Gi", "500m", 2) as exact numbers.

Floats are refused everywhere in the API: 0.1 has no exact binary form and servers print it differently.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
MAX_LENGTH = 24

_SUFFIX = {"": Fraction(1), "m": Fraction(1, 1000)}
_SUFFIX |= {suffix: Fraction(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P"), 1)}
_SUFFIX |= {suffix: Fraction(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)}
_parts = re.compile(r"([0-9.]+)([A-Za-z]*)").fullmatch


def parse(quantity: int | str) -> Fraction:
    """The exact value. Raises ValueError on anything that `PATTERN` does not match."""
    if isinstance(quantity, int):
        return Fraction(quantity)
    if not re.fullmatch(PATTERN, quantity) or (parts := _parts(quantity)) is None:
        raise ValueError(f"{quantity!r} is not a quantity")
    return Fraction(parts[1]) * _SUFFIX[parts[2]]


def nbytes(quantity: int | str) -> int:
    """Whole bytes, rounded down."""
    return int(parse(quantity))


def _check(value: object) -> int | str:
    if isinstance(value, int | str) and not isinstance(value, bool):
        text = str(value)
        if len(text) <= MAX_LENGTH and re.fullmatch(PATTERN, text):
            return value
    raise ValueError('must be a quantity: a whole number, or text such as "500m", "1.5" or "16Gi"')


# Beside int-or-string, a pattern speaks of the string form only.
Quantity = Annotated[
    int | str,
    PlainValidator(_check),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": PATTERN,
            "maxLength": MAX_LENGTH,
        }
    ),
]
