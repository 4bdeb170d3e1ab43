"""Carries a plan out, in the plan's order.

Knows: how each step is written, and what a refusal means for the rest. Does not know: why a step is planned.

An object that the server refuses (Invalid, Forbidden) stops nothing else: what it said is remembered and told
in the status. A Conflict means that the pass decided on old facts, an API server that does not answer that
nothing more can be done: both end the pass.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
from typing import TYPE_CHECKING

from tandem_crds import names

from .kube import Conflict, Forbidden, Invalid, NotFound
from .objects import (
    FIELD_MANAGER,
    MODEL,
    POD,
    SCALING_FIELD_MANAGER,
    SECRET,
    kind_of,
    name_of,
    namespace_of,
    owner_reference,
    uid_of,
)
from .unchanged import ANNOTATION_APPLIED, contains, stamped

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .kube import Kube
    from .memory import Memory
    from .metrics import Metrics
    from .objects import Obj
    from .observed import Observed
    from .plan import Deletion

PEER_KEY_NBYTES = 32


class Executor:
    """Raises Conflict, Unavailable, NotFound, and Forbidden(terminating) where the namespace is going."""

    def __init__(self, kube: Kube, metrics: Metrics) -> None:
        self._kube, self._metrics = kube, metrics

    async def peer_secret(self, parent: Obj, name: str, memory: Memory, now: float) -> None:
        """Created with a key of its own if absent; never read, never changed."""
        key = base64.b64encode(secrets.token_hex(PEER_KEY_NBYTES).encode()).decode()
        body = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": {
                "name": name,
                "namespace": namespace_of(parent),
                "labels": names.labels(name_of(parent), "messenger"),
                "ownerReferences": [owner_reference(parent)],
            },
            "type": "Opaque",
            "data": {"current": key},
        }
        try:
            await self._kube.create(body)
            self._metrics.applied.labels(kind=SECRET.kind).inc()
        except Conflict:
            pass
        except (Forbidden, Invalid) as error:
            _raise_if_terminating(error)
            memory.reject(SECRET.kind, name, "", str(error), now)
            return
        memory.secret_seen = now

    async def pod_costs(self, observed: Observed, costs: Mapping[str, int]) -> None:
        namespace = namespace_of(observed.parent)
        for pod in observed.pods:
            name = name_of(pod)
            if (cost := costs.get(name)) is None:
                continue
            annotations = pod["metadata"].get("annotations") or {}
            if annotations.get(names.ANNOTATION_POD_DELETION_COST) != str(cost):
                patch = {"metadata": {"annotations": {names.ANNOTATION_POD_DELETION_COST: str(cost)}}}
                with contextlib.suppress(NotFound):
                    await self._kube.merge(POD, namespace, name, patch, manager=FIELD_MANAGER)

    async def apply(self, observed: Observed, bodies: tuple[Obj, ...], memory: Memory, now: float) -> None:
        for body in map(stamped, bodies):
            kind, name = kind_of(body), name_of(body)
            digest = body["metadata"]["annotations"][ANNOTATION_APPLIED]
            found = observed.named(kind, name)
            if found is not None and contains(found, body):
                memory.rejected.pop((kind.kind, name), None)
                self._metrics.unchanged.labels(kind=kind.kind).inc()
                continue
            if memory.is_rejected(kind.kind, name, digest, now):
                continue
            if found is not None:
                # Only that very object: one deleted meanwhile is not made anew on old facts.
                body = {**body, "metadata": {**body["metadata"], "uid": uid_of(found)}}
            try:
                await self._kube.apply(body)
            except (Forbidden, Invalid) as error:
                _raise_if_terminating(error)
                if isinstance(error, Invalid) and "metadata.uid" in str(error):
                    raise Conflict(str(error)) from error  # another object has the name now
                memory.reject(kind.kind, name, digest, str(error), now)
                continue
            memory.rejected.pop((kind.kind, name), None)
            self._metrics.applied.labels(kind=kind.kind).inc()

    async def delete(self, namespace: str, deletions: tuple[Deletion, ...]) -> None:
        for one in deletions:
            await self._kube.delete(one.kind, namespace, one.name, one.uid)

    async def scale_decode(self, parent: Obj, replicas: int) -> Obj:
        """The parent at the resourceVersion that the write gave it."""
        scale = await self._kube.merge(
            MODEL,
            namespace_of(parent),
            name_of(parent),
            {"spec": {"replicas": replicas}},
            subresource="scale",
            manager=SCALING_FIELD_MANAGER,
        )
        version = scale["metadata"]["resourceVersion"]
        return {**parent, "metadata": {**parent["metadata"], "resourceVersion": version}}

    async def status(self, parent: Obj, status: Obj) -> None:
        """Written only if it differs, and only over the very object that it was computed from."""
        before = parent.get("status") or {}
        if before == status:
            return
        patch = {
            "metadata": {"resourceVersion": parent["metadata"]["resourceVersion"]},
            "status": merge_patch(before, status),
        }
        await self._kube.merge(
            MODEL, namespace_of(parent), name_of(parent), patch, subresource="status", manager=FIELD_MANAGER
        )


def merge_patch(before: Obj, after: Obj) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that makes `after` of `before`."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if value != old:
                patch[key] = merge_patch(old, value)
        elif key not in before or value != old:
            patch[key] = value
    return patch


def _raise_if_terminating(error: Forbidden | Invalid) -> None:
    if isinstance(error, Forbidden) and error.terminating:
        raise error
