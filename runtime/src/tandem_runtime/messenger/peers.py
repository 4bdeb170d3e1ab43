"""How well a peer is, and which one takes the next transfer. Pure.

Silence and age are different things. `silence_s` counts from the last frame of the link, which the peer's C
core sends: silence means that the process is stopped, gone, or cut off. `age_s` is how long ago the peer's
lead last published a PONG body: its core answers, its loop does not move. That peer is wedged, not dead:
what it was asked to write is still written, so its link is not closed for it; it only gets nothing new.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
DEAD_S = 5.0
WEDGED_S = 3.0


class Health(enum.StrEnum):
    HEALTHY = "healthy"
    WEDGED = "wedged"
    SUSPECT = "suspect"
    DEAD = "dead"


def health(silence_s: float, age_s: float) -> Health:
    if silence_s >= DEAD_S:
        return Health.DEAD
    if silence_s >= SUSPECT_S:
        return Health.SUSPECT
    return Health.WEDGED if age_s >= WEDGED_S else Health.HEALTHY


@dataclass(frozen=True, slots=True)
class Candidate:
    uid: str
    same_zone: bool
    credits: int  # transfers it would still take from us
    dispatched: int  # so far: evens out what is else equal


def choose(candidates: Iterable[Candidate]) -> Candidate | None:
    """Same zone first, then most credits, then whoever has had the fewest."""
    able = [candidate for candidate in candidates if candidate.credits > 0]
    return max(able, key=lambda c: (c.same_zone, c.credits, -c.dispatched), default=None)
