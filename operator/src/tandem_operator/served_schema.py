"""Whether the API server serves our CRD with every field that this operator reads or writes.

Knows: OpenAPI v3 as the server publishes it, which every account may read. Does not know: RBAC.

A CRD of an older release prunes what it does not know without a word: the operator is not ready until the
fields are there, and names those that are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem_crds.generate import custom_resource_definition
from tandem_crds.model import API_VERSION, KIND, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = f"/openapi/v3/apis/{API_VERSION}"


def missing_fields(document: dict[str, Any]) -> list[str]:
    """Dotted paths, the shortest first; a field below a missing one is not named."""
    versions = custom_resource_definition()["spec"]["versions"]
    wanted = next(one for one in versions if one["name"] == VERSION)["schema"]["openAPIV3Schema"]
    served: dict[str, Any] = next(
        (
            schema
            for schema in document.get("components", {}).get("schemas", {}).values()
            if any(
                one.get("kind") == KIND and f"{one.get('group')}/{one.get('version')}" == API_VERSION
                for one in schema.get("x-kubernetes-group-version-kind") or ()
            )
        ),
        {},
    )
    parts = {key: wanted["properties"][key] for key in ("spec", "status")}
    return sorted(_missing(parts, served.get("properties") or {}), key=lambda path: (path.count("."), path))


def _missing(wanted: dict[str, Any], served: dict[str, Any]) -> Iterator[str]:
    for name, schema in wanted.items():
        if name not in served:
            yield name
            continue
        theirs = served[name]
        if isinstance(schema.get("items"), dict):
            schema, theirs = schema["items"], theirs.get("items") or {}
        if "properties" in schema:
            below = _missing(schema["properties"], theirs.get("properties") or {})
            yield from (f"{name}.{path}" for path in below)
