"""From a manifest to the workers that the embedded mode runs. Pure but for reading the model's headers.

Knows: roles, replicas, names. Does not know: processes, ports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_crds.role_config import Role, RoleConfig, build_role_config

if TYPE_CHECKING:
    from pathlib import Path

    from tandem_crds.model import DisaggregatedModel
    from tandem_crds.role_config import ModelFacts


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker of the deployment: its name, and the configuration it shares with its role.

    `cpus` are the only cores its processes may run on, as a kubelet's cpuset would have it; None: all.
    """

    name: str
    config: RoleConfig
    cpus: frozenset[int] | None = None


def plan_workers(
    model: DisaggregatedModel,
    facts: ModelFacts,
    model_path: Path,
    *,
    mixed: bool,
    providers: list[str] | None,
) -> list[WorkerPlan]:
    """The manifest's workers; with `mixed` as many workers of role mixed instead. `providers` overrides the
    fabric profile's.
    """
    counts = {Role.PREFILL: model.spec.prefill_replicas, Role.DECODE: model.spec.decode.replicas}
    if mixed:
        counts = {Role.MIXED: sum(counts.values())}
    workers = []
    for role, count in counts.items():
        config = build_role_config(model, facts, role, str(model_path))
        if providers:
            config = config.model_copy(
                update={"fabric": config.fabric.model_copy(update={"providers": providers})}
            )
        workers += [
            WorkerPlan(f"{model.metadata.name}-{role.value}-{index}", config) for index in range(count)
        ]
    return workers
