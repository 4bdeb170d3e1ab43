"""Requests per second from counters that only grow, read now and then from several routers.

Knows: counters, restarts, windows. Does not know: HTTP, pods.

A router's rate is its counter's growth over the window, between its first and last sample there. A router
with one sample has not answered yet: a counter says nothing about when it grew. A counter that went
backwards belongs to a restarted router: its samples before that are forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .observed import Arrivals

if TYPE_CHECKING:
    from collections.abc import Collection

WINDOW_S = 30.0


class ArrivalSamples:
    """Of one model's routers, by pod UID; times are Unix seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: dict[str, list[tuple[float, float]]] = {}

    def add(self, router: str, at_s: float, count: float) -> None:
        own = self._samples.setdefault(router, [])
        if own and count < own[-1][1]:
            own.clear()
        own.append((at_s, count))
        # One sample from before the window stays, so that the window is always covered whole.
        while len(own) > 2 and own[1][0] <= at_s - self._window_s:
            own.pop(0)

    def arrivals(self, routers: Collection[str], now: float) -> Arrivals | None:
        """Of the routers that exist now; None before any was sampled twice."""
        for gone in self._samples.keys() - set(routers):
            del self._samples[gone]
        rates, spans, lasts = [], [], []
        for own in self._samples.values():
            (first_s, first), (last_s, last) = own[0], own[-1]
            if last_s > first_s:
                rates.append((last - first) / (last_s - first_s))
                spans.append(last_s - first_s)
                lasts.append(last_s)
        if not rates:
            return None
        return Arrivals(
            rate_per_s=sum(rates),
            window_s=min(spans),
            age_s=max(0.0, now - min(lasts)),
            routers=len(routers),
            routers_asked=len(rates),
        )
