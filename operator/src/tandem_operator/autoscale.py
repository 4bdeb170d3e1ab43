"""Decode replicas from arrivals: what a HorizontalPodAutoscaler would decide, with its reasons told apart.

Knows: the rate, the bounds, what was recommended lately. Does not know: how the rate was measured.

    raw      = ceil(rate / targetQPS)
    within   |rate / (current * targetQPS) - 1| <= 10 %: nothing moves
    up       at most max(2 * current, current + 4) in one decision; decisions are a period apart
    down     to the highest recommendation of the window, once this process has watched that long
    always   minReplicas <= replicas <= maxReplicas

Silence never scales: missing and stale rates hold, a rate of zero is a measurement. A model parked at 0 stays
parked until somebody sets decode.replicas. While pods cannot be scheduled, nothing grows further.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from tandem_crds import quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tandem_crds.spec import Scaling

    from .observed import Arrivals
    from .settings import ScalingSettings

TOLERANCE = Fraction(1, 10)
UP_PODS = 4


class ScalingReason(enum.StrEnum):
    PARKED = "Parked"
    NO_METRICS = "NoMetrics"
    STALE_METRICS = "StaleMetrics"
    INCOMPLETE_METRICS = "IncompleteMetrics"
    WITHIN_TOLERANCE = "WithinTolerance"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    NO_TRAFFIC = "NoTraffic"
    AT_MINIMUM = "AtMinimum"
    AT_MAXIMUM = "AtMaximum"
    STABILIZING = "Stabilizing"
    UNSCHEDULABLE = "Unschedulable"


@dataclass(frozen=True, slots=True)
class Decision:
    """`replicas` None: nothing to write. `active` is ScalingActive; None is Unknown."""

    replicas: int | None
    reason: str
    message: str
    recommendation: int | None
    active: bool | None


def decide(
    scaling: Scaling,
    current: int,
    arrivals: Arrivals | None,
    recommendations: Sequence[tuple[float, int]],
    watched_s: float,
    now: float,
    times: ScalingSettings,
    *,
    unschedulable: bool,
    grown_s: float = math.inf,
) -> Decision:
    """`recommendations` are earlier answers' with their times, oldest first; `grown_s` is how long ago the
    last step up was: within a period of it there is no other, however often this is asked.
    """
    assert scaling.target_qps is not None, "the schema asks for it with mode QPS"
    assert scaling.max_replicas is not None, "the schema asks for it with mode QPS"
    if current == 0:
        return _hold(ScalingReason.PARKED, "decode.replicas is 0; set it to 1 or more to resume", False)
    if arrivals is None or arrivals.routers_asked == 0:
        return _hold(ScalingReason.NO_METRICS, "no router has told its arrivals yet", None)
    if arrivals.age_s > times.stale_s:
        return _hold(
            ScalingReason.STALE_METRICS, f"the last arrivals are {arrivals.age_s:.0f} s old; holding", None
        )
    low, high = scaling.min_replicas, scaling.max_replicas
    target = Fraction(quantity.parse(scaling.target_qps))
    rate = Fraction(arrivals.rate_per_s)
    raw = math.ceil(rate / target)
    what = f"{arrivals.rate_per_s:.3g} requests/s at {scaling.target_qps} per pod"
    if abs(rate / (current * target) - 1) <= TOLERANCE:
        raw = current
    recommendation = min(max(raw, low), high)
    if recommendation < current and arrivals.routers_asked < arrivals.routers:
        missing = f"{arrivals.routers_asked} of {arrivals.routers} routers answered"
        return Decision(None, ScalingReason.INCOMPLETE_METRICS, f"{missing}; not scaling down", None, True)
    if recommendation > current:
        return _up(current, recommendation, raw, high, what, unschedulable, grown_s < times.period_s)
    window = [count for time, count in recommendations if now - time <= times.down_window_s]
    stable = min(max([recommendation, *window]), high)
    if current > high:
        return Decision(high, ScalingReason.AT_MAXIMUM, f"maxReplicas is {high}", recommendation, True)
    if recommendation == current:
        return Decision(None, *_settled(raw, rate, low, high, current, what), recommendation, True)
    if watched_s < times.down_window_s or stable >= current:
        left = f"{what} asks for {recommendation}; waiting out {times.down_window_s:.0f} s of lower load"
        return Decision(None, ScalingReason.STABILIZING, left, recommendation, True)
    reason = ScalingReason.SCALED_DOWN if rate else ScalingReason.NO_TRAFFIC
    return Decision(max(stable, low), reason, what, recommendation, True)


def _up(
    current: int, recommendation: int, raw: int, high: int, what: str, unschedulable: bool, just_grown: bool
) -> Decision:
    if unschedulable:
        held = f"{what} asks for {recommendation}, but pods cannot be scheduled; holding at {current}"
        return Decision(None, ScalingReason.UNSCHEDULABLE, held, recommendation, True)
    if just_grown:
        return Decision(None, ScalingReason.SCALED_UP, what, recommendation, True)
    replicas = min(recommendation, max(2 * current, current + UP_PODS))
    reason = ScalingReason.AT_MAXIMUM if raw > high and replicas == high else ScalingReason.SCALED_UP
    return Decision(replicas, reason, what, recommendation, True)


def _settled(raw: int, rate: Fraction, low: int, high: int, current: int, what: str) -> tuple[str, str]:
    if raw > high:
        return ScalingReason.AT_MAXIMUM, f"{what} asks for {raw}; maxReplicas is {high}"
    if not rate and current == low:
        return ScalingReason.NO_TRAFFIC, f"no requests; minReplicas is {low}"
    if raw < low:
        return ScalingReason.AT_MINIMUM, f"{what} asks for {raw}; minReplicas is {low}"
    return ScalingReason.WITHIN_TOLERANCE, what


def _hold(reason: ScalingReason, message: str, active: bool | None) -> Decision:
    return Decision(None, reason, message, None, active)
