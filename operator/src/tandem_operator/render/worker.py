"""The pod of a prefill or decode worker, by the contract of `docs/design/020-operator.md`.

Knows: the spec, the RoleConfig, the fabric profile. Does not know: revisions, replicas (`workload.py`).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tandem_crds import names
from tandem_crds.role_config import Role

from .container import (
    POD_SECURITY,
    ROOT_SECURITY,
    SCRATCH,
    SCRATCH_MOUNT,
    SECURITY,
    TOKEN_MOUNT,
    environment,
    field,
    http_probe,
    token_volume,
)
from .model_files import downloaded
from .overlay import installed, merge
from .placement import placement
from .resources import resources, threads_per_rank
from .services import SERVER_PORT, WORKER_PORT

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel
    from tandem_crds.role_config import RoleConfig

    from ..objects import Obj
    from ..settings import FabricProfile, Settings

PRE_STOP_S, MARGIN_S = 5, 15
ANNOTATION_MEMLOCK = f"{names.RESERVED_PREFIX}memlock"
ROLE_DIR, PEER_KEY_DIR = "/etc/tandem/role", "/etc/tandem/peer-key"
# A start may take this long plus the weights at a slow disk's pace.
_START_S, _LOAD_NBYTES_PER_S, _PROBE_S = 300, 100e6, 2


def worker_template(
    model: DisaggregatedModel,
    role: Role,
    config: RoleConfig,
    settings: Settings,
    *,
    image: str,
    profile: FabricProfile,
    config_map: str,
) -> Obj:
    """The pod template, overlays applied: the installation's, then the manifest's."""
    spec = model.spec.prefill if role is Role.PREFILL else model.spec.decode
    files = downloaded(model, settings, image=image, commit=config.model.weights_id)
    volumes = [
        {"name": "tandem-role", "configMap": {"name": config_map}},
        {"name": "tandem-peer-key", "secret": {"secretName": names.peer_secret(model.metadata.name)}},
        SCRATCH,
        *files.volumes,
    ]
    mounts = [
        {"name": "tandem-role", "mountPath": ROLE_DIR, "readOnly": True},
        {"name": "tandem-peer-key", "mountPath": PEER_KEY_DIR, "readOnly": True},
        SCRATCH_MOUNT,
        *({**mount, "readOnly": True} for mount in files.mounts),
    ]
    if role is Role.DECODE:
        volumes.append(token_volume())
        mounts.append(TOKEN_MOUNT)
    if profile.shm_size:
        volumes.append(
            {"name": "tandem-shm", "emptyDir": {"medium": "Memory", "sizeLimit": profile.shm_size}}
        )
        mounts.append({"name": "tandem-shm", "mountPath": "/dev/shm"})
    if profile.hugepages_2mi and model.spec.accelerator.type == "GPU":
        volumes.append({"name": "tandem-hugepages", "emptyDir": {"medium": "HugePages-2Mi"}})
        mounts.append({"name": "tandem-hugepages", "mountPath": "/dev/hugepages"})
    asked = resources(model, role, config, profile)
    container: Obj = {
        "name": "worker",
        "image": image,
        "imagePullPolicy": settings.runtime.image_pull_policy,
        "command": ["python3", "-m", "tandem_runtime.worker", "--config", f"{ROLE_DIR}/role.json"],
        "env": environment(settings, _environment(model, role, config, profile, asked)),
        "ports": [{"name": "worker", "containerPort": WORKER_PORT, "protocol": "TCP"}],
        "resources": asked,
        "volumeMounts": mounts,
        "securityContext": ROOT_SECURITY if profile.memlock == "RootCapability" else SECURITY,
        "startupProbe": http_probe("/ready", "worker", period_s=_PROBE_S, failures=_start_failures(config)),
        "readinessProbe": http_probe("/ready", "worker", period_s=2, failures=2),
        "livenessProbe": http_probe("/health", "worker", period_s=5, failures=6, timeout_s=5),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if role is Role.DECODE:
        container["ports"].insert(0, {"name": "server", "containerPort": SERVER_PORT, "protocol": "TCP"})
    annotations = dict(profile.annotations)
    if profile.memlock == "RootCapability":
        annotations[ANNOTATION_MEMLOCK] = "root with all capabilities dropped but IPC_LOCK"
    pod: Obj = {
        "serviceAccountName": names.worker_account(model.metadata.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": PRE_STOP_S + model.spec.drain_seconds + MARGIN_S,
        "containers": [container],
        "volumes": volumes,
        **placement(model, role, profile),
    }
    if files.init_containers:
        pod["initContainers"] = list(files.init_containers)
    if spec.node_selector:
        pod["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerations:
        pod["tolerations"] = [one.model_dump(mode="json", exclude_none=True) for one in spec.tolerations]
    if model.spec.runtime.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": one.name} for one in model.spec.runtime.image_pull_secrets]
    template: Obj = {"metadata": {"annotations": annotations}, "spec": pod}
    return merge(installed(template, settings.runtime.pod_template), spec.pod_template)


def _environment(
    model: DisaggregatedModel, role: Role, config: RoleConfig, profile: FabricProfile, asked: Obj
) -> list[Obj]:
    own: dict[str, str] = {
        "TANDEM_PEER_KEY_DIR": PEER_KEY_DIR,
        "TANDEM_RUN_DIR": "/tmp",
        "TANDEM_WORKER_PORT": str(WORKER_PORT),
    }
    if role is Role.DECODE:
        own["TANDEM_SERVER_PORT"] = str(SERVER_PORT)
        own["TANDEM_PEER_SELECTOR"] = (
            f"{names.LABEL_MODEL}={model.metadata.name},{names.LABEL_KV_KEY}={config.kv_key}"
        )
    threads = threads_per_rank(asked, config.tensor_parallel * config.data_parallel)
    if threads is not None:
        own["TANDEM_THREADS_PER_RANK"] = str(threads)
    identity = [
        field("TANDEM_POD", "metadata.name"),
        field("TANDEM_UID", "metadata.uid"),
        field("TANDEM_HOST", "status.podIP"),
    ]
    given = profile.env | own
    return [*identity, *({"name": name, "value": given[name]} for name in sorted(given))]


def _start_failures(config: RoleConfig) -> int:
    """Probes that may fail before the kubelet gives up on the start."""
    return ceil((_START_S + config.model.weights_nbytes / _LOAD_NBYTES_PER_S) / _PROBE_S)
