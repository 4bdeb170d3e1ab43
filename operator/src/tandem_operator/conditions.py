"""The seven conditions: what is true of a model, from where it is known, and what to do about it.

Knows: what one pass found (`Findings`). Does not know: what the conditions were before (`status.py`).

Silence is Unknown. Where several things are wrong, the worst is told, always the same one, so that nothing
flaps: refusals before obstacles before the model's facts before pods, and among pods by `Trouble.sort_key`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tandem_crds import names
from tandem_crds.role_config import Role

from . import pods
from .objects import labels_of, name_of, uid_of
from .reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .inspection import Inspection
    from .objects import Obj
    from .observed import WorkerState
    from .pods import Trouble
    from .refusals import Refusal
    from .revision import Pair
    from .rollout import Step

Truth = Literal["True", "False", "Unknown"]
ROLES = (Role.PREFILL, Role.DECODE)
# Greeting a peer takes a second or two once both are ready; a longer silence between them is a fault.
PAIRING_S = 15.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition without its history."""

    type: str
    status: Truth
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ScalingVerdict:
    """What the autoscaler said, or why it was not asked."""

    status: Truth
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Findings:
    """One pass. What was not reached, because something before it stopped the pass, keeps its default."""

    pods: tuple[Obj, ...]
    workers: Mapping[str, WorkerState]
    scaling: ScalingVerdict
    now: float  # Unix seconds
    refusal: Refusal | None = None
    obstacles: tuple[tuple[Reason, str], ...] = ()  # to single writes, the worst first
    inspection: Inspection | None = None
    misfit: str = ""  # why spec and facts do not fit together
    pair: Pair | None = None
    wanted: Mapping[Role, int] = field(default_factory=dict)
    step: Step | None = None
    was_rolling: bool = False  # the last pass said so: a rollout ends when its last new pod is ready
    router_wanted: int = 0
    router_ready: int = 0
    troubles: tuple[Trouble, ...] = ()  # of pods of the newest revisions and of the router

    @property
    def trouble(self) -> Trouble | None:
        return pods.worst(self.troubles)

    def ready(self, role: Role) -> list[Obj]:
        return [pod for pod in pods.of_role(self.pods, role) if pods.is_ready(pod)]

    def updated(self, role: Role) -> int:
        """Ready pods of the newest revision."""
        if self.pair is None:
            return 0
        name = self.pair.of(role).name
        return sum(pods.revision(pod) == name for pod in self.ready(role))

    def serving_keys(self) -> Counter[str]:
        """KV keys of which a prefill and a decode pod are ready, with the number of their pods."""
        by_role = {role: Counter(map(pods.kv_key, self.ready(role))) for role in ROLES}
        both = by_role[Role.PREFILL].keys() & by_role[Role.DECODE].keys()
        return Counter({key: by_role[Role.PREFILL][key] + by_role[Role.DECODE][key] for key in both})

    def loaded_percent(self, role: Role) -> int | None:
        """How far the slowest pod that loads has come, in steps of 25; None if nobody says so."""
        loading = [pod for pod in pods.present(pods.of_role(self.pods, role)) if not pods.is_ready(pod)]
        states = (self.workers.get(uid_of(pod)) for pod in loading)
        told = [one.loaded_percent for one in states if one is not None and one.loaded_percent is not None]
        return min(told) // 25 * 25 if told else None


def verdicts(found: Findings) -> list[Verdict]:
    """In the order in which a reader asks."""
    reconciled, available, compatible = _reconciled(found), _available(found), _compatible(found)
    progressing, fabric_ready = _progressing(found), _fabric_ready(found)
    return [
        _ready(found, reconciled, available, compatible, progressing, fabric_ready),
        reconciled,
        available,
        progressing,
        compatible,
        fabric_ready,
        Verdict("ScalingActive", found.scaling.status, found.scaling.reason, found.scaling.message),
    ]


def _reconciled(found: Findings) -> Verdict:
    def verdict(status: Truth, reason: Reason, message: str) -> Verdict:
        return Verdict("Reconciled", status, reason, message)

    if found.refusal is not None:
        return verdict("False", found.refusal.reason, found.refusal.message)
    if found.obstacles:
        (reason, message), *others = found.obstacles
        return verdict("False", reason, message + (f" (and {len(others)} more)" if others else ""))
    if found.misfit:
        return verdict("False", Reason.DOES_NOT_FIT, found.misfit)
    if found.pair is None:
        status: Truth = "False" if _inspect_failure(found) else "Unknown"
        return verdict(status, *_without_facts(found))
    return verdict("True", Reason.RECONCILED, "every object of the model is as wanted")


