"""What to do for one model: `(Observed, Settings, now) -> Plan`, pure.

Knows: the order of the questions. Does not know: the API server, the clock.

 1. A model that is being deleted: nothing.
 2. Its spec is read; what cannot be read or done is refused: only the status is written.
 3. Access: ServiceAccount, Role, RoleBinding, NetworkPolicy, PodDisruptionBudgets, and the peer key.
 4. The model's facts are inspected.
 5. The newest revision of each role and of the router: looked up, else made.
 6. The autoscaler decides; its number comes back as the spec of a later pass.
 7. The rollout planner takes one step from what runs to what is wanted.
 8. A Deployment per revision that runs, a headless Service per (role, KV key) in use.
 9. What is ours and not wanted goes; while the newest revisions are unknown, nothing of a role does.
10. Status, events, and when to look again.

Run on the world that its own plan makes, it plans nothing new.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_crds import names
from tandem_crds.role_config import Role, RoleConfigError

from . import autoscale, generations, pods, timestamps
from .conditions import ROLES, Findings, ScalingVerdict, verdicts
from .inspection import inspect
from .objects import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    is_terminating,
    kind_of,
    labels_of,
    name_of,
    namespace_of,
    owner_reference,
    uid_of,
)
from .plan import Deletion, Event, Plan
from .pods import Trouble
from .reasons import Reason
from .refusals import Refusal, read_model, refusal
from .render import access, router, services, workload
from .revision import newest_pair, newest_router, stored_revisions
from .rollout import next_step
from .status import build_status, events, scaling_status, scaling_verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tandem_crds.model import DisaggregatedModel

    from .inspection import Inspection
    from .objects import Kind, Obj
    from .observed import Observed
    from .revision import Pair, Revision, RouterRevision
    from .rollout import Step
    from .settings import Settings

# A pass without an event: pods report events, workers do not.
LOADING_S = 10.0
# Workers cause no events when they have paired: they are asked.
PAIRING_S, UNREPORTED_S = 2.0, 30.0


def desired(observed: Observed, settings: Settings, now: float) -> Plan:
    if is_terminating(observed.parent):
        return Plan()
    model = read_model(observed.parent)
    if isinstance(model, Refusal):
        return _refused(observed, None, model, now)
    if (refused := refusal(model, settings)) is not None:
        return _refused(observed, model, refused, now)

    inspection = inspect(observed, model, settings, now)
    stored = stored_revisions(observed.children.get(CONFIG_MAP, ()))
    pair, misfit = None, ""
    try:
        pair = newest_pair(model, inspection.facts, settings, stored)
    except RoleConfigError as error:
        misfit = str(error)
    front = newest_router(model, settings, observed.children.get(CONFIG_MAP, ()))
    workers = _workers(observed, model, pair, stored, now) if pair is not None else _Workers()
    bodies = [*_access(model), *_router(model, front, observed), *inspection.apply, *workers.bodies]
    free, taken = _not_taken(observed, bodies)
    keep = inspection.keep | workers.keep | _kept_of_router(observed, model, front)

    previous = observed.parent.get("status") or {}
    decision = None
    if model.spec.scaling.mode == "QPS":
        decision = autoscale.decide(
            model.spec.scaling,
            model.spec.decode.replicas,
            observed.arrivals,
            observed.recommendations,
            observed.watched_s,
            now,
            settings.scaling,
            unschedulable=any(map(pods.is_unschedulable, _workers_of(observed))),
            grown_s=_grown_s(previous, now),
        )
    scaling = (
        None if decision is None else scaling_status(previous, decision, model.spec.decode.replicas, now)
    )
    found = Findings(
        now=now,
        pods=observed.pods,
        workers=observed.workers,
        scaling=_not_scaled(model) if decision is None else scaling_verdict(decision, scaling or {}),
        obstacles=(*taken, *_forbidden(observed), *_rejected(observed)),
        inspection=inspection,
        misfit=misfit,
        pair=pair,
        wanted={Role.PREFILL: model.spec.prefill_replicas, Role.DECODE: model.spec.decode.replicas},
        step=workers.step,
        was_rolling=_was_rolling(previous),
        router_wanted=model.spec.router.replicas,
        router_ready=sum(map(pods.is_ready, pods.of_router(observed.pods, name_of(observed.parent)))),
        troubles=_troubles(observed, pair),
    )
    status = build_status(observed.parent, model, found, scaling, now)
    scaled = decision.replicas if decision is not None else None
    return Plan(
        peer_secret=None if observed.peer_secret_exists else names.peer_secret(model.metadata.name),
        pod_costs=workers.pod_costs or None,
        apply=tuple(_owned(body, observed.parent) for body in _in_order(free)),
        delete=_unwanted(observed, bodies, keep, roles_too=pair is not None),
        decode_replicas=scaled,
        recommendation=decision.recommendation if decision is not None else None,
        status=status,
        events=(*events(observed.parent, status), *_scaled(model, decision)),
        requeue_s=_requeue_s(model, found, inspection, settings.scaling.period_s),
    )


@dataclass(frozen=True, slots=True)
class _Workers:
    """What the newest revisions, once they are known, ask for."""

    step: Step | None = None
    bodies: tuple[Obj, ...] = ()
    keep: frozenset[tuple[Kind, str]] = frozenset()
    pod_costs: Mapping[str, int] = field(default_factory=dict)


def _refused(observed: Observed, model: DisaggregatedModel | None, refused: Refusal, now: float) -> Plan:
    """Children stay as they are: what served goes on serving."""
    previous = observed.parent.get("status") or {}
    found = Findings(
        now=now,
        pods=observed.pods,
        workers=observed.workers,
        scaling=ScalingVerdict("Unknown", refused.reason, "not looked at; see Reconciled"),
        refusal=refused,
    )
    status = build_status(observed.parent, model, found, previous.get("scaling"), now)
    return Plan(status=status, events=events(observed.parent, status))


def _access(model: DisaggregatedModel) -> list[Obj]:
    return [
        access.service_account(model),
        access.role(model),
        access.role_binding(model),
        access.network_policy(model),
        *(workload.disruption_budget(model, role) for role in ROLES),
    ]


def _router(model: DisaggregatedModel, front: RouterRevision, observed: Observed) -> list[Obj]:
    name = names.router_revision(model.metadata.name, front.name)
    stored = observed.named(CONFIG_MAP, name) is not None
    return [
        *(() if stored else (front.config_map(model.metadata.name),)),
        router.router_deployment(model, front.name, front.template),
        services.router_service(model),
    ]


def _kept_of_router(
    observed: Observed, model: DisaggregatedModel, front: RouterRevision
) -> frozenset[tuple[Kind, str]]:
    running = {pods.revision(pod) for pod in pods.of_router(observed.pods, model.metadata.name)}
    kept = {front.name, *running} - {None}
    return frozenset((CONFIG_MAP, names.router_revision(model.metadata.name, str(one))) for one in kept)


def _workers(
    observed: Observed, model: DisaggregatedModel, pair: Pair, stored: list[Revision], now: float
) -> _Workers:
    name, spec = model.metadata.name, model.spec
    step = next_step(
        generations.role_state(observed, Role.PREFILL, spec.prefill_replicas, pair.prefill, now),
        generations.role_state(observed, Role.DECODE, spec.decode.replicas, pair.decode, now),
        max_surge=spec.rollout.max_surge,
        max_unavailable=spec.rollout.max_unavailable,
    )
    known = {(one.role, one.name): one for one in stored}
    bodies: list[Obj] = []
    keep: set[tuple[Kind, str]] = set()
    costs: dict[str, int] = {}
    for role in ROLES:
        newest = pair.of(role)
        replicas = step.prefill if role is Role.PREFILL else step.decode
        controllers, running = generations.deployments(observed, role), generations.role_pods(observed, role)
        if (role, newest.name) not in known:
            bodies.append(newest.config_map(name))
        keys = {newest.kv_key, *(pods.kv_key(pod) for own in running.values() for pod in own)} - {""}
        for revision in sorted({newest.name, *replicas, *controllers, *running}):
            own, controller = running.get(revision, []), controllers.get(revision)
            if revision != newest.name and not own and not replicas.get(revision):
                continue  # it has ended
            keep.add((CONFIG_MAP, names.role_name(name, role, revision)))
            if revision != newest.name and controller is None:
                continue  # deleted by hand: its pods are on their way out
            count = replicas.get(revision, 0)
            if controller is not None and count < controller["spec"].get("replicas", 1):
                running_requests = {uid: one.running for uid, one in observed.workers.items()}
                costs |= generations.deletion_costs(own, running_requests)
            source = newest if revision == newest.name else known.get((role, revision))
            bodies.append(_deployment(model, role, revision, source, controller, count))
        bodies += [services.role_service(model, role, key) for key in sorted(keys)]
    return _Workers(step, tuple(bodies), frozenset(keep), costs)


def _deployment(
    model: DisaggregatedModel,
    role: Role,
    revision: str,
    source: Revision | None,
    controller: Obj | None,
    replicas: int,
) -> Obj:
    """From the revision's ConfigMap; where somebody deleted that, as it stands, so that it can shrink."""
    if source is not None:
        return workload.deployment(model, role, revision, source.kv_key, source.template, replicas)
    assert controller is not None
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {"name": name_of(controller), "labels": labels_of(controller)},
        "spec": {
            "replicas": replicas,
            "selector": controller["spec"]["selector"],
            "template": controller["spec"]["template"],
        },
    }


