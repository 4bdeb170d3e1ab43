"""What a forward pass asks of attention.

Knows: the shape of a batch. Does not know: weights, sampling, where the pages came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequence:
    """One row of a pass: tokens at positions `[start, stop)`, whose K and V of `[0, start)` are in `pages`.

    `pages[i]` is the physical page of positions `[i·page_tokens, (i+1)·page_tokens)`; it reaches at least to
    `stop`.
    """

    start: int
    stop: int
    pages: list[int]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass: the rows' tokens one after another, prompt chunks and single decode tokens in any order."""

    tokens: Tensor  # [n] token ids
    positions: Tensor  # [n]
    slots: Tensor  # [n], page · page_tokens + token in page: where each token's K and V go
    sequences: list[Sequence]


class Attention(Protocol):
    """`prepare` once a pass, then `run` once a layer, layers in order."""

    def prepare(self, batch: Batch) -> None:
        """Do everything that does not depend on the layer."""
        ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Append `k` and `v` to the cache, then let every token attend to its sequence up to itself.

        `q` is `[n, heads, dim]`, `k` and `v` are `[n, kv_heads, dim]`; query head `h` reads KV head
        `h · kv_heads // heads`. Returns `[n, heads, dim]`.
        """
        ...