def _available(found: Findings) -> Verdict:
    def verdict(status: Truth, reason: Reason, message: str) -> Verdict:
        return Verdict("Available", status, reason, message)

    if keys := found.serving_keys():
        newest = found.pair.decode.kv_key if found.pair is not None else ""
        key = newest if newest in keys else min(keys)
        counts = {role: sum(pods.kv_key(pod) == key for pod in found.ready(role)) for role in ROLES}
        text = (
            f"{counts[Role.PREFILL]} prefill and {counts[Role.DECODE]} decode pods of KV key {key} are ready"
        )
        return verdict("True", Reason.PAIR_READY, text)
    if found.pair is not None and found.wanted.get(Role.DECODE) == 0:
        return verdict(
            "False",
            Reason.PARKED,
            "decode.replicas is 0: the model is parked; scale it to 1 or more to serve",
        )
    why = _why_not_ready(found)
    lacking = [role for role in ROLES if not found.ready(role)]
    if not lacking:
        keys_of = {role: ", ".join(sorted(set(map(pods.kv_key, found.ready(role))))) for role in ROLES}
        return verdict(
            "False",
            Reason.NO_MATCHING_PAIR,
            f"ready prefill pods have KV key {keys_of[Role.PREFILL]}, ready decode pods "
            f"{keys_of[Role.DECODE]}, and only equal keys pair; {why}",
        )
    reason = Reason.NO_READY_PREFILL if lacking[0] is Role.PREFILL else Reason.NO_READY_DECODE
    return verdict("False", reason, f"no {' and no '.join(lacking)} pod is ready; {why}")


def _progressing(found: Findings) -> Verdict:
    def verdict(status: Truth, reason: Reason, message: str) -> Verdict:
        return Verdict("Progressing", status, reason, message)

    if found.refusal is not None:
        return verdict(
            "False", found.refusal.reason, "nothing is changed until the manifest is; see Reconciled"
        )
    if found.misfit:
        return verdict(
            "False", Reason.DOES_NOT_FIT, "nothing is changed until the manifest is; see Compatible"
        )
    if found.pair is None or found.step is None:
        return verdict("False" if _inspect_failure(found) else "True", *_without_facts(found))
    if found.trouble is not None:
        more = len(found.troubles) - 1
        text = found.trouble.message + (f" (and {more} more pods)" if more else "")
        return verdict("False", found.trouble.reason, text)
    if not found.step.done:
        running = {pods.revision(pod) for role in ROLES for pod in pods.of_role(found.pods, role)}
        reason = Reason.ROLLING_OUT if running - _newest(found) or found.was_rolling else Reason.STARTING
        return verdict("True", reason, "; ".join(filter(None, (found.step.waiting_for, _loading(found)))))
    if any(found.updated(role) < found.wanted[role] for role in ROLES):
        reason = Reason.ROLLING_OUT if found.was_rolling else Reason.STARTING
        return verdict("True", reason, _why_not_ready(found))
    if found.router_ready < found.router_wanted:
        text = f"{found.router_ready} of {found.router_wanted} router pods are ready"
        return verdict("True", Reason.STARTING, text)
    return verdict("False", Reason.COMPLETE, "every wanted pod is of the newest revision and ready")


def _compatible(found: Findings) -> Verdict:
    def verdict(status: Truth, reason: Reason, message: str) -> Verdict:
        return Verdict("Compatible", status, reason, message)

    if found.misfit:
        return verdict("False", Reason.DOES_NOT_FIT, found.misfit)
    if disagreements := sorted(_disagreements(found)):
        more = f" (and {len(disagreements) - 1} more)" if len(disagreements) > 1 else ""
        return verdict("False", Reason.PEERS_DISAGREE, f"{disagreements[0]}{more}")
    if found.refusal is not None:
        return verdict("Unknown", found.refusal.reason, "not looked at; see Reconciled")
    if found.pair is None:
        return verdict("Unknown", *_without_facts(found))
    newest = found.pair.decode
    text = f"prefill and decode agree on KV key {newest.kv_key} and on up to {newest.max_model_len} tokens"
    return verdict("True", Reason.AGREED, f"{text}; no worker disagrees")


def _fabric_ready(found: Findings) -> Verdict:
    def verdict(status: Truth, reason: Reason, message: str) -> Verdict:
        return Verdict("FabricReady", status, reason, message)

    providers = set()
    for pod, state in _told(found):
        if state.provider is None:
            continue
        providers.add(state.provider)
        newest = found.pair.of(Role(_role(pod))) if found.pair is not None else None
        if newest is not None and state.provider not in newest.providers:
            return verdict(
                "False",
                Reason.OTHER_PROVIDER,
                f"pod {name_of(pod)} uses libfabric provider {state.provider}; profile {newest.profile} "
                f"wants {' or '.join(newest.providers)}: its log says why its devices are not used",
            )
    for pod, could_pair_s in _unpaired(found):
        if could_pair_s < PAIRING_S:
            return verdict(
                "Unknown", Reason.PAIRING, f"decode pod {name_of(pod)} is being paired with its prefill peers"
            )
        return verdict(
            "False",
            Reason.NOT_PAIRED,
            f"decode pod {name_of(pod)} has not reached any prefill pod, though one of its KV key is "
            "ready; see its log, and whether the network lets the pods' fabric ports through",
        )
    if not providers:
        return verdict("Unknown", Reason.NOT_REPORTED, "no worker has told which libfabric provider it uses")
    return verdict(
        "True", Reason.PROVIDER_IN_USE, f"workers say that they use {', '.join(sorted(providers))}"
    )