def _not_taken(observed: Observed, bodies: Iterable[Obj]) -> tuple[list[Obj], list[tuple[Reason, str]]]:
    """Bodies at free names or our own, and a line for each name that somebody else's object has."""
    foreign = {(one["kind"], name_of(one)): one for one in observed.foreign}
    free, taken = [], []
    for body in bodies:
        holder = foreign.get((body["kind"], name_of(body)))
        if holder is None:
            free.append(body)
        else:
            taken.append((Reason.NAME_TAKEN, _taken(holder, observed.parent)))
    return free, sorted(taken)


def _taken(holder: Obj, parent: Obj) -> str:
    what = f"{holder['kind']} {name_of(holder)}"
    owners = [one for one in holder["metadata"].get("ownerReferences") or () if one.get("controller")]
    if any(one["kind"] == parent["kind"] and one["name"] == name_of(parent) for one in owners):
        return f"{what} belongs to an earlier model of this name; it is made anew once that is gone"
    if owners:
        owner = f"{owners[0]['kind']} {owners[0]['name']}"
        return f"{what} exists and belongs to {owner}; rename this model, or remove the other"
    return f"{what} exists and is not ours; rename this model, or delete it if nothing needs it"


def _forbidden(observed: Observed) -> list[tuple[Reason, str]]:
    return [
        (
            Reason.FORBIDDEN,
            f"the operator may not {what} in namespace {namespace_of(observed.parent)}: its "
            "RBAC lacks the verb, which the chart grants",
        )
        for what in sorted(observed.forbidden)
    ]


