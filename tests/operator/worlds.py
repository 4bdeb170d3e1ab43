"""A small world to run plans in: what executing a plan makes of it, and what a cluster then does.

Knows: names, owners, the controllers' outcome. Does not know: the API's rules: it believes every body.

Time is a number that moves only when told. Pods start or end one tick after they are made or told to go.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import yaml

from tandem_crds.role_config import ModelFacts
from tandem_operator.desired import desired
from tandem_operator.generations import AVAILABLE_S
from tandem_operator.objects import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    is_terminating,
    kind_of,
    labels_of,
    name_of,
    owner_reference,
    uid_of,
)
from tandem_operator.observed import Observed, WorkerState
from tandem_operator.settings import Settings
from tandem_operator.timestamps import text

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tandem_operator.objects import Kind, Obj
    from tandem_operator.observed import Arrivals
    from tandem_operator.plan import Plan

START = 1_800_000_000.0

FACTS = ModelFacts(
    uri="pvc://models/smollm2",
    weights_id="sha256-0123456789abcdef",
    architecture="LlamaForCausalLM",
    layers=30,
    hidden_size=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    dtype="bfloat16",
    weights_nbytes=269_060_552,
    eos_token_ids=[2],
    has_chat_template=True,
    wire_version=1,
    role_config_version=1,
)

MANIFEST = """
apiVersion: tandem.dev/v1alpha1
kind: DisaggregatedModel
metadata: {name: smollm2, namespace: default, uid: parent-1, generation: 1}
spec:
  model: {uri: "pvc://models/smollm2"}
  accelerator: {type: CPU}
  prefill: {replicas: 1}
  decode: {replicas: 2}
