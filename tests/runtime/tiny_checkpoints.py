"""Tiny random checkpoints that every test of the runtime may serve: two layers, a vocabulary of 384, a real
tokenizer.

The weights are drawn from a fixed seed and spread wide enough that greedy decoding does not fall into one
token; the tokenizer is byte-level (one token a byte, then merges learnt from a few sentences), so that any
text can be encoded. Written with transformers, which is also the oracle that the engine is held against.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 384
BOS, EOS = 0, 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SENTENCES = [
    "The capital of France is Paris, and the river that flows through it is the Seine.",
    "A page of the cache crosses the wire once for every layer of the model.",
    "Prefill computes the prompt; decode computes one token after another.",
    "What is the capital of France? Answer the question in one short sentence.",
]
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_llama(directory: Path, *, seed: int = 0, shards: int = 1, **config: Any) -> Path:
    """A Llama; `config` overrides the small defaults under transformers' names (`attention_bias=True`,
    `rope_parameters=...`).
    """
    return _write(LlamaForCausalLM, LlamaConfig(**{**_SMALL, **config}), directory, seed, shards)


def write_qwen3(directory: Path, *, seed: int = 0, shards: int = 1, **config: Any) -> Path:
    """A dense Qwen3; `config` as in `write_llama`."""
    return _write(Qwen3ForCausalLM, Qwen3Config(**{**_SMALL, **config}), directory, seed, shards)


def oracle(directory: Path) -> PreTrainedModel:
    """transformers' model of a written checkpoint, in fp32."""
    names = json.loads((directory / "config.json").read_text())["architectures"]
    kind = {"LlamaForCausalLM": LlamaForCausalLM, "Qwen3ForCausalLM": Qwen3ForCausalLM}[names[0]]
    return kind.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """What transformers answers to `prompt`: exactly `tokens` ids, the end-of-text token is not special."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        min_new_tokens=None,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=EOS,
    )
    return output[0, len(prompt) :].tolist()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` ordinary token ids."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()


def _write(
    kind: type[PreTrainedModel], config: LlamaConfig | Qwen3Config, directory: Path, seed: int, shards: int
) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.1)
                elif "embed_tokens" in name or "lm_head" in name:
                    parameter.normal_(std=0.3)
                else:
                    parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=nbytes // shards + 1 if shards > 1 else "5GB")
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
