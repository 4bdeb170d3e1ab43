"""What a pod template overlay may not touch, because the pods would not work or would gain rights that nobody
gave.

The API server cannot look into it (the schema does not know pods), so this has no CEL form: `tandem` refuses
the manifest, the operator sets `Reconciled=False`.
"""

from typing import Annotated, Any

from pydantic import AfterValidator

from .names import RESERVED_PREFIX

ENV_PREFIX = "TANDEM_"
VOLUME_PREFIX = "tandem-"


def refused(template: dict[str, Any]) -> list[str]:
    """Paths in the overlay that are ours; empty if all is well."""
    found = [name for name in template if name not in ("metadata", "spec")]
    metadata, spec = _mapping(template.get("metadata")), _mapping(template.get("spec"))
    for kind in ("labels", "annotations"):
        keys = [key for key in _mapping(metadata.get(kind)) if key.startswith(RESERVED_PREFIX)]
        found += [f"metadata.{kind}.{key}" for key in keys]
    found += [f"spec.{name}" for name in spec if name.startswith(("host", "serviceAccount"))]
    found += [
        f"spec.volumes.{name}" for name in _names(spec.get("volumes")) if name.startswith(VOLUME_PREFIX)
    ]
    for kind in ("containers", "initContainers"):
        for container in _list(spec.get(kind)):
            env = [name for name in _names(_mapping(container).get("env")) if name.startswith(ENV_PREFIX)]
            found += [f"spec.{kind}.env.{name}" for name in env]
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(value: Any) -> list[str]:
    return [str(_mapping(one).get("name", "")) for one in _list(value)]


def _check(template: dict[str, Any]) -> dict[str, Any]:
    if paths := refused(template):
        raise ValueError(f"must be without {', '.join(paths)}, which Tandem sets itself or refuses")
    return template


PodTemplate = Annotated[dict[str, Any], AfterValidator(_check)]
