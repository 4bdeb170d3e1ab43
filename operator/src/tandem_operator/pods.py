"""What a pod's status says: whose it is, whether it is ready, and what keeps it from being so.

Knows: the status that kubelets and the scheduler write. Does not know: rollouts, conditions.

A trouble's text must stand still while the trouble lasts, for every change of it is a write: kubelets
alternate between `ErrImagePull` and `ImagePullBackOff`, a crashing container between waiting and running.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_crds import names

from . import timestamps
from .objects import is_terminating, labels_of, name_of
from .reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tandem_crds.role_config import Role

    from .objects import Obj

EXIT_REFUSED = 2  # a worker, `inspect` and `fetch` exit with it when trying again cannot help
TEXT_LENGTH = 600  # of what others wrote, inside a message

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
_CREATE = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
_insufficient = re.compile(r"Insufficient ([\w./-]*\w)")

# The worst first.
TROUBLES = (
    Reason.WORKER_REFUSED,
    Reason.MODEL_NOT_FETCHED,
    Reason.IMAGE_NOT_PULLED,
    Reason.CONTAINER_NOT_CREATED,
    Reason.OUT_OF_MEMORY,
    Reason.WORKER_EXITED,
    Reason.POD_FAILED,
    Reason.PODS_NOT_CREATED,
    Reason.UNSCHEDULABLE,
    Reason.SCHEDULING_GATED,
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps a pod from being ready, and what to do about it, in one line."""

    reason: Reason
    pod: str
    message: str

    def sort_key(self) -> tuple[int, str, str]:
        return TROUBLES.index(self.reason), self.pod, self.message


def worst(troubles: Iterable[Trouble]) -> Trouble | None:
    """The same one whatever the order, so that a condition does not flap between two."""
    return min(troubles, key=Trouble.sort_key, default=None)


def of_role(pods: Iterable[Obj], role: Role) -> list[Obj]:
    return [pod for pod in pods if labels_of(pod).get(names.LABEL_ROLE) == role.value]


def of_router(pods: Iterable[Obj], model: str) -> list[Obj]:
    component = names.labels(model, names.ROUTER)["app.kubernetes.io/component"]
    return [pod for pod in pods if labels_of(pod).get("app.kubernetes.io/component") == component]


def revision(pod: Obj) -> str | None:
    return labels_of(pod).get(names.LABEL_REVISION)


def kv_key(pod: Obj) -> str:
    return labels_of(pod).get(names.LABEL_KV_KEY, "")


def of_owner(pods: Iterable[Obj], uid: str) -> list[Obj]:
    return [
        pod for pod in pods if any(one["uid"] == uid for one in pod["metadata"].get("ownerReferences") or ())
    ]


def present(pods: Iterable[Obj]) -> list[Obj]:
    """Those that count: neither going nor ended (an evicted pod stays as a record)."""
    return [pod for pod in pods if not is_terminating(pod) and phase(pod) not in ("Failed", "Succeeded")]


def address(pod: Obj) -> str:
    """Its IP, or empty while it has none."""
    return str((pod.get("status") or {}).get("podIP") or "")


def phase(pod: Obj) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def condition(obj: Obj, kind: str) -> Obj:
    """The condition of that type, or an empty one."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})


def is_ready(pod: Obj) -> bool:
    return not is_terminating(pod) and condition(pod, "Ready").get("status") == "True"


def ready_since(pod: Obj) -> float:
    """Unix seconds; 0 where it is not told."""
    return timestamps.seconds(condition(pod, "Ready").get("lastTransitionTime") or "1970-01-01T00:00:00Z")


def is_unschedulable(pod: Obj) -> bool:
    scheduled = condition(pod, "PodScheduled")
    return scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"


def trouble(pod: Obj) -> Trouble | None:
    """The worst of what keeps the pod from being ready; None if it is ready, going, or only on its way."""
    if is_terminating(pod) or is_ready(pod):
        return None
    name = name_of(pod)
    return worst(Trouble(reason, name, f"pod {name} {text}") for reason, text in _troubles(pod))


def ended(pod: Obj, container: str) -> Obj | None:
    """How a container last ended, if it ever did: `exitCode`, `reason`, `message`."""
    for status in _container_statuses(pod):
        if status["name"] == container:
            return _last_end(status)
    return None


def brief(text: str) -> str:
    """One line of bounded length out of what somebody else wrote."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LENGTH else f"{line[: TEXT_LENGTH - 1]}…"


def _troubles(pod: Obj) -> Iterator[tuple[Reason, str]]:
    status = pod.get("status") or {}
    if status.get("phase") == "Failed":
        yield (
            Reason.POD_FAILED,
            f"failed: {status.get('reason', 'no reason given')}: {brief(status.get('message', ''))}",
        )
    yield from _scheduling(pod)
    for container in _container_statuses(pod):
        yield from _container(pod, container)


def _scheduling(pod: Obj) -> Iterator[tuple[Reason, str]]:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return
    text = brief(str(scheduled.get("message", "")).split(" preemption:")[0])
    if scheduled.get("reason") == "SchedulingGated":
        gates = sorted(gate["name"] for gate in pod["spec"].get("schedulingGates") or ())
        yield (
            Reason.SCHEDULING_GATED,
            f"is held by the scheduling gate {', '.join(gates)}; whoever set it must lift it",
        )
    elif scheduled.get("reason") == "Unschedulable":
        lacking = sorted(set(_insufficient.findall(text)))
        why = f"no node has enough free {', '.join(lacking)}" if lacking else "no node fits"
        yield Reason.UNSCHEDULABLE, f"cannot be scheduled: {why}; the scheduler says: {text}"


def _container(pod: Obj, status: Obj) -> Iterator[tuple[Reason, str]]:
    name = status["name"]
    waiting = (status.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in _IMAGE:
        yield (
            Reason.IMAGE_NOT_PULLED,
            f"cannot pull image {status.get('image')}{_pull_error(waiting)}; check the image's name "
            "(spec.runtime.image, else the operator's default) and spec.runtime.imagePullSecrets",
        )
    elif waiting.get("reason") in _CREATE:
        yield (
            Reason.CONTAINER_NOT_CREATED,
            f"cannot create container {name}: {brief(waiting.get('message', waiting['reason']))}",
        )
    end = _last_end(status)
    if end is None or end["exitCode"] == 0:
        return
    if end.get("reason") == "OOMKilled":
        yield (
            Reason.OUT_OF_MEMORY,
            f"was killed: container {name} used more memory than its limit; raise resources.limits.memory "
            "of its role",
        )
        return
    text = brief(end.get("message", ""))
    said = f'"{text}"' if text else f"nothing; see kubectl logs {name_of(pod)} -c {name} --previous"
    if name == "model":
        yield (
            Reason.MODEL_NOT_FETCHED,
            f"cannot fetch the model: it exited with {end['exitCode']} and said {said}",
        )
    elif end["exitCode"] == EXIT_REFUSED:
        yield Reason.WORKER_REFUSED, f"refuses to start: container {name} said {said}"
    else:
        yield (
            Reason.WORKER_EXITED,
            f"does not stay up: container {name} exited with {end['exitCode']} and said {said}",
        )


def _pull_error(waiting: Obj) -> str:
    """What the registry said, without the kubelet's own words before it, which change from try to try."""
    _, found, said = str(waiting.get("message", "")).rpartition("rpc error: ")
    return f" ({brief(said)})" if found else ""


def _container_statuses(pod: Obj) -> list[Obj]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _last_end(status: Obj) -> Obj | None:
    end: Obj | None = (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get(
        "terminated"
    )
    return end
