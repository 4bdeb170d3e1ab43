"""Reads what one pass decides on.

Knows: which reads make an observation. Does not know: what is decided.

A read that fails fails the pass: a plan made on a partial view would delete or step on what it did not see.
What workers say is the exception: not being answered is a fact of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tandem_crds import names

from . import pods, timestamps
from .kube import NotFound
from .objects import CHILD_KINDS, POD, is_controlled_by, kind_of, labels_of, name_of, namespace_of, uid_of
from .observed import Observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .kube import Kube
    from .memory import Memory
    from .objects import Kind, Obj
    from .observed import Arrivals
    from .worker_facts import WorkerFacts

    Saw = Callable[[list[Obj]], None]  # hears of all that was read, so that a mute watch is noticed


async def observe(
    kube: Kube,
    facts: WorkerFacts,
    parent: Obj,
    memory: Memory,
    now: float,
    *,
    forbidden: tuple[str, ...] = (),
    saw: Saw = lambda found: None,
) -> Observed:
    """Raises KubeError."""
    name, namespace, uid = name_of(parent), namespace_of(parent), uid_of(parent)
    selector = f"{names.LABEL_MODEL}={name}"
    lists = await asyncio.gather(*(kube.list(kind, namespace, selector) for kind in (*CHILD_KINDS, POD)))
    *of_kinds, all_pods = lists
    saw([parent, *(one for found in lists for one in found)])
    children: dict[Kind, tuple[Obj, ...]] = {}
    foreign: list[Obj] = []
    for kind, found in zip(CHILD_KINDS, of_kinds, strict=True):
        children[kind] = tuple(one for one in found if is_controlled_by(one, uid))
        foreign += [one for one in found if not is_controlled_by(one, uid)]
    owners = {uid_of(one) for found in children.values() for one in found}
    own_pods = tuple(pod for pod in all_pods if _belongs(pod, owners))
    await ask_workers(facts, own_pods, memory, now)
    return Observed(
        parent=parent,
        children=children,
        pods=own_pods,
        foreign=tuple(foreign),
        workers=memory.known(map(uid_of, own_pods)),
        arrivals=await _arrivals(facts, parent, own_pods, memory, now),
        recommendations=tuple(memory.recommendations),
        watched_s=now - memory.since,
        peer_secret_exists=memory.has_secret(_age_s(parent, now), now),
        forbidden=forbidden,
    )


def _belongs(pod: Obj, owners: set[str]) -> bool:
    """Pods are owned by a ReplicaSet, which is not looked at, or by a Job of ours. A pod with our labels that
    something else controls is not ours.
    """
    references = pod["metadata"].get("ownerReferences") or ()
    controller = next((one for one in references if one.get("controller")), None)
    if controller is None:
        return False
    return controller["kind"] == "ReplicaSet" or controller["uid"] in owners


async def find_foreign(kube: Kube, observed: Observed, bodies: Iterable[Obj]) -> tuple[Obj, ...]:
    """Objects at the names of bodies about to be created that carry no label of ours: looked up one by one,
    since the lists do not show them. Raises KubeError.
    """
    known = {
        (kind_of(one), name_of(one))
        for found in (*observed.children.values(), observed.foreign)
        for one in found
    }
    absent = [body for body in bodies if (kind_of(body), name_of(body)) not in known]
    found = await asyncio.gather(*(_look_up(kube, body) for body in absent))
    return tuple(one for one in found if one is not None and not observed.owns(one))


async def _look_up(kube: Kube, body: Obj) -> Obj | None:
    try:
        return await kube.get(kind_of(body), namespace_of(body), name_of(body))
    except NotFound:
        return None


async def ask_workers(
    facts: WorkerFacts,
    own_pods: Iterable[Obj],
    memory: Memory,
    now: float,
    *,
    only: frozenset[str] | None = None,
) -> None:
    """Those whose state is too old; or, whatever its age, those of the pods named in `only`."""
    workers = {
        uid_of(pod): pod
        for pod in pods.present(own_pods)
        if names.LABEL_ROLE in labels_of(pod) and pods.address(pod)
    }
    if only is None:
        due = memory.due({uid: pods.is_ready(pod) for uid, pod in workers.items()}, now)
    else:
        due = {uid for uid, pod in workers.items() if name_of(pod) in only}
    if due:
        memory.heard(await facts.states({uid: pods.address(workers[uid]) for uid in sorted(due)}), now)


async def _arrivals(
    facts: WorkerFacts, parent: Obj, own_pods: tuple[Obj, ...], memory: Memory, now: float
) -> Arrivals | None:
    if ((parent.get("spec") or {}).get("scaling") or {}).get("mode") != "QPS":
        return None
    routers = {
        uid_of(pod): pods.address(pod)
        for pod in pods.of_router(own_pods, name_of(parent))
        if pods.is_ready(pod) and pods.address(pod)
    }
    for uid, count in (await facts.arrivals(routers)).items():
        memory.samples.add(uid, now, count)
    return memory.samples.arrivals(routers, now)


def _age_s(parent: Obj, now: float) -> float:
    created = parent["metadata"].get("creationTimestamp")
    return now - timestamps.seconds(created) if created else 0.0
