"""The kind `DisaggregatedModel` of `tandem.dev/v1alpha1`: the root object, and reading one from a manifest.

Knows: the root's fields. The spec and the status have files of their own.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from .embedded import unsupported_by_embedded
from .manifest import ManifestError, parse
from .rules import ApiModel
from .spec import Spec
from .status import Status

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "VERSION",
    "DisaggregatedModel",
    "ManifestError",
    "load_manifest",
    "unsupported_by_embedded",
]

GROUP = "tandem.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DisaggregatedModel"

# The longest name that we derive, a Service's, adds 19 characters and must stay a DNS label of at most 63.
NAME_MAX_LENGTH = 40
# Services must begin with a letter (RFC 1035).
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


class Metadata(ApiModel):
    """Kubernetes object metadata. The CRD says only what we ask of `name`; the server knows the rest."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_MAX_LENGTH, pattern=NAME_PATTERN)]
    generate_name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] = Field({})
    annotations: dict[str, str] = Field({})
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: Any = None  # YAML reads a timestamp as a date
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: int | None = None
    finalizers: list[str] = Field([])
    owner_references: list[dict[str, Any]] = Field([])
    managed_fields: list[dict[str, Any]] = Field([])
    self_link: str | None = None


class DisaggregatedModel(ApiModel):
    """A large language model served with disaggregated prefill and decode."""

    api_version: Literal["tandem.dev/v1alpha1"] = Field(description="tandem.dev/v1alpha1.")
    kind: Literal["DisaggregatedModel"] = Field(description="DisaggregatedModel.")
    metadata: Metadata = Field(
        description="Standard object metadata; name is a DNS label of at most 40 characters."
    )
    spec: Spec = Field(description="What is wanted.")
    status: Status = Field(Status(), description="What is observed; written by the operator.")


def load_manifest(text: str, source: str) -> DisaggregatedModel:
    """The one DisaggregatedModel of a YAML text; `source` names it in errors. Raises ManifestError."""
    return parse(text, source, DisaggregatedModel)
