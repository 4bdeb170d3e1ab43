from __future__ import annotations

import math

import pytest
from load.comparison import OURS, Run, claim, show
from load.figures import Spread, gaps, percentile, samples, table


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (1, 0.99, 1),
        (2, 0.5, 1),
        (3, 0.5, 2),
        (100, 0.5, 50),
        (100, 0.99, 99),
        (101, 0.99, 100),
        (100, 1.0, 100),
    ],
)
def test_a_percentile_is_the_smallest_value_that_covers_its_share(
    count: int, share: float, expected: int
) -> None:
    assert percentile([float(value) for value in range(count, 0, -1)], share) == expected


def test_the_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 0.5))


def test_a_gap_belongs_to_the_token_that_ends_it() -> None:
    assert gaps([1.0, 1.5, 3.5]) == [(1.5, 0.5), (3.5, 2.0)]
    assert gaps([1.0]) == gaps([]) == []


def test_a_spread_shows_its_range_only_where_it_can_be_seen() -> None:
    assert Spread.of([0.003, 0.001, 0.002]).show(scale=1e3) == "2 (1-3)"
    assert Spread.of([0.0021, 0.0019]).show(scale=1e3) == "2"
    assert Spread.of([4.04]).show(".1f") == "4.0"


def test_a_table_lines_its_columns_up() -> None:
    assert table(["name", "ms"], [["a", "1"], ["longer", "1000"]]) == (
        "name      ms\n------  ----\na          1\nlonger  1000"
    )


def test_metrics_are_summed_over_their_labels_and_buckets_are_left_out() -> None:
    text = (
        "# HELP forward Forward pass\n"
        'forward_bucket{engine="0",le="0.1"} 7.0\n'
        'forward_sum{engine="0"} 1.5\n'
        'forward_sum{engine="1"} 2.0\n'
        "up 1.0\n"
    )
    assert samples(text) == {"forward_sum": 3.5, "up": 1.0}


def run(name: str, ttft_s: float, p99_s: float) -> Run:
    """Nine of ten gaps are short."""
    itl = [(0.0, 0.01)] * 90 + [(0.0, p99_s)] * 10
    return Run(name, ttft_s=[ttft_s], itl=itl, tokens=100, window_s=10.0, busy={"a": 0.5, "b": 0.25})


NAMES = [OURS, "chunk 64", "chunk 256", "chunk 512"]


def rounds(*ttft_s: float) -> list[dict[str, Run]]:
    p99_s = (0.02, 0.05, 0.1, 0.3)
    return [
        {name: run(name, ttft, p99) for name, ttft, p99 in zip(NAMES, ttft_s, p99_s, strict=True)}
        for _ in range(3)
    ]


def test_mixed_is_judged_by_its_best_chunk_among_those_whose_ttft_is_no_worse() -> None:
    first, second = claim(rounds(1.0, 1.5, 1.0, 0.5), NAMES).splitlines()
    assert "no worse than ours / ours = 5.0  (chunk 256:" in first
    assert "of all / ours = 2.5  (chunk 64:" in second


def test_without_a_chunk_that_is_as_fast_only_the_best_of_all_counts() -> None:
    first, second = claim(rounds(1.0, 1.5, 1.5, 1.5), NAMES).splitlines()
    assert first.endswith("no chunk size has one")
    assert "of all / ours = 2.5" in second


def test_the_ratio_is_taken_within_each_round() -> None:
    done = rounds(1.0, 0.9, 1.5, 1.5)
    done[0][OURS] = run(OURS, 1.0, 0.05)  # a round in which a neighbour hurt ours
    assert "ours / ours = 2.5 (1.0-2.5)" in claim(done, NAMES)


def test_the_table_has_a_row_for_each_configuration_and_a_share_for_each_worker() -> None:
    lines = show(rounds(1.0, 1.5, 1.0, 0.5), NAMES).splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == NAMES
    assert lines[2].split("  ")[-1] == "50% + 25%"
    assert lines[2].split()[1:5] == ["3", "0", "1000", "1000"]
