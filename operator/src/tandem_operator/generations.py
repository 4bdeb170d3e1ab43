"""What runs of one role, by revision: the rollout planner's view of Deployments and pods.

Knows: labels and counts. Does not know: which step comes next (`rollout.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names

from . import pods
from .objects import DEPLOYMENT, is_terminating, labels_of
from .rollout import Generation, RoleState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tandem_crds.role_config import Role

    from .objects import Obj
    from .observed import Observed
    from .revision import Revision


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


def role_state(observed: Observed, role: Role, wanted: int, newest: Revision) -> RoleState:
    """Pods that outlive their Deployment, deleted by hand, form a generation that wants none."""
    controllers, running = deployments(observed, role), role_pods(observed, role)
    return RoleState(
        wanted=wanted,
        newest=newest.name,
        newest_kv_key=newest.kv_key,
        generations=tuple(
            _generation(revision, controllers.get(revision), running.get(revision, []))
            for revision in sorted({*controllers, *running})
        ),
    )


def _generation(revision: str, controller: Obj | None, own: list[Obj]) -> Generation:
    labelled = controller or own[0]
    return Generation(
        revision=revision,
        kv_key=labels_of(labelled).get(names.LABEL_KV_KEY, ""),
        replicas=0 if controller is None else controller["spec"].get("replicas", 1),
        ready=sum(map(pods.is_ready, own)),
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
