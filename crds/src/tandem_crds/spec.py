"""What a user writes: the spec of a DisaggregatedModel, with every bound, default and rule.

Knows: the fields and which combinations make sense. Does not know: the model's facts (`role_config.py` checks
the spec against them), what an installation can run (`embedded.py`, the operator).

Defaults are literals, because the API server stores them: changing one later changes what stored objects
mean. A default inside an absent parent does not apply, so parents default to `{}`. Rules hang as deep as they
can: an old object that breaks a rule added later can still be labelled, unless the rule sits above
`podTemplate`, because servers do not ratchet rules above fields that they do not know.
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from . import quantity
from .fields import DNS_LABEL, Int32, LabelKey, LabelValue, ObjectName, Replicas
from .quantity import Quantity
from .roles import Decode, Prefill
from .rules import ApiModel, Rule

URI = r"^(hf://[^/]+/[^/]+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+|oci://.+|file:///.+)$"


class SecretRef(ApiModel):
    """A Secret of the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


class SecretKeyRef(ApiModel):
    """One key of a Secret of the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field(
        "apiKey", min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="Key in the Secret."
    )


class Cache(ApiModel):
    """Where downloaded weights are kept."""

    claim_name: ObjectName | None = Field(
        None, description="PersistentVolumeClaim that all pods share; weights are downloaded once."
    )
    size_limit: Quantity | None = Field(
        None, description="Size of an emptyDir in each pod instead; every pod downloads for itself."
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.claimName) != has(self.sizeLimit)",
            lambda self: (self.claim_name is None) != (self.size_limit is None),
            "exactly one of claimName and sizeLimit must be set",
        ),
    )


class Model(ApiModel):
    """The model to serve and where its files come from."""

    uri: str = Field(
        min_length=1,
        max_length=512,
        description="Where the weights are: hf://ORG/NAME, pvc://CLAIM/PATH, oci://IMAGE, or file:///PATH "
        "in the container.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="Branch, tag or commit of an hf:// model (main when unset); resolved to a commit once "
        "per change of model.",
    )
    served_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        pattern=r"^[^\s]+$",
        description="The model's name in the OpenAI API; the object's name when unset.",
    )
    secret_ref: SecretRef | None = Field(
        None, description="Secret whose key `token` opens a private hf:// model."
    )
    cache: Cache | None = Field(None, description="Where an hf:// model is downloaded to.")
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.uri.matches(r'{URI}')",
            lambda self: re.fullmatch(URI, self.uri) is not None,
            "uri {uri} must be hf://ORG/NAME, pvc://CLAIM/PATH, oci://IMAGE or file:///PATH",
            "uri",
        ),
        Rule(
            "!self.uri.contains('/../') && !self.uri.endsWith('/..')",
            lambda self: "/../" not in self.uri and not self.uri.endswith("/.."),
            "uri {uri} must not climb out of its volume with ..",
            "uri",
        ),
        Rule(
            "self.uri.startsWith('hf://') || !has(self.revision)",
            lambda self: self.uri.startswith("hf://") or self.revision is None,
            "revision {revision} has a meaning only for hf:// models",
            "revision",
        ),
        Rule(
            "self.uri.startsWith('hf://') || !has(self.cache)",
            lambda self: self.uri.startswith("hf://") or self.cache is None,
            "cache has a meaning only for hf:// models",
            "cache",
        ),
        Rule(
            "self.uri.startsWith('hf://') || !has(self.secretRef)",
            lambda self: self.uri.startswith("hf://") or self.secret_ref is None,
            "secretRef has a meaning only for hf:// models; images are pulled with runtime.imagePullSecrets",
            "secretRef",
        ),
    )


class Runtime(ApiModel):
    """The image that the pods run."""

    image: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Runtime image; the operator's default when unset, frozen into the revision.",
    )
    image_pull_secrets: list[SecretRef] = Field(
        [],
        max_length=16,
        description="Secrets to pull images with.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )


class Accelerator(ApiModel):
    """What a rank computes on."""

    type: Literal["GPU", "CPU"] = Field(
        "GPU", description="GPU, or CPU (in fp32 unless engine.dtype says otherwise)."
    )
    resource_name: LabelKey = Field(
        "nvidia.com/gpu", description="Extended resource that one GPU is requested by; unused with CPU."
    )


class Speculative(ApiModel):
    """Guessing tokens ahead and verifying them in one pass."""

    method: Literal["None", "MTP", "NGram"] = Field(
        "None", description="None, MTP (the model's own prediction layer), or NGram (repeats of the context)."
    )
    tokens: Int32 = Field(1, ge=1, le=8, description="Tokens guessed per step.")


class Engine(ApiModel):
    """What both roles must agree on, because it describes the KV cache."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type that is computed in; auto is float32 on CPU and the checkpoint's own on GPU.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"] = Field(
        "auto", description="Type of the KV cache; auto is dtype."
    )
    page_size: Literal[8, 16, 32, 64, 128] = Field(
        16, description="Tokens per KV cache page.", json_schema_extra={"format": "int32"}
    )
    max_model_len: Int32 | None = Field(
        None,
        ge=2,
        le=16_777_216,
        description="Longest prompt plus answer, in tokens; when unset, what the model and both roles' "
        "KV caches can hold.",
    )
    speculative: Speculative = Field(Speculative(), description="Speculative decoding.")


