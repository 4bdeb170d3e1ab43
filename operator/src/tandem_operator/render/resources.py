"""What a worker's container asks for: CPUs, memory, GPUs, NICs.

Knows: the spec, the model's size, the profile. Does not know: nodes.

A GPU pod gets requests equal to limits and whole CPUs, hence Guaranteed QoS: without it the kubelet's CPU,
memory and topology managers align nothing, and a NIC ends up on the other socket than its GPU.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tandem_crds import quantity, sizing
from tandem_crds.role_config import Role

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel
    from tandem_crds.role_config import RoleConfig

    from ..objects import Obj
    from ..settings import FabricProfile

# Beside each GPU: a rank's process and its share of lead, fabric threads and server.
CPUS_PER_GPU = 8
# Of a GPU pod where the manifest names no memory: the weights pass through the page cache while they load.
_BASE_GIB, _WEIGHTS_SHARE = 32, 4


def resources(model: DisaggregatedModel, role: Role, config: RoleConfig, profile: FabricProfile) -> Obj:
    spec = model.spec
    settings = spec.prefill if role is Role.PREFILL else spec.decode
    limits = {name: str(value) for name, value in settings.resources.limits.items()}
    requests = limits | {name: str(value) for name, value in settings.resources.requests.items()}
    gpus = sizing.replica_gpus(spec, settings)
    if gpus:
        nbytes = config.model.weights_nbytes // _WEIGHTS_SHARE
        limits = {
            "cpu": str(CPUS_PER_GPU * gpus),
            "memory": f"{_BASE_GIB + ceil(nbytes / 2**30)}Gi",
            **requests,
            **limits,
            spec.accelerator.resource_name: str(gpus),
        }
        limits["cpu"] = str(ceil(quantity.parse(limits["cpu"])))
        if profile.resource_name:
            limits[profile.resource_name] = str(sizing.replica_nics(spec, settings, profile.nics_per_gpu))
        if profile.hugepages_2mi:
            limits["hugepages-2Mi"] = profile.hugepages_2mi
        requests = limits
    asked: Obj = {}
    if limits:
        asked["limits"] = dict(sorted(limits.items()))
    if requests:
        asked["requests"] = dict(sorted(requests.items()))
    return asked


def threads_per_rank(asked: Obj, ranks: int) -> int | None:
    """CPUs over ranks, at least 1; None where the container may use whatever there is."""
    cpus = asked.get("limits", {}).get("cpu") or asked.get("requests", {}).get("cpu")
    return None if cpus is None else max(1, int(quantity.parse(cpus) // ranks))