"""


def settings(image: str = "registry.example/tandem:1", **changes: Any) -> Settings:
    return Settings.model_validate({"runtime": {"image": image, **changes.pop("runtime", {})}, **changes})


def manifest(**spec: Any) -> Obj:
    """The example with parts of its spec replaced."""
    parent: Obj = yaml.safe_load(MANIFEST)
    parent["spec"].update(spec)
    return parent


class World:
    """One model and what belongs to it."""

    def __init__(self, parent: Obj | None = None) -> None:
        self.parent = parent or manifest()
        self.objects: dict[tuple[Kind, str], Obj] = {}
        self.pods: dict[str, Obj] = {}
        self.foreign: list[Obj] = []
        self.workers: dict[str, WorkerState] = {}
        self.arrivals: Arrivals | None = None
        self.recommendations: list[tuple[float, int]] = []
        self.peer_secret = False
        self.now = START
        self.costs: dict[str, int] = {}
        self.events: list[str] = []
        self.writes = 0
        self.facts = FACTS
        self.inspection: Callable[[], Obj] = lambda: ended(0, self.facts.model_dump_json())
        self.becomes_ready: Callable[[Obj], bool] = lambda pod: True
        self._serial = 0

    # What the operator sees and does.

    def observe(self, shuffle: random.Random | None = None) -> Observed:
        children = {
            kind: [one for (of, _), one in self.objects.items() if of == kind] for kind in CHILD_KINDS
        }
        pods = list(self.pods.values())
        if shuffle is not None:
            shuffle.shuffle(pods)
            for ones in children.values():
                shuffle.shuffle(ones)
        return copy.deepcopy(
            Observed(
                parent=self.parent,
                children={kind: tuple(ones) for kind, ones in children.items()},
                pods=tuple(pods),
                foreign=tuple(self.foreign),
                workers=dict(self.workers),
                arrivals=self.arrivals,
                recommendations=tuple(self.recommendations),
                watched_s=self.now - START,
                peer_secret_exists=self.peer_secret,
            )
        )

    def plan(self, with_settings: Settings | None = None) -> Plan:
        return desired(self.observe(), with_settings or settings(), self.now)

    def execute(self, plan: Plan) -> bool:
        """Carries the plan out; whether anything changed."""
        before = self.writes
        if plan.peer_secret is not None:
            self.peer_secret = True
            self.writes += 1
        self.costs.update(plan.pod_costs or {})
        for body in plan.apply:
            self._apply(copy.deepcopy(body))
        for deletion in plan.delete:
            assert uid_of(self.objects[deletion.kind, deletion.name]) == deletion.uid
            self.remove(deletion.kind, deletion.name)
        if plan.decode_replicas is not None:
            self.edit(decode={**self.parent["spec"]["decode"], "replicas": plan.decode_replicas})
        if plan.recommendation is not None:
            self.recommendations.append((self.now, plan.recommendation))
        if plan.status is not None and plan.status != self.parent.get("status"):
            self.parent["status"] = json.loads(json.dumps(plan.status))
            self.writes += 1
        self.events += [event.reason for event in plan.events]
        return self.writes > before

    def run(self, with_settings: Settings | None = None) -> bool:
        return self.execute(self.plan(with_settings))

    def settle(self, with_settings: Settings | None = None, passes: int = 200) -> None:
        """Passes and ticks until nothing has changed for longer than the operator lets pods settle."""
        quiet = 0
        for _ in range(passes):
            changed = self.run(with_settings)
            moved = self.tick()
            quiet = 0 if changed or moved else quiet + 1
            if quiet > AVAILABLE_S:
                return
        raise AssertionError(f"still moving after {passes} passes: {self.conditions()}")

    # What people do.

    def edit(self, **spec: Any) -> None:
        self.parent["spec"].update(spec)
        self.parent["metadata"]["generation"] += 1
        self.writes += 1

    def remove(self, kind: Kind, name: str) -> None:
        """With what the object owns, as garbage collection does."""
        gone = self.objects.pop((kind, name))
        self.writes += 1
        for pod in self.pods.values():
            if pod["metadata"]["ownerReferences"][0]["uid"] == uid_of(gone):
                self._end(pod)

    # What a cluster does.

    def tick(self) -> bool:
        """One round of the controllers, the scheduler and the kubelets; whether anything moved."""
        before = json.dumps(self.pods, sort_keys=True)
        self.now += 1
        for name in [name for name, pod in self.pods.items() if is_terminating(pod)]:
            del self.pods[name]
        for pod in self.pods.values():
            self._progress(pod)
        for (kind, _), one in list(self.objects.items()):
            if kind == DEPLOYMENT:
                self._scale(one)
            elif kind == JOB and not self._of(one):
                self._start(one)
        return json.dumps(self.pods, sort_keys=True) != before

    # What a test asks.

    def condition(self, kind: str) -> tuple[str, str]:
        one = self.message_of(kind)
        return one["status"], one["reason"]

    def message(self, kind: str) -> str:
        return str(self.message_of(kind)["message"])

    def message_of(self, kind: str) -> Obj:
        return next(one for one in self.parent["status"]["conditions"] if one["type"] == kind)

    def conditions(self) -> dict[str, str]:
        return {
            one["type"]: f"{one['status']}/{one['reason']}" for one in self.parent["status"]["conditions"]
        }

    def names(self, kind: Kind) -> list[str]:
        return sorted(name for of, name in self.objects if of == kind)

    def named(self, kind: Kind, name: str) -> Obj:
        return self.objects[kind, name]

    def of_role(self, role: str) -> list[Obj]:
        return [pod for pod in self.pods.values() if labels_of(pod).get("tandem.dev/role") == role]

    def deployments(self, role: str) -> list[Obj]:
        return [self.objects[DEPLOYMENT, name] for name in self.names(DEPLOYMENT) if f"-{role}-" in name]

    def revisions(self, role: str) -> list[str]:
        """Revisions whose ConfigMap is kept."""
        return [name.rpartition("-")[2] for name in self.names(CONFIG_MAP) if f"-{role}-" in name]

    def _apply(self, body: Obj) -> None:
        kind, name = kind_of(body), name_of(body)
        before = self.objects.get((kind, name))
        if before is None:
            self._serial += 1
            body["metadata"] |= {"uid": f"{name}-{self._serial}", "creationTimestamp": text(self.now)}
        else:
            for field in ("uid", "creationTimestamp"):
                body["metadata"][field] = before["metadata"][field]
            if "status" in before:
                body["status"] = before["status"]
            if before.get("immutable"):
                assert body.get("data") == before.get("data"), f"{name} is immutable"
        if body != before:
            self.objects[kind, name] = body
            self.writes += 1

    def _of(self, owner: Obj) -> list[Obj]:
        uid = uid_of(owner)
        return [pod for pod in self.pods.values() if pod["metadata"]["ownerReferences"][0]["uid"] == uid]

    def _scale(self, deployment: Obj) -> None:
        """Down: the not ready first, then the cheapest, as a ReplicaSet does."""
        own = [pod for pod in self._of(deployment) if not is_terminating(pod)]
        spare = sorted(own, key=lambda pod: (is_up(pod), self.costs.get(name_of(pod), 0), name_of(pod)))
        for pod in spare[: max(0, len(own) - deployment["spec"]["replicas"])]:
            self._end(pod)
        for _ in range(deployment["spec"]["replicas"] - len(own)):
            self._start(deployment)

    def _start(self, owner: Obj) -> None:
        self._serial += 1
        name = f"{name_of(owner)}-{self._serial:05d}"
        self.pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}",
                "labels": dict(owner["spec"]["template"]["metadata"].get("labels", {})),
                "ownerReferences": [{**owner_reference(owner), "kind": owner["kind"]}],
            },
            "spec": {},
            "status": {"phase": "Pending"},
        }

    def _end(self, pod: Obj) -> None:
        pod["metadata"]["deletionTimestamp"] = text(self.now)

    def _progress(self, pod: Obj) -> None:
        if labels_of(pod).get("app.kubernetes.io/component") == "inspect":
            if "containerStatuses" not in pod["status"]:
                pod["status"] = status(container("inspect", terminated=self.inspection()))
        elif pod["status"] == {"phase": "Pending"} and self.becomes_ready(pod):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": text(self.now)}
            pod["status"] = {"phase": "Running", "conditions": [ready]}


def is_up(pod: Obj) -> bool:
    return any(one["type"] == "Ready" for one in pod["status"].get("conditions", ()))


def ended(code: int, message: str = "", **more: str) -> Obj:
    return {"exitCode": code, "message": message, "finishedAt": text(START), **more}


def container(
    name: str, *, image: str = "registry.example/tandem:1", last: Obj | None = None, **state: Obj
) -> Obj:
    """A container's status: `waiting={…}`, `running={}` or `terminated=ended(…)`."""
    return {"name": name, "image": image, "state": state, "lastState": {"terminated": last} if last else {}}


def status(*containers: Obj, phase: str = "Pending", conditions: tuple[Obj, ...] = (), **more: Any) -> Obj:
    return {"phase": phase, "conditions": list(conditions), "containerStatuses": list(containers), **more}
