"""The autoscaler's decisions, as a table, and what may never happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_crds.spec import Scaling
from tandem_operator.autoscale import ScalingReason, decide
from tandem_operator.observed import Arrivals
from tandem_operator.settings import ScalingSettings

NOW = 10_000.0
TIMES = ScalingSettings()
LONG = TIMES.down_window_s + 1


def scaling(low: int = 1, high: int = 8, target: str = "2") -> Scaling:
    return Scaling(mode="QPS", target_qps=target, min_replicas=low, max_replicas=high)


def arrivals(rate: float, *, age_s: float = 1.0, routers: int = 1, asked: int = 1) -> Arrivals:
    return Arrivals(rate_per_s=rate, window_s=60, age_s=age_s, routers=routers, routers_asked=asked)


TABLE = [
    # current, rate, replicas, reason
    (1, 5.0, 3, ScalingReason.SCALED_UP),
    (1, 14.0, 5, ScalingReason.SCALED_UP),  # at most 4 more than 1
    (5, 16.0, 8, ScalingReason.SCALED_UP),
    (5, 100.0, 8, ScalingReason.AT_MAXIMUM),
    (8, 100.0, None, ScalingReason.AT_MAXIMUM),
    (3, 6.5, None, ScalingReason.WITHIN_TOLERANCE),  # 8 % above
    (3, 5.5, None, ScalingReason.WITHIN_TOLERANCE),
    (3, 6.7, 4, ScalingReason.SCALED_UP),
    (4, 2.0, 1, ScalingReason.SCALED_DOWN),
    (4, 0.0, 1, ScalingReason.NO_TRAFFIC),
    (1, 0.0, None, ScalingReason.NO_TRAFFIC),
    (0, 9.0, None, ScalingReason.PARKED),
    (9, 18.0, 8, ScalingReason.AT_MAXIMUM),  # maxReplicas was lowered
]


@pytest.mark.parametrize(("current", "rate", "replicas", "reason"), TABLE)
def test_decisions(current: int, rate: float, replicas: int | None, reason: ScalingReason) -> None:
    decision = decide(scaling(), current, arrivals(rate), (), LONG, NOW, TIMES, unschedulable=False)
    assert (decision.replicas, decision.reason) == (replicas, reason)


def test_no_router_is_not_zero_traffic() -> None:
    for silent in (None, arrivals(0.0, asked=0)):
        decision = decide(scaling(), 4, silent, (), LONG, NOW, TIMES, unschedulable=False)
        assert (decision.replicas, decision.reason, decision.active) == (None, "NoMetrics", None)


def test_old_arrivals_hold() -> None:
    decision = decide(
        scaling(), 4, arrivals(0.0, age_s=TIMES.stale_s + 1), (), LONG, NOW, TIMES, unschedulable=False
    )
    assert (decision.replicas, decision.reason, decision.active) == (None, "StaleMetrics", None)


def test_a_router_that_did_not_answer_forbids_scaling_down_but_not_up() -> None:
    down = decide(scaling(), 4, arrivals(1.0, routers=2), (), LONG, NOW, TIMES, unschedulable=False)
    assert (down.replicas, down.reason) == (None, "IncompleteMetrics")
    up = decide(scaling(), 2, arrivals(9.0, routers=2), (), LONG, NOW, TIMES, unschedulable=False)
    assert up.replicas == 5


def test_a_scale_down_goes_to_the_highest_recommendation_of_the_window() -> None:
    past = ((NOW - TIMES.down_window_s - 1, 7), (NOW - 200, 3), (NOW - 15, 2))
    decision = decide(scaling(), 6, arrivals(1.0), past, LONG, NOW, TIMES, unschedulable=False)
    assert decision.replicas == 3
    held = decide(scaling(), 6, arrivals(1.0), ((NOW - 200, 6),), LONG, NOW, TIMES, unschedulable=False)
    assert (held.replicas, held.reason) == (None, "Stabilizing")


def test_a_new_process_waits_a_window_before_it_scales_down() -> None:
    decision = decide(
        scaling(), 6, arrivals(0.0), (), TIMES.down_window_s - 1, NOW, TIMES, unschedulable=False
    )
    assert (decision.replicas, decision.reason) == (None, "Stabilizing")


def test_pods_that_cannot_be_scheduled_stop_growth_but_not_a_scale_down() -> None:
    up = decide(scaling(), 2, arrivals(9.0), (), LONG, NOW, TIMES, unschedulable=True)
    assert (up.replicas, up.reason) == (None, "Unschedulable")
    down = decide(scaling(), 4, arrivals(1.0), (), LONG, NOW, TIMES, unschedulable=True)
    assert down.replicas == 1


def test_the_target_is_exact() -> None:
    decision = decide(scaling(target="100m"), 1, arrivals(0.3), (), LONG, NOW, TIMES, unschedulable=False)
    assert decision.replicas == 3


replicas = st.integers(1, 20)
rates = st.floats(0, 1000, allow_nan=False)


@given(current=replicas, rate=rates, low=st.integers(1, 5), spread=st.integers(0, 10), stuck=st.booleans())
def test_what_is_written_is_always_within_the_bounds_and_a_change(
    current: int, rate: float, low: int, spread: int, stuck: bool
) -> None:
    decision = decide(
        scaling(low, low + spread), current, arrivals(rate), (), LONG, NOW, TIMES, unschedulable=stuck
    )
    if decision.replicas is not None:
        assert low <= decision.replicas <= low + spread
        assert decision.replicas != current
    if decision.recommendation is not None:
        assert low <= decision.recommendation <= low + spread


@given(current=replicas, rate=rates, more=st.floats(0, 100, allow_nan=False))
def test_more_arrivals_never_ask_for_fewer_pods(current: int, rate: float, more: float) -> None:
    one, other = (
        decide(scaling(1, 20), current, arrivals(each), (), LONG, NOW, TIMES, unschedulable=False).replicas
        or current
        for each in (rate, rate + more)
    )
    assert one <= other


def test_within_a_period_of_a_step_up_there_is_no_other():
    """Every pod that appears is a pass, and so is the autoscaler's own write."""
    held = decide(
        scaling(), 4, arrivals(99.0), (), LONG, NOW, TIMES, unschedulable=False, grown_s=TIMES.period_s - 1
    )
    assert (held.replicas, held.reason) == (None, ScalingReason.SCALED_UP)
    later = decide(
        scaling(), 4, arrivals(99.0), (), LONG, NOW, TIMES, unschedulable=False, grown_s=TIMES.period_s
    )
    assert later.replicas == 8
