"""Llama: the decoder that the others differ from by a few lines.

Knows: the forward pass and the checkpoint's tensor names. Does not know: pages, requests, files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from ..model_config import CheckpointError
from .layers import (
    ColumnLinear,
    Embedding,
    GatedMLP,
    Head,
    Output,
    Parts,
    RMSNorm,
    Rotary,
    RowLinear,
    merge,
    rotate,
)
from .matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ..attention.base import Attention
    from ..model_config import ModelConfig
    from ..parallel import Group


class LlamaAttention(nn.Module):
    """Grouped-query attention. Ranks share out the query heads and the KV heads; where ranks outnumber the KV
    heads, each of those is held by several ranks.
    """

    def __init__(self, config: ModelConfig, group: Group, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        heads, kv = group.share(config.heads), kv_share(config, group)
        self.heads, self.kv_heads = heads.stop - heads.start, kv.stop - kv.start
        self.qkv = ColumnLinear(
            config.hidden_size,
            [
                self._output("q_proj", config.heads, heads),
                self._output("k_proj", config.kv_heads, kv),
                self._output("v_proj", config.kv_heads, kv),
            ],
            bias=config.attention_bias,
        )
        self.o = RowLinear(
            "o_proj",
            config.heads * config.head_dim,
            config.hidden_size,
            group,
            bias=config.attention_bias,
        )

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, self.head_dim).split(self.split, dim=1)
        q, k = self.normalize(q, k)
        attended = attention.run(rotate(q, angles), rotate(k, angles), v, self.layer)
        result: Tensor = self.o(attended.flatten(1))
        return result

    @property
    def split(self) -> tuple[int, int, int]:
        return (self.heads, self.kv_heads, self.kv_heads)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def parts(self, prefix: str) -> Parts:
        return self.qkv.parts(prefix) | self.o.parts(prefix)

    def _output(self, name: str, heads: int, share: slice) -> Output:
        dim = self.head_dim
        return Output(name, heads * dim, slice(share.start * dim, share.stop * dim))


class LlamaLayer(nn.Module):
    attention_type = LlamaAttention

    def __init__(self, config: ModelConfig, group: Group, layer: int) -> None:
        super().__init__()
        self.prefix = f"model.layers.{layer}."
        self.input_norm = RMSNorm("input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = self.attention_type(config, group, layer)
        self.mlp_norm = RMSNorm("post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, group)

    def parts(self) -> Parts:
        return (
            self.input_norm.parts(self.prefix)
            | self.attention.parts(self.prefix + "self_attn.")
            | self.mlp_norm.parts(self.prefix)
            | self.mlp.parts(self.prefix + "mlp.")
        )


class LlamaForCausalLM(nn.Module):
    """Build on the meta device, materialize, fill `parts()`, finish."""

    layer_type = LlamaLayer

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        require_even_split(config, group)
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        layers = [self.layer_type(config, group, i) for i in range(config.layers)]
        self.layers = cast("Sequence[LlamaLayer]", nn.ModuleList(layers))
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = Head(config.vocab_size, config.hidden_size, group, tied)
        self.rotary = Rotary(config)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, layer_done: Callable[[], None]
    ) -> Tensor:
        """Hidden states `[n, hidden]`, after the last norm.

        `layer_done` is called after each layer's output projection: by then every rank has appended the
        layer's keys and values, because the projection ends in a sum over the ranks.
        """
        hidden: Tensor = self.embedding(tokens)
        angles = self.rotary.angles(positions, hidden.dtype)
        for layer in self.layers:
            hidden = hidden + layer.attention(layer.input_norm(hidden), angles, attention)
            layer_done()
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]`, the same on every rank."""
        logits: Tensor = self.head(hidden)
        return logits

    def finish_loading(self) -> None:
        """Call once `parts()` are filled: ties the head and brings the weights into the kernels' order."""
        self.head.tie()
        for module in self.modules():
            if isinstance(module, Matrix):
                module.arrange()

    def parts(self) -> Parts:
        """Where every tensor of the checkpoint goes."""
        return merge(
            [
                self.embedding.parts("model."),
                *(layer.parts() for layer in self.layers),
                self.norm.parts("model."),
                self.head.parts(),
            ]
        )


def kv_share(config: ModelConfig, group: Group) -> slice:
    """The KV heads that this rank holds."""
    if group.size <= config.kv_heads:
        return group.share(config.kv_heads)
    head = group.rank * config.kv_heads // group.size
    return slice(head, head + 1)


def require_even_split(config: ModelConfig, group: Group) -> None:
    """Raises CheckpointError where the ranks cannot share the model out evenly."""
    for name, total in (
        ("num_attention_heads", config.heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if total % group.size:
            raise CheckpointError(f"tensorParallel is {group.size}; it must divide {name} ({total})")
    if config.kv_heads % group.size and group.size % config.kv_heads:
        raise CheckpointError(
            f"tensorParallel is {group.size}; it must divide num_key_value_heads ({config.kv_heads}) "
            "or be a multiple of it"
        )
