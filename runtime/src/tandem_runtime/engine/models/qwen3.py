"""Qwen3, dense: Llama with an RMSNorm over each query and key head before rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .layers import Parts, RMSNorm
from .llama import LlamaAttention, LlamaForCausalLM, LlamaLayer

if TYPE_CHECKING:
    from torch import Tensor

    from ..model_config import ModelConfig
    from ..parallel import Group


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, group: Group, layer: int) -> None:
        super().__init__(config, group, layer)
        self.q_norm = RMSNorm("q_norm", config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm("k_norm", config.head_dim, config.rms_norm_eps)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)

    def parts(self, prefix: str) -> Parts:
        return super().parts(prefix) | self.q_norm.parts(prefix) | self.k_norm.parts(prefix)


class Qwen3Layer(LlamaLayer):
    attention_type = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_type = Qwen3Layer
