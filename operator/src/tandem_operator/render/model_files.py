"""Where a model's files are inside a pod, and what has to be mounted for that.

Knows: the four kinds of URI. Does not know: what is in the files.

    pvc://CLAIM/PATH   the claim, read-only, at /models
    file:///PATH       a path of the image or of a volume that the manifest's podTemplate mounts
    oci://IMAGE        an image volume at /model
    hf://ORG/NAME      downloaded by an init container into the cache at /cache/COMMIT
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .container import SECURITY, environment

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel

    from ..objects import Obj
    from ..settings import Settings

CLAIM_PATH, IMAGE_PATH, CACHE_PATH = "/models", "/model", "/cache"
_VOLUME = "tandem-model"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    volumes: tuple[Obj, ...] = ()
    mounts: tuple[Obj, ...] = ()
    init_containers: tuple[Obj, ...] = ()


def claim(uri: str) -> str:
    """The claim of a pvc:// URI; empty for others."""
    scheme, _, rest = uri.partition("://")
    return rest.partition("/")[0] if scheme == "pvc" else ""


def model_path(uri: str, weights_id: str) -> str:
    """The directory that the worker loads from."""
    scheme, _, rest = uri.partition("://")
    match scheme:
        case "pvc":
            return f"{CLAIM_PATH}/{rest.partition('/')[2]}"
        case "oci":
            return IMAGE_PATH
        case "hf":
            return f"{CACHE_PATH}/{weights_id}"
    return rest


def model_files(model: DisaggregatedModel) -> ModelFiles:
    """Volumes and mounts, without the download: what inspecting needs."""
    spec = model.spec.model
    scheme, _, rest = spec.uri.partition("://")
    if scheme == "pvc":
        source: Obj = {"persistentVolumeClaim": {"claimName": claim(spec.uri), "readOnly": True}}
        return _mounted(source, CLAIM_PATH, read_only=True)
    if scheme == "oci":
        return _mounted(
            {"image": {"reference": rest, "pullPolicy": "IfNotPresent"}}, IMAGE_PATH, read_only=True
        )
    if scheme == "hf":
        if spec.cache is not None and spec.cache.claim_name is not None:
            source = {"persistentVolumeClaim": {"claimName": spec.cache.claim_name}}
        else:
            limit = spec.cache.size_limit if spec.cache is not None else None
            source = {"emptyDir": {"sizeLimit": str(limit)} if limit is not None else {}}
        return _mounted(source, CACHE_PATH, read_only=False)
    return ModelFiles()


def downloaded(model: DisaggregatedModel, settings: Settings, *, image: str, commit: str) -> ModelFiles:
    """As `model_files`, and for hf:// the init container that fetches the weights."""
    files = model_files(model)
    uri = model.spec.model.uri
    if not uri.startswith("hf://"):
        return files
    fetch = {
        "name": "model",
        "image": image,
        "imagePullPolicy": settings.runtime.image_pull_policy,
        "command": ["python3", "-m", "tandem_runtime.models.fetch", uri],
        "args": ["--revision", commit, "--into", f"{CACHE_PATH}/{commit}"],
        "env": environment(settings, hub_token(model)),
        "volumeMounts": [*files.mounts, {"name": "tandem-scratch", "mountPath": "/tmp"}],
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return ModelFiles(files.volumes, files.mounts, (fetch,))


def hub_token(model: DisaggregatedModel) -> list[Obj]:
    """The environment that opens a private hf:// model."""
    secret = model.spec.model.secret_ref
    if secret is None:
        return []
    source = {"secretKeyRef": {"name": secret.name, "key": "token"}}
    return [{"name": "HF_TOKEN", "valueFrom": source}]


def _mounted(source: Obj, path: str, *, read_only: bool) -> ModelFiles:
    mount: Obj = {"name": _VOLUME, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return ModelFiles(({"name": _VOLUME, **source},), (mount,))
