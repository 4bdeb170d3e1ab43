"""Where pods may run: pack, spread, and hosts that two roles must not share.

Knows: `spec.topology` and the profile's `separate_hosts`. Does not know: nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names
from tandem_crds.role_config import Role

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel

    from ..objects import Obj
    from ..settings import FabricProfile

HOSTNAME = "kubernetes.io/hostname"


def placement(model: DisaggregatedModel, role: Role, profile: FabricProfile) -> Obj:
    """The parts of a pod's spec that place it; empty where nothing is asked."""
    placed: Obj = {}
    if affinity := _affinity(model, role, profile):
        placed["affinity"] = affinity
    if (spread := model.spec.topology.spread) is not None:
        placed["topologySpreadConstraints"] = [
            {
                "topologyKey": spread.key,
                "maxSkew": spread.max_skew,
                "whenUnsatisfiable": "DoNotSchedule" if spread.mode == "Required" else "ScheduleAnyway",
                "labelSelector": {"matchLabels": _selector(model, role)},
            }
        ]
    return placed


def _affinity(model: DisaggregatedModel, role: Role, profile: FabricProfile) -> Obj:
    affinity: Obj = {}
    if (pack := model.spec.topology.pack) is not None:
        # Both roles look for pods of the model, of either role: the first pod chooses the domain.
        together = {"topologyKey": pack.key, "labelSelector": _workers(model)}
        expression = {"key": pack.key, "operator": "In", "values": sorted(pack.values)}
        if pack.mode == "Required":
            affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [together]}
            if pack.values:
                affinity["nodeAffinity"] = {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [expression]}]
                    }
                }
        else:
            affinity["podAffinity"] = {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 100, "podAffinityTerm": together}
                ]
            }
            if pack.values:
                affinity["nodeAffinity"] = {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 100, "preference": {"matchExpressions": [expression]}}
                    ]
                }
    if profile.separate_hosts:
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        apart = {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": _selector(model, other)}}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    return affinity


def _selector(model: DisaggregatedModel, role: Role) -> dict[str, str]:
    return {names.LABEL_MODEL: model.metadata.name, names.LABEL_ROLE: role.value}


def _workers(model: DisaggregatedModel) -> Obj:
    return {
        "matchLabels": {names.LABEL_MODEL: model.metadata.name},
        "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "Exists"}],
    }
