"""Turn a Llama GGUF into the Hugging Face files that the engine loads: weights, configuration, tokenizer,
template.

Knows: GGUF's names, its quantized blocks (undone by the `gguf` package), llama.cpp's order of Q and K rows,
byte-level BPE. Does not know: where the file came from, torch.

llama.cpp stores the rows of Q and K so that the two halves of each rotary pair are neighbours, where
Hugging Face keeps all first halves before all second halves: within a head, row `2·i + j` there is row
`j·(head_dim/2) + i` here.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class ConversionError(Exception):
    """The GGUF holds something that this converter does not translate. One line that names it."""


def convert(source: Path, directory: Path) -> None:
    """Write `source` into the existing `directory`, weights in bfloat16. Raises ConversionError."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ConversionError(
            f"{source}: general.architecture is {fields['general.architecture']}; supported: llama"
        )
    heads = {
        "attn_q.weight": fields["llama.attention.head_count"],
        "attn_k.weight": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        name, suffix = _translate(source, tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = halves_apart(values, heads[suffix]) if suffix in heads else values
    _write_weights(weights, directory / "model.safetensors")
    _write_config(fields, "lm_head.weight" not in weights, directory)
    _write_tokenizer(source, fields, directory)


def halves_apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of Q or K (`[heads · head_dim, inputs]`)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _translate(source: Path, name: str) -> tuple[str, str]:
    """The Hugging Face name, and the part of the GGUF name that says what the tensor is."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name], name
    block, _, rest = name.partition(".")
    layer, _, suffix = rest.partition(".")
    if block != "blk" or not layer.isdigit() or suffix not in _LAYER_NAMES:
        raise ConversionError(f"{source}: tensor {name} is not one of a Llama's")
    return f"model.layers.{layer}.{_LAYER_NAMES[suffix]}", suffix


def _write_weights(weights: dict[str, NDArray[np.float32]], file: Path) -> None:
    """safetensors: length of the header, header, tensors in the header's order without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in weights.items():
        begin, end = end, end + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin aligned
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for values in weights.values():
            stream.write(gguf.quantize(values, gguf.GGMLQuantizationType.BF16).tobytes())


def _write_config(fields: dict[str, Any], tied: bool, directory: Path) -> None:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        # Stored as a 32-bit float: 1e-05 would otherwise become 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "max_position_embeddings": fields["llama.context_length"],
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", ids)


def _write_tokenizer(source: Path, fields: dict[str, Any], directory: Path) -> None:
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ConversionError(f"{source}: tokenizer is {'/'.join(kind)}; supported: gpt2/smollm")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
