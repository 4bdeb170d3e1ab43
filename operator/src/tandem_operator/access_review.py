"""Which verbs the operator needs, and which of them RBAC grants: asked at start, before anything is done.

Knows: the table of verbs, the reason of each. Does not know: what happens without one, but for its class.

    read    without it nothing can be decided: not ready, asked again
    child   a condition of every model: some object cannot be written
    told    status or events: a log line and a metric
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .objects import (
    CHILD_KINDS,
    EVENT,
    LEASE,
    MODEL,
    POD,
    SECRET,
    Kind,
)

if TYPE_CHECKING:
    from .kube import Kube

Need = Literal["read", "child", "told"]
ENDPOINT_SLICE = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")


@dataclass(frozen=True, slots=True)
class Verb:
    need: Need
    verb: str
    kind: Kind
    subresource: str = ""
    why: str = ""

    def __str__(self) -> str:
        what = f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural
        return f"{self.verb} {what}"


def _of(need: Need, verbs: str, kind: Kind, why: str, subresource: str = "") -> list[Verb]:
    return [Verb(need, verb, kind, subresource, why) for verb in verbs.split()]


VERBS = (
    *_of("read", "get list watch", MODEL, "what is wanted"),
    *_of("told", "patch", MODEL, "conditions and counts", "status"),
    *_of("child", "patch", MODEL, "the QPS autoscaler writes one number", "scale"),
    *(
        verb
        for kind in CHILD_KINDS
        for verb in (
            *_of("read", "get list watch", kind, "what is there; whether a name is taken"),
            *_of("child", "create patch delete", kind, "server-side apply; pruning"),
        )
    ),
    *_of("read", "list watch", POD, "readiness, and why a pod is not ready"),
    *_of("child", "patch", POD, "pod-deletion-cost before a scale-down"),
    *_of("child", "create", SECRET, "the peer key, made once and never read"),
    *_of("child", "list watch", ENDPOINT_SLICE, "granted to the pods that discover peers: only what one has"),
    *_of("told", "create patch", EVENT, "events and their series"),
)
# In the Lease's namespace only.
LEASE_VERBS = _of("read", "get create update", LEASE, "one leader at a time")


async def refused(kube: Kube, namespace: str | None, verbs: tuple[Verb, ...] = VERBS) -> list[Verb]:
    """The verbs that are not granted in `namespace` (None: in all). Raises KubeError."""
    return [one for one in verbs if not await kube.allowed(one.verb, one.kind, namespace, one.subresource)]
