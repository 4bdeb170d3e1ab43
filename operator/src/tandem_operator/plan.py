"""What to do for one model, as data: the answer of `desired()`, carried out by `reconcile.py`.

Knows: the shape of a plan. Does not know: the API server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .objects import Kind, Obj


@dataclass(frozen=True, slots=True)
class Deletion:
    """Only the object with that UID; one that was made anew under the same name stays."""

    kind: Kind
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Event:
    """Told once per transition, about the parent. `reason` is past tense, CamelCase."""

    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Carried out in this order; whatever fails, the status is still written.

    1. `peer_secret`: created if absent, its key made by the executor, never changed after.
    2. `pod_costs`: pod name -> `pod-deletion-cost`, before the scale-down that it is meant for.
    3. `apply`: whole bodies of the fields we own, for server-side apply; skipped where nothing would change.
    4. `delete`.
    5. `decode_replicas`: the autoscaler's decision, through the scale subresource.
    6. `status`: the whole status; written if it differs.
    7. `events`.
    """

    peer_secret: str | None = None
    pod_costs: Mapping[str, int] | None = None
    apply: tuple[Obj, ...] = ()
    delete: tuple[Deletion, ...] = ()
    decode_replicas: int | None = None
    recommendation: int | None = None  # remembered for the window of a later scale-down; lost on a restart
    status: Obj | None = None  # as in JSON; None: nothing is written
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None  # look again then, whatever happens