def _rejected(observed: Observed) -> list[tuple[Reason, str]]:
    """The same body is refused again: mostly a podTemplate, or a policy of the cluster."""
    return [
        (Reason.INVALID_CHILD, f"the API server refuses {pods.brief(said)}")
        for said in sorted(observed.rejected)
    ]


def _was_rolling(previous: Obj) -> bool:
    return any(
        one["type"] == "Progressing" and one["status"] == "True" and one["reason"] == Reason.ROLLING_OUT
        for one in previous.get("conditions") or ()
    )


def _troubles(observed: Observed, pair: Pair | None) -> tuple[Trouble, ...]:
    """Of what should be running: an old revision's trouble is why it is replaced."""
    if pair is None:
        return ()
    own = [
        pod
        for role in ROLES
        for pod in pods.of_role(observed.pods, role)
        if pods.revision(pod) == pair.of(role).name
    ]
    own += pods.of_router(observed.pods, name_of(observed.parent))
    found = [one for one in map(pods.trouble, own) if one is not None]
    newest = [generations.deployments(observed, role).get(pair.of(role).name) for role in ROLES]
    front = observed.named(DEPLOYMENT, names.router(name_of(observed.parent)))
    for one in (*newest, front):
        failure = pods.condition(one, "ReplicaFailure") if one is not None else {}
        if one is not None and failure.get("status") == "True":
            text = f"Deployment {name_of(one)} cannot create pods: {pods.brief(failure.get('message', ''))}"
            found.append(Trouble(Reason.PODS_NOT_CREATED, name_of(one), text))
    return tuple(sorted(found, key=Trouble.sort_key))