class Fabric(ApiModel):
    """The network that KV pages cross."""

    profile: str = Field(
        "tcp",
        min_length=1,
        max_length=63,
        pattern=DNS_LABEL,
        description="tcp, efa, roce, infiniband, or a profile that the operator's configuration adds.",
    )
    nics_per_gpu: Int32 | None = Field(
        None,
        alias="nicsPerGPU",
        ge=1,
        le=16,
        description="Network devices per GPU; the profile's number when unset.",
    )
    device_class_name: ObjectName | None = Field(
        None, description="DRA device class; GPU and NIC are then claimed together by PCIe root."
    )


class RouterService(ApiModel):
    """The Service in front of the router."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP", description="Type of the Service."
    )
    port: Int32 = Field(80, ge=1, le=65535, description="Port of the Service.")


class Router(ApiModel):
    """The HTTP entrance."""

    replicas: Replicas = Field(1, description="Router pods.")
    service: RouterService = Field(RouterService(), description="The Service in front of the router.")
    api_key_secret_ref: SecretKeyRef | None = Field(
        None, description="Secret with the API key that clients must send; no key is asked for when unset."
    )


class Pack(ApiModel):
    """Keep prefill and decode close."""

    key: LabelKey = Field(description="Node label that marks a domain, say topology.kubernetes.io/zone.")
    mode: Literal["Required", "Preferred"] = Field(
        "Required", description="Required leaves pods pending rather than outside the domain."
    )
    values: list[LabelValue] = Field(
        [],
        max_length=64,
        description="Domains to choose from; all when empty.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )


class Spread(ApiModel):
    """Spread a role's pods over domains."""

    key: LabelKey = Field(description="Node label that marks a domain, say kubernetes.io/hostname.")
    max_skew: Int32 = Field(1, ge=1, le=1024, description="Most by which two domains may differ in pods.")
    mode: Literal["Required", "Preferred"] = Field(
        "Preferred", description="Required leaves pods pending rather than uneven."
    )


class Topology(ApiModel):
    """Placement."""

    pack: Pack | None = Field(None, description="Keep prefill and decode in one domain.")
    spread: Spread | None = Field(None, description="Spread each role's pods over domains.")


class Rollout(ApiModel):
    """How many pods of a role may be extra or missing while a change rolls out."""

    max_surge: Int32 = Field(
        0, ge=0, le=1024, description="Pods above the wanted number; each needs free devices."
    )
    max_unavailable: Int32 = Field(1, ge=0, le=1024, description="Pods below the wanted number.")
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.maxSurge > 0 || self.maxUnavailable > 0",
            lambda self: self.max_surge > 0 or self.max_unavailable > 0,
            "maxSurge and maxUnavailable must not both be 0: nothing could move",
        ),
    )


