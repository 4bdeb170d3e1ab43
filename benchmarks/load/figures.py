"""Figures from samples, and tables of them. Pure.

Knows: numbers. Does not know: where they come from.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all values do not exceed. NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several rounds."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))

    def show(self, form: str = ".0f", scale: float = 1.0) -> str:
        """`median (least-most)`, and the median alone where the rounds agree."""
        least, median, most = (format(value * scale, form) for value in (self.least, self.median, self.most))
        return median if least == most else f"{median} ({least}-{most})"


def gaps(times: Sequence[float]) -> list[tuple[float, float]]:
    """`(when a token came, seconds since the one before it)`, from the second token on."""
    return [(after, after - before) for before, after in itertools.pairwise(times)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, all others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def samples(exposition: str) -> dict[str, float]:
    """Prometheus' text format to a sum per metric name, over all labels but `le`."""
    sums: dict[str, float] = {}
    for line in exposition.splitlines():
        if not line or line.startswith("#") or 'le="' in line:
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums
