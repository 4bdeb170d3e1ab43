"""What the operator does not carry out: a manifest that it cannot read, and fields whose code does not exist.

Knows: what is asked and what this installation can do. Does not know: what the runtime image can: a worker
that does not support a dtype or an architecture refuses by itself, and its words reach the conditions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tandem_crds.manifest import problems
from tandem_crds.model import NAME_MAX_LENGTH, DisaggregatedModel
from tandem_crds.names import HASH_LENGTH

from .objects import name_of
from .reasons import Reason

if TYPE_CHECKING:
    from .objects import Obj
    from .settings import Settings

# The server's own additions to metadata are none of the manifest's business.
_METADATA = ("name", "namespace", "uid", "generation", "labels", "annotations")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing is written. The message names the field, its value and what is allowed."""

    reason: Reason
    message: str


def read_model(parent: Obj) -> DisaggregatedModel | Refusal:
    """The object as the API's types. A CRD of another version lets through what these do not know: unknown
    fields are passed over, as the server would; the status is ours and not looked at.
    """
    name = name_of(parent)
    if len(name) > NAME_MAX_LENGTH:
        return Refusal(
            Reason.NAME_TOO_LONG,
            f"metadata.name is {name}, {len(name)} characters; at most {NAME_MAX_LENGTH} are allowed: names "
            f"of its objects are up to {len('-prefill-') + HASH_LENGTH} longer, and a Service's ends at 63",
        )
    metadata = parent["metadata"]
    document = {
        "apiVersion": parent.get("apiVersion"),
        "kind": parent.get("kind"),
        "metadata": {key: metadata[key] for key in _METADATA if metadata.get(key) is not None},
        "spec": parent.get("spec") or {},
    }
    try:
        return DisaggregatedModel.model_validate(document, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        first, *others = problems(DisaggregatedModel, error)
        more = f" (and {len(others)} more)" if others else ""
        return Refusal(Reason.INVALID_SPEC, f"{first}{more}")


def refusal(model: DisaggregatedModel, settings: Settings) -> Refusal | None:
    """The first thing that is asked and cannot be done; None if all can."""
    spec = model.spec
    if settings.profile(spec.fabric.profile) is None:
        return Refusal(
            Reason.UNKNOWN_PROFILE,
            f"spec.fabric.profile is {spec.fabric.profile}; known here: "
            f"{', '.join(settings.profile_names())}",
        )
    if spec.fabric.device_class_name is not None:
        return Refusal(
            Reason.NOT_IMPLEMENTED,
            f"spec.fabric.deviceClassName is {spec.fabric.device_class_name}; devices are not claimed "
            "through DRA yet: leave it out, and GPUs and NICs are requested as extended resources",
        )
    if spec.engine.speculative.method != "None":
        return Refusal(
            Reason.NOT_IMPLEMENTED,
            f"spec.engine.speculative.method is {spec.engine.speculative.method}; no draft tokens are "
            "made yet: leave it out",
        )
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        if role.data_parallel > 1:
            return Refusal(
                Reason.NOT_IMPLEMENTED,
                f"spec.{name}.dataParallel is {role.data_parallel}; a replica has one engine so far: ask for "
                "more replicas instead",
            )
    if spec.accelerator.type == "GPU":
        for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
            gpus = role.tensor_parallel * role.data_parallel
            if gpus > settings.gpus_per_node:
                return Refusal(
                    Reason.NOT_IMPLEMENTED,
                    f"spec.{name} asks for tensorParallel {role.tensor_parallel} × dataParallel "
                    f"{role.data_parallel} = {gpus} GPUs in a replica; a replica cannot span nodes yet, and "
                    f"a node here has {settings.gpus_per_node} (gpusPerNode of the operator's settings)",
                )
    return None
