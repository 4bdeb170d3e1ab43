"""Write the benchmark's model: Qwen3-shaped, random weights, with a tokenizer that can spell every token.

Knows: the shape and the files' formats. Does not know: who serves it.

8 layers, hidden 512, 8 query and 4 KV heads of 64, a vocabulary of 32,000: 41.6 M parameters in fp32, 16 KiB
of KV a token. Random weights cost what trained ones would; only the text is nonsense.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

VOCAB_SIZE = 32_000
HIDDEN = 512
INTERMEDIATE = 1536
LAYERS = 8
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
EOS = 0
WEIGHT_STD = 0.02


def write_checkpoint(directory: Path) -> None:
    """Weights, configuration and tokenizer; the same every time."""
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(directory)


def _weights() -> dict[str, NDArray[numpy.float32]]:
    rng = numpy.random.default_rng(0)

    def matrix(outputs: int, inputs: int) -> NDArray[numpy.float32]:
        return WEIGHT_STD * rng.standard_normal((outputs, inputs), dtype=numpy.float32)

    def ones(size: int) -> NDArray[numpy.float32]:
        return numpy.ones(size, numpy.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "input_layernorm": ones(HIDDEN),
            "post_attention_layernorm": ones(HIDDEN),
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": ones(HEAD_DIM),
            "self_attn.k_norm": ones(HEAD_DIM),
            "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": values for name, values in block.items()}
    return weights


def _write_tokenizer(directory: Path) -> None:
    """The 256 bytes, then invented words. Prompts are given as token ids, so no merges are needed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|end|>", *alphabet, *(f"Ġword{number}" for number in range(VOCAB_SIZE - len(alphabet) - 1))]
    tokenizer = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([words[EOS]])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": words[EOS]}))
