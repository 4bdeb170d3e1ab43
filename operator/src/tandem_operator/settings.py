"""What an installation decides: the operator's configuration file, written by the Helm chart.

Knows: every setting, its default and its bounds. Does not know: any DisaggregatedModel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from tandem_crds.pod_template import PodTemplate

if TYPE_CHECKING:
    from pathlib import Path


class SettingsError(ValueError):
    """The configuration file is wrong. One line that names the field, its value and what is allowed."""


class Setting(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="forbid", frozen=True
    )


class FabricProfile(Setting):
    """How pods of a profile reach the network: devices, annotations, environment, memory."""

    providers: tuple[str, ...]  # libfabric providers in order of preference
    resource_name: str = ""  # extended resource of one NIC; empty: none is asked for
    nics_per_gpu: int = Field(0, ge=0, le=16, alias="nicsPerGPU")
    nic_gbit_per_s: int = Field(0, ge=0)
    annotations: dict[str, str] = {}
    env: dict[str, str] = {}
    shm_size: str = ""  # of /dev/shm; empty: the container runtime's 64 MiB
    hugepages_2mi: str = Field("", alias="hugepages2Mi")
    separate_hosts: bool = False  # prefill and decode never share a node (EFA has no loopback between pods)
    memlock: Literal["NodeUnlimited", "RootCapability"] = "NodeUnlimited"


BUILT_IN_PROFILES = {
    "tcp": FabricProfile(providers=("net", "tcp")),
    "efa": FabricProfile(
        providers=("efa",),
        resource_name="vpc.amazonaws.com/efa",
        nics_per_gpu=4,  # p5.48xlarge: 32 devices, 8 GPUs
        nic_gbit_per_s=100,
        env={"FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"},
        shm_size="16Gi",
        hugepages_2mi="5120Mi",
        separate_hosts=True,
    ),
    "roce": FabricProfile(
        providers=("verbs",), resource_name="rdma/hca", nics_per_gpu=1, nic_gbit_per_s=400, shm_size="16Gi"
    ),
    "infiniband": FabricProfile(
        providers=("verbs",), resource_name="rdma/ib", nics_per_gpu=1, nic_gbit_per_s=400, shm_size="16Gi"
    ),
}


class RuntimeSettings(Setting):
    """What every pod of every model gets unless its manifest says otherwise."""

    image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    env: tuple[dict[str, Any], ...] = ()  # as in a container
    pod_template: PodTemplate = {}  # laid under the manifest's podTemplate, over the generated one


class ScalingSettings(Setting):
    """Times of the QPS autoscaler, in seconds."""

    period_s: float = Field(15.0, ge=1, le=300, alias="periodSeconds")  # between two decisions
    rate_window_s: float = Field(30.0, ge=2, le=3600, alias="rateWindowSeconds")  # of counted arrivals
    stale_s: float = Field(60.0, ge=2, le=3600, alias="staleSeconds")  # older arrivals decide nothing
    # A scale-down goes to the highest recommendation of that long.
    down_window_s: float = Field(300.0, ge=0, le=3600, alias="downWindowSeconds")


class Settings(Setting):
    runtime: RuntimeSettings
    scaling: ScalingSettings = ScalingSettings()
    namespaces: tuple[str, ...] = ()  # to watch; empty: all
    profiles: dict[str, FabricProfile] = {}  # replace or add to the built-in ones
    # A replica lives in one pod so far: one that needs more devices than a node has is refused, not pending.
    gpus_per_node: int = Field(8, ge=1, le=64, alias="gpusPerNode")
    resync_s: float = Field(600.0, gt=0, alias="resyncSeconds")
    workers: int = Field(4, ge=1, le=64)  # models reconciled at once

    def profile(self, name: str) -> FabricProfile | None:
        return self.profiles.get(name) or BUILT_IN_PROFILES.get(name)

    def profile_names(self) -> list[str]:
        return sorted({**BUILT_IN_PROFILES, **self.profiles})


def load_settings(path: Path) -> Settings:
    """Reads the YAML file. Raises SettingsError."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from error
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"{path}: {where} is {first['input']!r}: {first['msg']}") from error
