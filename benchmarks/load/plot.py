"""Draw inter-token latency over time, one row of axes for each configuration, all on one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # the backend must be chosen first

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def plot_itl(
    path: Path,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    arrivals_s: Sequence[float],
    window_s: float,
) -> None:
    """`series` are `(name, [(when, ITL)])`, `arrivals_s` when prompts arrive: seconds in the window."""
    figure, rows = pyplot.subplots(
        len(series), 1, sharex=True, sharey=True, figsize=(9, 1.7 * len(series) + 0.8), layout="constrained"
    )
    for axes, (name, points) in zip(rows, series, strict=True):
        for at_s in arrivals_s:
            axes.axvline(at_s, color="0.88", linewidth=1, zorder=0)
        axes.scatter([at_s for at_s, _ in points], [gap_s * 1e3 for _, gap_s in points], s=3, color="C0")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_ylabel("ITL (ms)", fontsize=8)
        axes.grid(axis="y", color="0.92")
    rows[-1].set_xlim(0, window_s)
    rows[-1].set_xlabel("seconds; grey lines: a prompt arrives")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
