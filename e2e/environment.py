"""How pods get the code under test and the model without an image that carries them.

The complete runtime image has 5 GB of CUDA libraries. Here pods run a small Debian image, and this repository
with its `.venv`, and the models' directory, are read-only PersistentVolumes. The chart's `env`,
`extraVolumes`, `runtime.env` and `runtime.podTemplate` bring them in, so that manifests stay as users write
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cluster.images import BASE_IMAGE

REPOSITORY = Path(__file__).parents[1]
CLAIM, MOUNT = "environment", "/opt/tandem"
MODELS_CLAIM = "models"
_VOLUME = {
    "name": CLAIM,
    "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True},
}
_VOLUME_MOUNT = {"name": CLAIM, "mountPath": MOUNT, "readOnly": True}


def python_path() -> str:
    (packages,) = (REPOSITORY / ".venv" / "lib").glob("python3.*/site-packages")
    sources = [REPOSITORY / package / "src" for package in ("crds", "operator", "runtime")]
    return ":".join(f"{MOUNT}/{path.relative_to(REPOSITORY)}" for path in (*sources, packages))


def claims(namespace: str, models: Path | None = None) -> list[dict[str, Any]]:
    """PersistentVolumes and their claims: the environment, and the models where a path is given."""
    found = _claim(namespace, CLAIM, REPOSITORY)
    return found + (_claim(namespace, MODELS_CLAIM, models) if models is not None else [])


def values(**overrides: Any) -> dict[str, Any]:
    """The chart's values for this way of running."""
    repository, _, tag = BASE_IMAGE.rpartition(":")
    image = {"repository": repository, "tag": tag, "pullPolicy": "Never"}
    env = [
        {"name": "PYTHONPATH", "value": python_path()},
        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
    ]
    return {
        "image": image,
        "env": env,
        "extraVolumes": [_VOLUME],
        "extraVolumeMounts": [_VOLUME_MOUNT],
        "runtime": {
            "image": image,
            "env": env,
            "podTemplate": {
                "spec": {
                    "volumes": [_VOLUME],
                    "containers": [{"name": "*", "volumeMounts": [_VOLUME_MOUNT]}],
                    "initContainers": [{"name": "*", "volumeMounts": [_VOLUME_MOUNT]}],
                }
            },
        },
        **overrides,
    }


def volume_name(namespace: str, claim: str) -> str:
    """A claim belongs to a namespace, and a volume to one claim."""
    return f"{namespace}-{claim}"


def _claim(namespace: str, name: str, path: Path) -> list[dict[str, Any]]:
    common = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
    }
    size = {"storage": "1Gi"}  # means nothing here
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name(namespace, name)},
        "spec": {
            **common,
            "capacity": size,
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": name},
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**common, "resources": {"requests": size}, "volumeName": volume_name(namespace, name)},
    }
    return [volume, claim]
