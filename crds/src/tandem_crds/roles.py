"""What a user says about the pods of one role: `spec.prefill` and `spec.decode`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from . import quantity
from .fields import Int32, LabelKey, LabelValue, Quantities, Replicas
from .pod_template import PodTemplate
from .quantity import Quantity
from .rules import ApiModel, Rule


class RoleEngine(ApiModel):
    """Limits of one role's engine."""

    max_batched_tokens: Int32 | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="Tokens computed per step; when unset 512 on CPU, on GPU 8192 for prefill and 2048 for "
        "decode.",
    )
    max_sequences: Int32 | None = Field(
        None, ge=1, le=4096, description="Requests that run at once; when unset 32 on CPU and 256 on GPU."
    )
    kv_cache_memory: Quantity | None = Field(
        None, description="KV cache of one rank; when unset 1Gi on CPU. GPU needs it set."
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.kvCacheMemory) || quantity(string(self.kvCacheMemory)).isGreaterThan(quantity('0'))",
            lambda self: self.kv_cache_memory is None or quantity.parse(self.kv_cache_memory) > 0,
            "kvCacheMemory must be more than 0",
            "kvCacheMemory",
        ),
    )


class Resources(ApiModel):
    """Compute resources of the engine's container, as in a Pod."""

    limits: Quantities = Field({}, description="Most that the container may use.")
    requests: Quantities = Field({}, description="What the scheduler sets aside; limits when unset.")


class Toleration(ApiModel):
    """As in a Pod."""

    key: str | None = Field(None, max_length=316, description="Taint key; every key when unset.")
    operator: Literal["Exists", "Equal"] = Field("Equal", description="How value is compared.")
    value: LabelValue | None = Field(None, description="Taint value that is tolerated.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Taint effect that is tolerated; every effect when unset."
    )
    toleration_seconds: Annotated[int, Field(json_schema_extra={"format": "int64"})] | None = Field(
        None, ge=0, description="How long a NoExecute taint is tolerated; for ever when unset."
    )


class RoleSpec(ApiModel):
    """What prefill and decode pods have in common."""

    tensor_parallel: Int32 = Field(
        1, ge=1, le=64, description="Ranks that share each layer, one device each."
    )
    data_parallel: Int32 = Field(
        1,
        ge=1,
        le=64,
        description="Copies of the attention layers in one replica, each with its own requests.",
    )
    engine: RoleEngine = Field(RoleEngine(), description="Limits of this role's engine.")
    resources: Resources = Field(Resources(), description="Resources of the engine's container.")
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(
        {}, description="Labels that a node must carry."
    )
    tolerations: list[Toleration] = Field(
        [],
        max_length=32,
        description="Taints that the pods tolerate.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    pod_template: PodTemplate = Field(
        {},
        description="Laid over the generated pod template (metadata and spec); lists merge by name. Our "
        "labels, env and volumes, serviceAccountName and the host* fields are refused.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class Prefill(RoleSpec):
    """The pods that compute prompts."""

    replicas: Replicas | None = Field(None, description="Pods; set either this or scaling.ratio.")


class Decode(RoleSpec):
    """The pods that produce tokens. Their number is what kubectl scale, an HPA and our autoscaler write."""

    replicas: Replicas = Field(1, description="Pods; 0 parks the model.")
    prefill_fallback: Literal["Reject", "Local"] = Field(
        "Reject",
        description="Without a ready prefill pod: Reject requests with 503, or prefill in the decode pod.",
    )