def _workers_of(observed: Observed) -> list[Obj]:
    return [pod for role in ROLES for pod in pods.present(pods.of_role(observed.pods, role))]


def _unwanted(
    observed: Observed, bodies: Iterable[Obj], keep: frozenset[tuple[Kind, str]], *, roles_too: bool
) -> tuple[Deletion, ...]:
    wanted = {(kind_of(body), name_of(body)) for body in bodies} | keep
    return tuple(
        Deletion(kind, name_of(child), uid_of(child))
        for kind in CHILD_KINDS
        for child in sorted(observed.children.get(kind, ()), key=name_of)
        if (kind, name_of(child)) not in wanted
        and not is_terminating(child)
        and (roles_too or names.LABEL_ROLE not in labels_of(child))
    )


def _in_order(bodies: Iterable[Obj]) -> list[Obj]:
    """What pods mount or refer to before the pods."""
    return sorted(bodies, key=lambda body: (CHILD_KINDS.index(kind_of(body)), name_of(body)))


def _owned(body: Obj, parent: Obj) -> Obj:
    metadata = {
        **body["metadata"],
        "namespace": namespace_of(parent),
        "ownerReferences": [owner_reference(parent)],
    }
    return {**body, "metadata": metadata}


def _not_scaled(model: DisaggregatedModel) -> ScalingVerdict:
    return ScalingVerdict(
        "False",
        Reason.SCALING_DISABLED,
        f"scaling.mode is {model.spec.scaling.mode}: decode.replicas is set by hand, an HPA or KEDA",
    )


def _grown_s(previous: Obj, now: float) -> float:
    """How long ago the autoscaler's last step up was."""
    told = previous.get("scaling") or {}
    if told.get("reason") != autoscale.ScalingReason.SCALED_UP:
        return math.inf
    return now - timestamps.seconds(told["time"])


def _scaled(model: DisaggregatedModel, decision: autoscale.Decision | None) -> tuple[Event, ...]:
    if decision is None or decision.replicas is None:
        return ()
    note = f"decode from {model.spec.decode.replicas} to {decision.replicas} replicas: {decision.message}"
    return (Event("Normal", "Scaled", "Scale", note),)


def _requeue_s(
    model: DisaggregatedModel, found: Findings, inspection: Inspection, scaling_s: float
) -> float | None:
    waits = [inspection.retry_s] if inspection.retry_s is not None else []
    if model.spec.scaling.mode == "QPS":
        waits.append(scaling_s)
    settled = (
        found.step is not None
        and found.step.done
        and all(found.updated(role) == wanted for role, wanted in found.wanted.items())
    )
    if found.pair is not None and not settled:
        waits.append(LOADING_S)
        if any(generations.is_settling(pod, found.now) for pod in found.pods):
            waits.append(generations.AVAILABLE_S)
    fabric = next((one for one in verdicts(found) if one.type == "FabricReady"), None)
    if fabric is not None and fabric.reason == Reason.PAIRING:
        waits.append(PAIRING_S)
    elif settled and fabric is not None and fabric.status != "True":
        waits.append(UNREPORTED_S)
    return min(waits, default=None)
