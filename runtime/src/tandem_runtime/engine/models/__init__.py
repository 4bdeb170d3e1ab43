"""The models we compute, by the name in config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .llama import LlamaForCausalLM
from .qwen3 import Qwen3ForCausalLM

if TYPE_CHECKING:
    from ..model_config import ModelConfig
    from ..parallel import Group

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def build(config: ModelConfig, group: Group, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """This rank's part of the model, in memory of its own, not yet filled. Raises CheckpointError."""
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config, group)
    return model.to(dtype).to_empty(device=device)
