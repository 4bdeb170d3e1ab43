"""The two models of the fleet examples as their hub shows them: config.json as published, weights of the
published sizes under invented tensor names.

Sources: config.json of deepseek-ai/DeepSeek-R1 and Qwen/Qwen3-Coder-480B-A35B-Instruct.
"""

from __future__ import annotations

import json
from typing import Any

from local_hub import File, Repository, Weights

R1_URI, QWEN3_URI = "hf://deepseek-ai/DeepSeek-R1", "hf://Qwen/Qwen3-Coder-480B-A35B-Instruct"

R1_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False,
}

QWEN3_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "moe_intermediate_size": 2560,
    "num_hidden_layers": 62,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}


def repository(
    config: dict[str, Any], shards: int, shard: tuple[str, tuple[int, ...]], **more: Any
) -> Repository:
    """`shards` files of one tensor each."""
    names = [f"model-{number:05}-of-{shards:06}.safetensors" for number in range(1, shards + 1)]
    files: dict[str, File] = {name: Weights({f"tensor.{name}": shard}) for name in names}
    index = {"metadata": {}, "weight_map": {f"tensor.{name}": name for name in names}}
    files["config.json"] = json.dumps(config).encode()
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["tokenizer.json"] = b"{}"
    files["tokenizer_config.json"] = json.dumps({"chat_template": "{{ messages }}"}).encode()
    files["original/consolidated.pth"] = b"not wanted"
    return Repository(files, **more)


def fleet() -> dict[str, Repository]:
    """What a hub has of both: 688 GB and 960 GB."""
    return {
        R1_URI.removeprefix("hf://"): repository(R1_CONFIG, 163, ("F8_E4M3", (4_224_000, 1000))),
        QWEN3_URI.removeprefix("hf://"): repository(
            QWEN3_CONFIG, 241, ("BF16", (1_992_000, 1000)), token="hf_secret"
        ),
    }
