"""What the process remembers of one model between passes. Losing it costs a question or a wait, never a wrong
decision: a restart forgets all of it.

Knows: ages. Does not know: how anything is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .arrivals import ArrivalSamples

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .observed import WorkerState

NOT_READY_S = 10.0  # how old the state of a worker that is not ready may be
READY_S = 60.0
UNSETTLED_S = 1.5  # of one that is, but whose last answer was from before, or that could not be asked
SECRET_S = 30.0  # while the model is new: an earlier model's Secret of that name may still be on its way out
SECRET_OLD_S = 600.0
RECOMMENDED_S = 3600.0  # the longest window of a scale-down
REJECTED_S = 600.0  # an object that the server refuses is sent again then, if nothing changes


@dataclass(slots=True)
class Memory:
    """Of one model, by UID. Times are Unix seconds."""

    since: float
    states: dict[str, tuple[float, WorkerState]] = field(default_factory=dict)  # by pod UID, with their times
    samples: ArrivalSamples = field(default_factory=ArrivalSamples)
    recommendations: list[tuple[float, int]] = field(default_factory=list)
    secret_seen: float | None = None
    rejected: dict[tuple[str, str], tuple[float, str, str]] = field(default_factory=dict)

    def due(self, ready: Mapping[str, bool], now: float) -> set[str]:
        """UIDs of the workers whose state is too old, or was never asked."""
        return {uid for uid, is_ready in ready.items() if self._is_old(uid, is_ready, now)}

    def _is_old(self, uid: str, is_ready: bool, now: float) -> bool:
        if uid not in self.states:
            return True
        at, state = self.states[uid]
        if not is_ready:
            return now - at >= NOT_READY_S
        settled = state.provider is not None and state.paired is not False
        return now - at >= (READY_S if settled else UNSETTLED_S)

    def heard(self, states: Mapping[str, WorkerState], now: float) -> None:
        self.states |= {uid: (now, state) for uid, state in states.items()}

    def known(self, present: Iterable[str]) -> dict[str, WorkerState]:
        """States of the pods that exist; the others' are forgotten."""
        self.states = {uid: self.states[uid] for uid in present if uid in self.states}
        return {uid: state for uid, (_, state) in self.states.items()}

    def recommend(self, replicas: int | None, now: float) -> None:
        if replicas is not None:
            self.recommendations.append((now, replicas))
        self.recommendations = [one for one in self.recommendations if now - one[0] <= RECOMMENDED_S]

    def has_secret(self, model_age_s: float, now: float) -> bool:
        """Whether the peer Secret was seen lately enough. It can be created but not read (RBAC), so that
        creating it is the only way to look.
        """
        limit = SECRET_S if model_age_s < SECRET_OLD_S else SECRET_OLD_S
        return self.secret_seen is not None and now - self.secret_seen < limit

    def reject(self, kind: str, name: str, digest: str, said: str, now: float) -> None:
        self.rejected[kind, name] = (now, digest, said)

    def is_rejected(self, kind: str, name: str, digest: str, now: float) -> bool:
        """Whether that very body was refused lately."""
        at, refused, _ = self.rejected.get((kind, name), (0.0, "", ""))
        return refused == digest and now - at < REJECTED_S

    def rejections(self, wanted: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """What the server said of objects that are still wanted; the others are forgotten."""
        self.rejected = {key: self.rejected[key] for key in wanted if key in self.rejected}
        return tuple(f"{kind} {name}: {said}" for (kind, name), (_, _, said) in self.rejected.items())
