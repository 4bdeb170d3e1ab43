"""One pass over one model: observe, decide, execute; and what happens when a pass fails.

Knows: the order of a pass and the meaning of its errors. Does not know: HTTP, kopf, what is decided.

 1. GET the model. Gone: its memory goes.
 2. Observe.
 3. Decide. Objects that would be created are looked up by name first: one that is somebody else's is told,
    never adopted. Workers that a scale-down could end are asked anew, then it is decided again.
 4. Execute, in the plan's order. What the server refused is decided once more, for the status alone.
 5. The status, then the events of its transitions: strictly after, so that a transition is told once.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .arrivals import ArrivalSamples
from .execute import Executor
from .kube import Conflict, Forbidden, KubeError, NotFound, Unavailable
from .memory import REJECTED_S, Memory
from .objects import MODEL, is_terminating, kind_of, name_of, namespace_of, uid_of
from .observe import ask_workers, find_foreign, observe

if TYPE_CHECKING:
    from collections.abc import Callable

    from .kube import Kube
    from .metrics import Metrics
    from .objects import Obj
    from .observed import Observed
    from .plan import Plan
    from .recorder import Recorder
    from .settings import Settings
    from .work_queue import WorkQueue
    from .worker_facts import WorkerFacts

Key = tuple[str, str]  # namespace, name

log = logging.getLogger(__name__)


class Reconciler:
    """Takes keys from the queue. Passes of different models may overlap, those of one never do."""

    def __init__(
        self,
        kube: Kube,
        facts: WorkerFacts,
        recorder: Recorder,
        metrics: Metrics,
        settings: Settings,
        decide: Callable[[Observed, Settings, float], Plan],
        *,
        forbidden: Callable[[], tuple[str, ...]] = tuple,
        saw: Callable[[Key, list[Obj]], None] = lambda key, found: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube, self._facts, self._recorder, self._metrics = kube, facts, recorder, metrics
        self._settings, self._decide, self._forbidden, self._saw = settings, decide, forbidden, saw
        self._clock, self._executor = clock, Executor(kube, metrics)
        self._memories: dict[Key, tuple[str, Memory]] = {}

    async def work(self, queue: WorkQueue[Key]) -> None:
        """Until the queue is closed and empty. The only place where a bug in a pass is caught: other models
        go on, and this one is tried again ever more slowly.
        """
        while True:
            key = await queue.get()
            try:
                with self._metrics.pass_seconds.time():
                    result = await self._attempt(key, queue)
                self._metrics.passes.labels(result=result).inc()
            finally:
                queue.done(key)

    async def _attempt(self, key: Key, queue: WorkQueue[Key]) -> str:
        namespace, name = key
        try:
            again_s = await self.reconcile(namespace, name)
        except Conflict as error:
            log.debug("%s/%s: looking again: %s", namespace, name, error)
            queue.retry(key)
            return "conflict"
        except Forbidden as error:
            if error.terminating:
                return "gone"
            log.warning("%s/%s: %s", namespace, name, error)
            queue.retry(key)
            return "forbidden"
        except KubeError as error:
            after_s = error.after_s if isinstance(error, Unavailable) else None
            wait_s = queue.retry(key, after_s or 0.0)
            log.warning("%s/%s: again in %.1f s: %s", namespace, name, wait_s, error)
            return "retry"
        except Exception:
            log.exception("%s/%s: a pass failed for a reason that should not exist", namespace, name)
            queue.retry(key)
            return "bug"
        queue.forget(key)
        if again_s is not None:
            queue.add_after(key, again_s * random.uniform(0.9, 1.1))
        return "ok"

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """When to look again even if nothing happens, in seconds. Raises KubeError."""
        try:
            parent = await self._kube.get(MODEL, namespace, name)
        except NotFound:
            self._memories.pop((namespace, name), None)
            self._saw((namespace, name), [])
            return None
        if is_terminating(parent):
            return None
        now = self._clock()
        memory = self._memory(parent, now)
        observed = await observe(
            self._kube,
            self._facts,
            parent,
            memory,
            now,
            forbidden=self._forbidden(),
            saw=lambda found: self._saw((namespace, name), found),
        )
        observed, plan = await self._decided(observed, memory, now)
        parent = await self._execute(observed, plan, memory, now)
        memory.recommend(plan.recommendation, now)
        if rejected := memory.rejections(self._wanted(plan)):
            plan = replace(
                self._decide(replace(observed, rejected=rejected), self._settings, now),
                requeue_s=plan.requeue_s,
            )
        if plan.status is not None:
            await self._executor.status(parent, plan.status)
        for event in plan.events:
            await self._recorder.record(parent, event)
        waits = [plan.requeue_s, REJECTED_S if rejected else None]
        return min((wait for wait in waits if wait is not None), default=None)

    async def _decided(self, observed: Observed, memory: Memory, now: float) -> tuple[Observed, Plan]:
        plan = self._decide(observed, self._settings, now)
        if found := await find_foreign(self._kube, observed, plan.apply):
            observed = replace(observed, foreign=(*observed.foreign, *found))
            plan = self._decide(observed, self._settings, now)
        if plan.pod_costs:
            candidates = frozenset(plan.pod_costs)
            await ask_workers(self._facts, observed.pods, memory, now, only=candidates)
            observed = replace(observed, workers=memory.known(map(uid_of, observed.pods)))
            plan = self._decide(observed, self._settings, now)
        return observed, plan

    async def _execute(self, observed: Observed, plan: Plan, memory: Memory, now: float) -> Obj:
        """The parent as it is now."""
        parent = observed.parent
        if plan.peer_secret is not None:
            await self._executor.peer_secret(parent, plan.peer_secret, memory, now)
        if plan.pod_costs:
            await self._executor.pod_costs(observed, plan.pod_costs)
        await self._executor.apply(observed, plan.apply, memory, now)
        await self._executor.delete(namespace_of(parent), plan.delete)
        if plan.decode_replicas is not None:
            return await self._executor.scale_decode(parent, plan.decode_replicas)
        return parent

    def _wanted(self, plan: Plan) -> list[tuple[str, str]]:
        wanted = [(kind_of(body).kind, name_of(body)) for body in plan.apply]
        return [*wanted, ("Secret", plan.peer_secret)] if plan.peer_secret is not None else wanted

    def _memory(self, parent: Obj, now: float) -> Memory:
        """Of that very model, not of an earlier one of its name."""
        key = namespace_of(parent), name_of(parent)
        known = self._memories.get(key)
        if known is not None and known[0] == uid_of(parent):
            return known[1]
        memory = Memory(now, samples=ArrivalSamples(self._settings.scaling.rate_window_s))
        self._memories[key] = uid_of(parent), memory
        return memory
