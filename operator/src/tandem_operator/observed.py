"""One model as it was found: everything that `desired()` may look at, and nothing else.

Knows: the shape of an observation. Does not know: how it was read (`reconcile.py`), what to make of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .objects import is_controlled_by, uid_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .objects import Kind, Obj


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker's `/state` said, or that it could not be asked. Fields it did not tell are None."""

    loaded_percent: int | None = None
    paired: bool | None = None  # decode: at least one prefill peer is attached
    provider: str | None = None  # the libfabric provider in use
    running: int | None = None  # requests that the worker has under way, queued ones included
    incompatible: Mapping[str, str] = field(default_factory=dict)  # peer pod -> why they stay apart
    error: str = ""  # why it could not be asked


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests per second over the last `window_s` seconds, over all routers.

    `routers_asked` of `routers` answered; a router whose counter went backwards or that was first seen
    within the window counts as not yet answered. `age_s` is that of the oldest sample used.
    """

    rate_per_s: float
    window_s: float
    age_s: float
    routers: int
    routers_asked: int


@dataclass(frozen=True, slots=True)
class Observed:
    """One pass's observation.

    `children` holds what carries the model's label and is controlled by this very parent, by kind; `foreign`
    the rest, and objects at our names without our label. Pods of all revisions are in `pods`, terminating
    ones included.
    """

    parent: Obj
    children: Mapping[Kind, tuple[Obj, ...]]
    pods: tuple[Obj, ...] = ()
    foreign: tuple[Obj, ...] = ()
    workers: Mapping[str, WorkerState] = field(default_factory=dict)  # by pod UID; those asked lately
    arrivals: Arrivals | None = None  # None: scaling mode None, or nothing measured yet
    recommendations: tuple[tuple[float, int], ...] = ()  # (Unix time, decode replicas), oldest first
    watched_s: float = 0.0  # since this process first looked at the model: how far back those can reach
    peer_secret_exists: bool = False
    forbidden: tuple[str, ...] = ()  # "create deployments": child writes that RBAC refuses
    rejected: tuple[str, ...] = ()  # "Deployment m-decode-1: …": what the server said to bodies of ours

    def named(self, kind: Kind, name: str) -> Obj | None:
        return next((one for one in self.children.get(kind, ()) if one["metadata"]["name"] == name), None)

    def owns(self, obj: Obj) -> bool:
        return is_controlled_by(obj, uid_of(self.parent))
