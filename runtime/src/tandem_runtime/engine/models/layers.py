"""The layers that all our models are built of, sharded over the ranks of a replica.

Knows: parameters, and which part of which checkpoint tensor fills them on this rank. Does not know: files,
batches.

A linear layer is split by its outputs (column) or by its inputs (row); a row-parallel layer ends in the sum
over the ranks. Projections that read the same input are one parameter here and several tensors in the
checkpoint. The embedding is whole on every rank: it costs memory, and saves a collective at the start of
every pass. The head is split by vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from .matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ..model_config import ModelConfig
    from ..parallel import Group


@dataclass(frozen=True, slots=True)
class Part:
    """`target`, a view of a parameter on this rank, is filled with `[source]` of a checkpoint tensor of
    `shape`.
    """

    target: Tensor
    shape: tuple[int, ...]
    source: tuple[slice, ...]


Parts = dict[str, Part]  # by the tensor's name in the checkpoint
WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class Output:
    """One of the projections joined in a `ColumnLinear`: its name in the checkpoint, its rows there, and the
    rows that this rank computes.
    """

    name: str
    rows: int
    share: slice

    @property
    def size(self) -> int:
        return int(self.share.stop) - int(self.share.start)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class ColumnLinear(nn.Module):
    """`[n, inputs] -> [n, sum of the outputs' shares]`."""

    def __init__(self, inputs: int, outputs: list[Output], *, bias: bool) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.sizes = [output.size for output in outputs]
        self.matrix = Matrix(inputs, sum(self.sizes), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.matrix(x)
        return result

    def parts(self, prefix: str) -> Parts:
        parts: Parts = {}
        weights = torch.split(self.matrix.weight, self.sizes)
        for output, weight in zip(self.outputs, weights, strict=True):
            shape = (output.rows, self.inputs)
            parts[f"{prefix}{output.name}.weight"] = Part(weight, shape, (output.share, WHOLE))
        if self.matrix.bias is not None:
            for output, bias in zip(self.outputs, torch.split(self.matrix.bias, self.sizes), strict=True):
                parts[f"{prefix}{output.name}.bias"] = Part(bias, (output.rows,), (output.share,))
        return parts


class RowLinear(nn.Module):
    """`[n, this rank's share of inputs] -> [n, outputs]`, summed over the ranks. Rank 0 adds the bias."""

    def __init__(self, name: str, inputs: int, outputs: int, group: Group, *, bias: bool) -> None:
        super().__init__()
        self.name, self.group = name, group
        self.shape = (outputs, inputs)
        self.share = group.share(inputs)
        self.matrix = Matrix(inputs // group.size, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.matrix(x, add_bias=self.group.rank == 0))

    def parts(self, prefix: str) -> Parts:
        weight, bias = self.matrix.weight, self.matrix.bias
        parts = {f"{prefix}{self.name}.weight": Part(weight, self.shape, (WHOLE, self.share))}
        if bias is not None:
            parts[f"{prefix}{self.name}.bias"] = Part(bias, self.shape[:1], (WHOLE,))
        return parts


class RMSNorm(nn.Module):
    """Over the last dimension, in fp32 inside."""

    def __init__(self, name: str, dim: int, eps: float) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = _empty(dim)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def parts(self, prefix: str) -> Parts:
        return {f"{prefix}{self.name}.weight": Part(self.weight, tuple(self.weight.shape), (WHOLE,))}


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = _empty(vocab_size, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)

    def parts(self, prefix: str) -> Parts:
        whole = Part(self.weight, tuple(self.weight.shape), (WHOLE, WHOLE))
        return {f"{prefix}embed_tokens.weight": whole}


class Head(nn.Module):
    """`[n, dim] -> [n, vocab]`, on every rank. `embedding` is given where the head is tied to it."""

    def __init__(self, vocab_size: int, dim: int, group: Group, embedding: Embedding | None) -> None:
        super().__init__()
        self.vocab_size, self.dim, self.group = vocab_size, dim, group
        self.part = -(-vocab_size // group.size)
        first = min(vocab_size, group.rank * self.part)
        self.share = slice(first, min(vocab_size, first + self.part))
        self.tied = embedding
        rows = 0 if embedding is not None else self.share.stop - first
        self.matrix = Matrix(dim, rows, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.matrix(hidden)
        if self.group.size == 1:
            return logits
        # The last rank's share may be smaller; a gather wants equal shapes.
        padded = functional.pad(logits, (0, self.part - logits.shape[-1]))
        return self.group.all_gather(padded)[:, : self.vocab_size]

    def tie(self) -> None:
        """Once the embedding is loaded."""
        if self.tied is not None:
            self.matrix.weight = nn.Parameter(self.tied.weight[self.share], requires_grad=False)

    def parts(self) -> Parts:
        if self.tied is not None:
            return {}
        shape = (self.vocab_size, self.dim)
        return {"lm_head.weight": Part(self.matrix.weight, shape, (self.share, WHOLE))}


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        size, share = config.intermediate_size, group.share(config.intermediate_size)
        outputs = [Output("gate_proj", size, share), Output("up_proj", size, share)]
        self.gate_up = ColumnLinear(config.hidden_size, outputs, bias=config.mlp_bias)
        self.down = RowLinear("down_proj", size, config.hidden_size, group, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.down(functional.silu(gate).mul_(up))
        return result

    def parts(self, prefix: str) -> Parts:
        return self.gate_up.parts(prefix) | self.down.parts(prefix)


class Rotary:
    """Rotary position embedding in the half-split form: element `i` turns with element `i + dim/2`."""

    def __init__(self, config: ModelConfig) -> None:
        # Built while the default device is meta: the frequencies are computed, not loaded.
        exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        scaling = config.rope_scaling
        if scaling is not None:
            # Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, those between are
            # blended.
            turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
            frequencies = (1.0 - keep) * frequencies / scaling.factor + keep * frequencies
        self._frequencies = frequencies

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each `[n, 1, dim/2]`, computed once a pass."""
        turned = positions[:, None, None].float() * self._frequencies.to(positions.device)
        return turned.cos().to(dtype), turned.sin().to(dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """`x` is `[n, heads, dim]`."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def merge(parts: Iterable[Parts]) -> Parts:
    merged: Parts = {}
    for one in parts:
        assert merged.keys().isdisjoint(one)
        merged |= one
    return merged
