"""Several rounds of several configurations: the table, and what of it the article claims. Pure.

Knows: what a run measured. Does not know: how.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .figures import Spread, percentile, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OURS = "disaggregated"


@dataclass(slots=True)
class Run:
    """One configuration under one round's arrivals. Times in seconds; `itl` since the window opened."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    itl: list[tuple[float, float]] = field(default_factory=list)
    unanswered: int = (
        0  # prompts without a first token when the window closed: a backlog, if it grows with it
    )
    tokens: int = 0  # of all answers, within the window
    window_s: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)  # by worker: share of the window in forward passes
    cpu_s: dict[str, float] = field(default_factory=dict)  # by process, within the window
    neighbours: float = 0.0  # cores that were busy with something else, in the mean

    @property
    def ttft_p50_s(self) -> float:
        return percentile(self.ttft_s, 0.5)

    @property
    def itl_p99_s(self) -> float:
        return percentile([gap_s for _, gap_s in self.itl], 0.99)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.window_s


def show(rounds: Sequence[Mapping[str, Run]], names: Sequence[str]) -> str:
    latencies = ("TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "ITL max ms")
    header = ("configuration", "prompts", "unanswered", *latencies, "tok/s", "busy")
    rows = []
    for name in names:
        runs = [done[name] for done in rounds]
        itl = [[gap_s for _, gap_s in run.itl] for run in runs]
        busy = " + ".join(f"{Spread.of([run.busy[w] for run in runs]).median:.0%}" for w in runs[0].busy)
        rows.append(
            (
                name,
                str(sum(len(run.ttft_s) for run in runs)),
                str(sum(run.unanswered for run in runs)),
                Spread.of([run.ttft_p50_s for run in runs]).show(scale=1e3),
                Spread.of([percentile(run.ttft_s, 0.99) for run in runs]).show(scale=1e3),
                Spread.of([percentile(gaps_s, 0.5) for gaps_s in itl]).show(scale=1e3),
                Spread.of([run.itl_p99_s for run in runs]).show(scale=1e3),
                Spread.of([max(gaps_s) for gaps_s in itl]).show(scale=1e3),
                Spread.of([run.tokens_per_s for run in runs]).show(),
                busy,
            )
        )
    return table(header, rows)


def claim(rounds: Sequence[Mapping[str, Run]], names: Sequence[str]) -> str:
    """Mixed's best ITL p99 over ours: of the chunks whose median TTFT is no worse than ours, and of all."""
    mixed = [name for name in names if name != OURS]
    ttft_s = {name: Spread.of([done[name].ttft_p50_s for done in rounds]).median for name in names}
    p99_s = {name: Spread.of([done[name].itl_p99_s for done in rounds]).median for name in names}
    as_fast = [name for name in mixed if ttft_s[name] <= ttft_s[OURS]]
    lines = []
    for among, which in (("with a median TTFT no worse than ours", as_fast), ("of all", mixed)):
        if not which:
            lines.append(f"mixed's best p99 {among}: no chunk size has one")
            continue
        best = min(which, key=lambda name: p99_s[name])
        ratio = Spread.of([done[best].itl_p99_s / done[OURS].itl_p99_s for done in rounds])
        lines.append(
            f"mixed's best p99 {among} / ours = {ratio.show('.1f')}  ({best}: ITL p99 "
            f"{p99_s[best] * 1e3:.0f} ms, TTFT p50 {ttft_s[best] * 1e3:.0f} ms; ours: "
            f"{p99_s[OURS] * 1e3:.0f} ms, {ttft_s[OURS] * 1e3:.0f} ms)"
        )
    return "\n".join(lines)