class Ratio(ApiModel):
    """Prefill pods per decode pods."""

    prefill: Int32 = Field(ge=1, le=64, description="Prefill's part.")
    decode: Int32 = Field(ge=1, le=64, description="Decode's part.")


class Scaling(ApiModel):
    """How the number of pods follows load."""

    mode: Literal["None", "QPS"] = Field(
        "None",
        description="None leaves decode.replicas to you (kubectl scale, an HPA, KEDA); QPS writes it from "
        "arrivals.",
    )
    target_qps: Quantity | None = Field(
        None, alias="targetQPS", description="Requests per second that one decode pod is meant to take."
    )
    min_replicas: Annotated[Int32, Field(ge=1, le=1024)] = Field(
        1, description="Fewest decode pods under QPS."
    )
    max_replicas: Annotated[Int32, Field(ge=1, le=1024)] | None = Field(
        None, description="Most decode pods under QPS."
    )
    ratio: Ratio | None = Field(
        None,
        description="Prefill pods follow decode pods: ceil(decode.replicas * ratio.prefill / ratio.decode).",
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.targetQPS) || quantity(string(self.targetQPS)).isGreaterThan(quantity('0'))",
            lambda self: self.target_qps is None or quantity.parse(self.target_qps) > 0,
            "targetQPS must be more than 0",
            "targetQPS",
        ),
        Rule(
            "self.mode != 'QPS' || (has(self.targetQPS) && has(self.maxReplicas))",
            lambda self: (
                self.mode != "QPS" or (self.target_qps is not None and self.max_replicas is not None)
            ),
            "mode QPS needs targetQPS and maxReplicas",
            "mode",
        ),
        Rule(
            "!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            lambda self: self.max_replicas is None or self.min_replicas <= self.max_replicas,
            "minReplicas {minReplicas} must not exceed maxReplicas {maxReplicas}",
            "minReplicas",
        ),
    )


class Spec(ApiModel):
    """What is wanted."""

    model: Model = Field(description="The model to serve and where its files come from.")
    runtime: Runtime = Field(Runtime(), description="The image that the pods run.")
    accelerator: Accelerator = Field(Accelerator(), description="What a rank computes on.")
    engine: Engine = Field(
        Engine(), description="What both roles agree on, because it describes the KV cache."
    )
    prefill: Prefill = Field(Prefill(), description="The pods that compute prompts.")
    decode: Decode = Field(Decode(), description="The pods that produce tokens.")
    fabric: Fabric = Field(Fabric(), description="The network that KV pages cross.")
    router: Router = Field(Router(), description="The HTTP entrance.")
    topology: Topology = Field(Topology(), description="Placement.")
    rollout: Rollout = Field(Rollout(), description="How a change rolls out.")
    drain_seconds: Int32 = Field(
        600, ge=0, le=86_400, description="How long a pod that is told to stop may finish its requests."
    )
    scaling: Scaling = Field(Scaling(), description="How the number of pods follows load.")
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.prefill.replicas) != has(self.scaling.ratio)",
            lambda self: (self.prefill.replicas is None) != (self.scaling.ratio is None),
            "exactly one of prefill.replicas and scaling.ratio must be set",
            "prefill.replicas",
        ),
        Rule(
            "self.accelerator.type == 'GPU' "
            "|| !(has(self.fabric.nicsPerGPU) || has(self.fabric.deviceClassName))",
            lambda self: (
                self.accelerator.type == "GPU"
                or (self.fabric.nics_per_gpu is None and self.fabric.device_class_name is None)
            ),
            "nicsPerGPU and deviceClassName have a meaning only with accelerator GPU",
            "fabric",
        ),
    )

    @property
    def prefill_replicas(self) -> int:
        """Prefill pods wanted, from their own number or by the ratio."""
        if self.scaling.ratio is None:
            assert self.prefill.replicas is not None
            return self.prefill.replicas
        return -(-self.decode.replicas * self.scaling.ratio.prefill // self.scaling.ratio.decode)
