"""What runs of one role, by revision: the rollout planner's view of Deployments and pods.

Knows: labels and counts. Does not know: which step comes next (`rollout.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names
from tandem_crds.role_config import Role

from . import pods
from .objects import DEPLOYMENT, is_terminating, labels_of, uid_of
from .rollout import Generation, RoleState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .objects import Obj
    from .observed import Observed
    from .revision import Revision

# Routers hear of a ready pod and ask it within a second.
AVAILABLE_S = 2.0


def deployments(observed: Observed, role: Role) -> dict[str, Obj]:
    """By revision. One that is being deleted is gone: its pods are on their way out."""
    found = pods.of_role(observed.children.get(DEPLOYMENT, ()), role)
    return {labels_of(one)[names.LABEL_REVISION]: one for one in found if not is_terminating(one)}


def role_pods(observed: Observed, role: Role) -> dict[str, list[Obj]]:
    """By revision, terminating ones included."""
    by_revision: dict[str, list[Obj]] = {}
    for pod in pods.of_role(observed.pods, role):
        if (revision := pods.revision(pod)) is not None:
            by_revision.setdefault(revision, []).append(pod)
    return by_revision


def is_settling(pod: Obj, now: float) -> bool:
    """Ready, but for too short a while to count on."""
    return pods.is_ready(pod) and now - pods.ready_since(pod) < AVAILABLE_S


def _unavailable(observed: Observed, role: Role, now: float) -> set[str]:
    """UIDs of ready pods that cannot stand in for others yet: routers have not heard of them, or, of decode,
    they say that they have not reached a prefill pod of their KV key, though one is ready.
    """
    prefill = {pods.kv_key(pod) for pod in pods.of_role(observed.pods, Role.PREFILL) if pods.is_ready(pod)}
    found = set()
    for pod in pods.of_role(observed.pods, role):
        state = observed.workers.get(uid_of(pod))
        lonely = role is Role.DECODE and state is not None and state.paired is False
        if is_settling(pod, now) or (lonely and pods.kv_key(pod) in prefill):
            found.add(uid_of(pod))
    return found


def role_state(observed: Observed, role: Role, wanted: int, newest: Revision, now: float) -> RoleState:
    """Pods that outlive their Deployment, deleted by hand, form a generation that wants none.

    Of the newest generation only those pods count as ready that can stand in for old ones.
    """
    unavailable = _unavailable(observed, role, now)
    controllers, running = deployments(observed, role), role_pods(observed, role)
    return RoleState(
        wanted=wanted,
        newest=newest.name,
        newest_kv_key=newest.kv_key,
        generations=tuple(
            _generation(
                revision,
                controllers.get(revision),
                running.get(revision, []),
                unavailable if revision == newest.name else set(),
            )
            for revision in sorted({*controllers, *running})
        ),
    )


def _generation(revision: str, controller: Obj | None, own: list[Obj], unavailable: set[str]) -> Generation:
    labelled = controller or own[0]
    return Generation(
        revision=revision,
        kv_key=labels_of(labelled).get(names.LABEL_KV_KEY, ""),
        replicas=0 if controller is None else controller["spec"].get("replicas", 1),
        ready=sum(pods.is_ready(pod) and uid_of(pod) not in unavailable for pod in own),
        pods=len(pods.present(own)),
        terminating=sum(map(is_terminating, own)),
    )


def deletion_costs(own: list[Obj], running: Mapping[str, int | None]) -> dict[str, int]:
    """Pod name -> cost, the emptiest cheapest: those whose requests are unknown go last. `running` is by pod
    UID."""

    def burden(pod: Obj) -> tuple[bool, int, str]:
        count = running.get(pod["metadata"]["uid"])
        return count is None, count or 0, pod["metadata"]["name"]

    return {pod["metadata"]["name"]: cost for cost, pod in enumerate(sorted(pods.present(own), key=burden))}
