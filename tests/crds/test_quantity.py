from __future__ import annotations

from fractions import Fraction

import pytest

from tandem_crds import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (3, Fraction(3)),
        ("3", Fraction(3)),
        ("500m", Fraction(1, 2)),
        ("1.5", Fraction(3, 2)),
        ("2k", Fraction(2000)),
        ("1Ki", Fraction(1024)),
        ("16Gi", Fraction(16 * 2**30)),
        ("0.1Gi", Fraction(2**30, 10)),
        ("1P", Fraction(10**15)),
    ],
)
def test_a_quantity_has_an_exact_value(text: int | str, value: Fraction) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "-1", "1e3", ".5", "5.", "1.2.3", "\u0661", "1\n"])
def test_what_is_not_a_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse(text)


def test_bytes_are_rounded_down() -> None:
    assert quantity.nbytes("0.1Ki") == 102
