"""What the operator reports: the status of a DisaggregatedModel.

Nothing here changes on every pass (a status write is also a watch event, so that would loop): counts, facts,
decisions, and load progress in steps of 25 %. Silence is `Unknown`, never a guess.

Conditions: `Reconciled` (we could write everything), `Available` (one KV key has a ready prefill and a ready
decode pod), `Progressing`, `Compatible`, `FabricReady`, `ScalingActive`, and `Ready`, which is Reconciled and
Available, Compatible not False, and every wanted pod of the newest revision.
"""

from typing import Annotated, Literal

from pydantic import Field

from .fields import Int32
from .rules import ApiModel

Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Count = Annotated[Int32, Field(ge=0)]
ShortText = Annotated[str, Field(max_length=512)]


class Condition(ApiModel):
    """As metav1.Condition."""

    type: str = Field(max_length=316, description="What is said, CamelCase.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: Int64 | None = Field(None, ge=0, description="The generation that was looked at.")
    last_transition_time: Time = Field(description="When status last changed.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, CamelCase, for programs.",
    )
    message: str = Field(max_length=32768, description="Why, for people; names the source.")


class RoleStatus(ApiModel):
    """The pods of one role."""

    replicas: Count = Field(0, description="Pods that exist, terminating ones excluded.")
    ready: Count = Field(0, description="Pods that are ready.")
    updated: Count = Field(0, description="Ready pods of the newest revision.")
    revision: str | None = Field(None, max_length=63, description="Newest revision of this role.")
    loaded_percent: Annotated[Int32, Field(ge=0, le=100, multiple_of=25)] | None = Field(
        None, description="How far the pods that are loading weights have come, in steps of 25."
    )


class ModelStatus(ApiModel):
    """The facts of the model, as inspected."""

    weights_id: str = Field(max_length=128, description="Resolved commit, or a digest of local files.")
    architecture: str = Field(max_length=128, description="Name in config.json.")
    dtype: str = Field(max_length=32, description="The checkpoint's type.")
    layers: Count = Field(description="Transformer layers.")
    heads: Count = Field(description="Query heads.")
    kv_heads: Count = Field(description="Key and value heads.")
    head_dim: Count = Field(description="Elements of one head.")
    weights_bytes: Int64 = Field(ge=0, description="Size of the weights.")
    kv_bytes_per_token: Int64 = Field(ge=0, description="KV cache of one token over all ranks of a replica.")
    max_model_len: Count = Field(description="Longest prompt plus answer that both roles can hold.")


class ScalingStatus(ApiModel):
    """The last scaling decision; written when it changes."""

    desired_replicas: Count = Field(description="Decode pods decided on.")
    reason: str = Field(max_length=128, description="Why, CamelCase.")
    message: ShortText = Field("", description="Why, for people.")
    time: Time = Field(description="When it was decided.")


class Status(ApiModel):
    """What is observed."""

    observed_generation: Int64 | None = Field(
        None, ge=0, description="The generation that this status is about."
    )
    prefill: RoleStatus | None = Field(None, description="The pods that compute prompts.")
    decode: RoleStatus | None = Field(None, description="The pods that produce tokens.")
    kv_key: str | None = Field(None, max_length=63, description="Pods with equal keys can exchange KV pages.")
    url: ShortText | None = Field(None, description="Where the OpenAI API is reached inside the cluster.")
    selector: str | None = Field(
        None, max_length=1024, description="Label selector of the decode pods of all revisions, for HPAs."
    )
    model: ModelStatus | None = Field(None, description="The facts of the model.")
    scaling: ScalingStatus | None = Field(None, description="The last scaling decision.")
    conditions: list[Condition] = Field(
        [],
        max_length=16,
        description="Reconciled, Available, Progressing, Compatible, FabricReady, ScalingActive, and their "
        "summary, Ready.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
