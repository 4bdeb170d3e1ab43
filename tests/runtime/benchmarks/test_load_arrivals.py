from __future__ import annotations

import dataclasses
import itertools
import statistics

import pytest
from load.arrivals import Load, arriving, steady

LOAD = Load(
    window_s=2000.0,
    rate_per_s=0.5,
    prompt_tokens=24,
    output_tokens=8,
    steady=4,
    steady_prompt_tokens=16,
    steady_output_tokens=1000,
    vocab_size=32_000,
)


def test_the_same_seed_asks_the_same_at_the_same_times() -> None:
    assert arriving(LOAD, 3) == arriving(LOAD, 3)
    assert steady(LOAD, 3) == steady(LOAD, 3)


def test_another_seed_asks_something_else() -> None:
    assert arriving(LOAD, 3) != arriving(LOAD, 4)
    assert steady(LOAD, 3) != steady(LOAD, 4)


def test_prompts_arrive_in_order_within_the_window_as_a_poisson_process() -> None:
    times = [arrival.at_s for arrival in arriving(LOAD, 0)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < LOAD.window_s
    between = [after - before for before, after in itertools.pairwise(times)]
    # 1,000 expected, standard deviation 32; an exponential distribution's deviation equals its mean.
    assert len(times) == pytest.approx(1000, abs=130)
    assert statistics.mean(between) == pytest.approx(2.0, rel=0.13)
    assert statistics.stdev(between) == pytest.approx(statistics.mean(between), rel=0.15)


def test_steady_requests_are_there_from_the_start() -> None:
    requests = steady(LOAD, 0)
    assert [request.at_s for request in requests] == [0.0] * 4
    assert {len(request.prompt) for request in requests} == {16}
    assert {request.max_tokens for request in requests} == {1000}


def test_a_prefix_cache_finds_no_page_of_any_prompt() -> None:
    prompts = [arrival.prompt for arrival in (*steady(LOAD, 0), *arriving(LOAD, 0), *steady(LOAD, -1))]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_prompts_are_ordinary_tokens_of_the_vocabulary() -> None:
    small = dataclasses.replace(LOAD, vocab_size=5)
    assert {token for arrival in arriving(small, 0) for token in arrival.prompt} == {1, 2, 3, 4}
    assert {len(arrival.prompt) for arrival in arriving(small, 0)} == {24}


def test_the_offered_load_is_rate_times_length() -> None:
    assert LOAD.offered_tokens_per_s == 12.0