def _ready(
    found: Findings,
    reconciled: Verdict,
    available: Verdict,
    compatible: Verdict,
    progressing: Verdict,
    fabric_ready: Verdict,
) -> Verdict:
    """Reconciled and Available, Compatible not False, all pods up to date and, where they tell, paired, and a
    router to reach them by.
    """
    if reconciled.status != "True":
        return Verdict("Ready", "False", reconciled.reason, reconciled.message)
    if compatible.status == "False":
        return Verdict("Ready", "False", compatible.reason, compatible.message)
    if available.status != "True":
        return Verdict("Ready", "False", available.reason, available.message)
    if any(found.updated(role) != found.wanted[role] for role in ROLES):
        return Verdict("Ready", "False", progressing.reason, progressing.message)
    if found.router_wanted and not found.router_ready:
        text = f"no router pod is ready; {_why_not_ready(found)}"
        return Verdict("Ready", "False", Reason.ROUTER_NOT_READY, text)
    if fabric_ready.reason in (Reason.PAIRING, Reason.NOT_PAIRED):
        return Verdict("Ready", "False", fabric_ready.reason, fabric_ready.message)
    return Verdict("Ready", "True", Reason.READY, "requests are answered by pods of the newest revision")


def _without_facts(found: Findings) -> tuple[Reason, str]:
    if failure := _inspect_failure(found):
        return Reason.INSPECT_FAILED, f"the model's facts cannot be read: {failure}"
    waiting_for = found.inspection.waiting_for if found.inspection is not None else ""
    return Reason.INSPECTING, f"waiting for {waiting_for or 'the model to be looked at'}"


def _inspect_failure(found: Findings) -> str:
    return found.inspection.failure if found.inspection is not None else ""


def _why_not_ready(found: Findings) -> str:
    """The most useful thing to say about pods that are not ready."""
    if found.refusal is not None or found.misfit:
        return "see Reconciled"
    if found.pair is None:
        return _without_facts(found)[1]
    if found.trouble is not None:
        return found.trouble.message
    return _loading(found) or "pods are starting"


def _loading(found: Findings) -> str:
    percents = {role: found.loaded_percent(role) for role in ROLES}
    return ", ".join(
        f"{role} has loaded {at} % of its weights" for role, at in percents.items() if at is not None
    )


def _told(found: Findings) -> list[tuple[Obj, WorkerState]]:
    """Workers of the newest revisions that answered, by pod name."""
    own = [pod for role in ROLES for pod in pods.present(pods.of_role(found.pods, role))]
    newest = _newest(found)
    return [
        (pod, found.workers[uid_of(pod)])
        for pod in sorted(own, key=name_of)
        if pods.revision(pod) in newest and uid_of(pod) in found.workers
    ]


def _unpaired(found: Findings) -> Iterable[tuple[Obj, float]]:
    """Ready decode pods that say they have no prefill peer, though one is ready; and for how long one is. The
    longest first.
    """
    prefill = {
        key: min(pods.ready_since(pod) for pod in found.ready(Role.PREFILL) if pods.kv_key(pod) == key)
        for key in set(map(pods.kv_key, found.ready(Role.PREFILL)))
    }
    lonely = [
        (pod, found.now - max(pods.ready_since(pod), prefill[pods.kv_key(pod)]))
        for pod, state in _told(found)
        if _role(pod) == Role.DECODE
        and pods.is_ready(pod)
        and state.paired is False
        and pods.kv_key(pod) in prefill
    ]
    return sorted(lonely, key=lambda one: -one[1])


def _disagreements(found: Findings) -> Iterable[str]:
    for role in ROLES:
        for pod in pods.present(pods.of_role(found.pods, role)):
            state = found.workers.get(uid_of(pod))
            for peer, why in state.incompatible.items() if state is not None else ():
                yield f"{role} pod {name_of(pod)} stays apart from {peer}: {pods.brief(why)}"


def _newest(found: Findings) -> set[str]:
    return {found.pair.prefill.name, found.pair.decode.name} if found.pair is not None else set()


def _role(pod: Obj) -> str:
    return labels_of(pod)[names.LABEL_ROLE]
