"""The status, and the events of its transitions: what one pass found, beside what was reported before.

Knows: the previous status and the time. Does not know: how the findings came about (`conditions.py`).

The same findings give the same status: `lastTransitionTime` moves only when a condition's status flips, and
the autoscaler's words are kept until its decision changes, since they quote rates that move all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem_crds import names
from tandem_crds.role_config import Role
from tandem_crds.status import Condition, RoleStatus, ScalingStatus

from . import pods, timestamps
from .conditions import ScalingVerdict, verdicts
from .objects import name_of, namespace_of
from .plan import Event
from .reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tandem_crds.model import DisaggregatedModel

    from .autoscale import Decision
    from .conditions import Findings, Truth, Verdict
    from .objects import Obj

SCALING_MESSAGE_LENGTH = 512  # of `status.scaling.message`
_TRUTH: dict[bool | None, Truth] = {True: "True", False: "False", None: "Unknown"}


def scaling_status(previous: Obj, decision: Decision, current: int, now: float) -> dict[str, Any]:
    """`status.scaling`: the last decision, as it was when it was made."""
    before: dict[str, Any] = previous.get("scaling") or {}
    desired = current if decision.replicas is None else decision.replicas
    reason = str(decision.reason)
    if (before.get("desiredReplicas"), before.get("reason")) == (desired, reason):
        return before
    return ScalingStatus(
        desired_replicas=desired,
        reason=reason,
        message=decision.message[:SCALING_MESSAGE_LENGTH],
        time=timestamps.text(now),
    ).model_dump(mode="json")


def scaling_verdict(decision: Decision, told: Mapping[str, Any]) -> ScalingVerdict:
    """ScalingActive, in the words of `status.scaling`."""
    return ScalingVerdict(
        _TRUTH[decision.active], str(decision.reason), told.get("message") or decision.message
    )


def build_status(
    parent: Obj,
    model: DisaggregatedModel | None,
    found: Findings,
    scaling: Mapping[str, Any] | None,
    now: float,
) -> Obj:
    """The whole status. Without a model, because its spec cannot be read, what depends on it stays."""
    previous: Obj = parent.get("status") or {}
    kept = ("kvKey", "model", "url", "scaling")
    status: Obj = {key: previous[key] for key in kept if key in previous}
    generation = parent["metadata"].get("generation")
    if generation is not None:
        status["observedGeneration"] = generation
    status["selector"] = names.decode_selector(name_of(parent))
    for role in (Role.PREFILL, Role.DECODE):
        status[role.value] = _role_status(previous, role, found)
    if model is not None:
        status["url"] = url(parent, model)
        status.pop("scaling", None)
        if scaling is not None:
            status["scaling"] = dict(scaling)
    if found.pair is not None:
        status |= {"kvKey": found.pair.decode.kv_key, "model": found.pair.decode.facts}
    status["conditions"] = [_condition(verdict, previous, generation, now) for verdict in verdicts(found)]
    return status


def url(parent: Obj, model: DisaggregatedModel) -> str:
    host = f"{names.router(name_of(parent))}.{namespace_of(parent)}.svc"
    return f"http://{host}:{model.spec.router.service.port}/v1"


def events(parent: Obj, status: Obj) -> tuple[Event, ...]:
    """What a person should hear of: a condition that turned, and a new reason of one that is False."""
    before = {one["type"]: one for one in (parent.get("status") or {}).get("conditions") or ()}
    told = []
    for after in status["conditions"]:
        event = _event(before.get(after["type"]), after)
        if event is not None:
            told.append(event)
    return tuple(told)


def _event(before: Obj | None, after: Obj) -> Event | None:
    was = (before["status"], before["reason"]) if before is not None else ("Unknown", "")
    now, reason, note = (after["status"], after["reason"]), after["reason"], after["message"]
    if was == now:
        return None
    match after["type"]:
        case "Ready" if now[0] == "True":
            return Event("Normal", "BecameReady", "Reconcile", note)
        case "Available" if was[0] == "True":
            return Event("Warning", "BecameUnavailable", "Observe", note)
        case "Reconciled" | "Compatible" | "FabricReady" if now[0] == "False":
            return Event("Warning", reason, "Reconcile", note)
        case "Progressing" if reason == Reason.ROLLING_OUT:
            return Event("Normal", "RolloutStarted", "Roll", note)
        case "Progressing" if reason == Reason.COMPLETE and was[1] == Reason.ROLLING_OUT:
            return Event("Normal", "RolloutFinished", "Roll", note)
        case "Progressing" if now[0] == "False" and reason in pods.TROUBLES:
            return Event("Warning", reason, "Observe", note)
        case "ScalingActive" if was[0] == "True" and now[0] != "True":
            return Event("Warning", reason, "Scale", note)
    return None


def _role_status(previous: Obj, role: Role, found: Findings) -> dict[str, Any]:
    """While no newest revision can be told, the one that was stays named."""
    known = (previous.get(role.value) or {}).get("revision")
    revision = found.pair.of(role).name if found.pair is not None else known
    return RoleStatus(
        replicas=len(pods.present(pods.of_role(found.pods, role))),
        ready=len(found.ready(role)),
        updated=sum(pods.revision(pod) == revision for pod in found.ready(role)),
        revision=revision,
        loaded_percent=found.loaded_percent(role),
    ).model_dump(mode="json", exclude_none=True)


def _condition(verdict: Verdict, previous: Obj, generation: int | None, now: float) -> dict[str, Any]:
    before = next((one for one in previous.get("conditions") or () if one["type"] == verdict.type), None)
    same = before is not None and before["status"] == verdict.status
    return Condition(
        type=verdict.type,
        status=verdict.status,
        observed_generation=generation,
        last_transition_time=before["lastTransitionTime"] if same and before else timestamps.text(now),
        reason=verdict.reason,
        message=verdict.message,
    ).model_dump(mode="json", exclude_none=True)
