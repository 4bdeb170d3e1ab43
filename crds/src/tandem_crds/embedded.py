"""What `tandem up` cannot do with a manifest: refused with a line each, so that no field is a silent no-op.

Fields that only place or size pods (resources, nodeSelector, tolerations, podTemplate, topology, rollout,
runtime, the router's service, the fabric's devices) have no meaning on one machine and are passed over: the
same manifest serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import DisaggregatedModel


def unsupported_by_embedded(model: DisaggregatedModel) -> list[str]:
    """One line for each field whose value the embedded mode does not support; empty if all is well."""
    spec = model.spec
    problems = []
    scheme = spec.model.uri.split("://")[0]
    if scheme == "oci":
        problems.append(
            f"spec.model.uri is {spec.model.uri}; supported without a cluster: hf://, pvc://, file://"
        )
    if spec.engine.speculative.method != "None":
        problems.append(
            f"spec.engine.speculative.method is {spec.engine.speculative.method}; supported so far: None"
        )
    if spec.accelerator.type != "CPU":
        problems.append(f"spec.accelerator.type is {spec.accelerator.type}; supported so far: CPU")
    if spec.engine.kv_cache_dtype == "float8_e4m3":
        problems.append(
            "spec.engine.kvCacheDtype is float8_e4m3; supported on CPU: auto, float32, bfloat16, float16"
        )
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        if role.data_parallel > 1:
            problems.append(f"spec.{name}.dataParallel is {role.data_parallel}; supported so far: 1")
    if spec.prefill.tensor_parallel != spec.decode.tensor_parallel:
        problems.append(
            f"spec.prefill.tensorParallel is {spec.prefill.tensor_parallel} and "
            f"spec.decode.tensorParallel is {spec.decode.tensor_parallel}; supported so far: equal degrees"
        )
    if spec.router.api_key_secret_ref is not None:
        problems.append("spec.router.apiKeySecretRef is set; Secrets exist only in a cluster")
    if spec.scaling.mode != "None":
        problems.append(f"spec.scaling.mode is {spec.scaling.mode}; nothing scales without a cluster: None")
    return problems
