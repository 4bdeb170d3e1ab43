"""The KV cache's geometry: where a page of a layer lies in a rank's pool, and what a step did to pages.

Knows: the layout `[layer][page, head, K|V, token, dim]`. Does not know: memory, requests, peers.

Heads come before tokens and K|V sits inside the head, so any head range of a page, K and V together, is one
contiguous run and therefore one RDMA write, whatever the tensor-parallel degrees of the two sides. Attention
reads `k = pool[:, :, 0]` and `v = pool[:, :, 1]` as strided views.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One rank's KV pool. All ranks of a role have equal layouts.

    `kv_heads` counts the heads this rank holds (at least one: heads are replicated when ranks outnumber
    them).
    """

    layers: int
    pages: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(f"KV dtype is {self.dtype!r}; allowed: {', '.join(DTYPE_NBYTES)}")
        for name in ("layers", "pages", "kv_heads", "page_tokens", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KV layout: {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one page of one layer, K and V together."""
        return 2 * self.page_tokens * self.head_dim * DTYPE_NBYTES[self.dtype]

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page of one layer on this rank: the size of one paged write when both sides shard
        equally.
        """
        return self.kv_heads * self.head_nbytes

    @property
    def layer_nbytes(self) -> int:
        return self.pages * self.page_nbytes

    @property
    def pool_nbytes(self) -> int:
        return self.layers * self.layer_nbytes

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """`[layer, page, head, K|V, token, dim]`."""
        return (self.layers, self.pages, self.kv_heads, 2, self.page_tokens, self.head_dim)

    def page_offset(self, layer: int, page: int, head: int = 0) -> int:
        """Byte offset in the pool of `head` of `page` of `layer`."""
        return layer * self.layer_nbytes + page * self.page_nbytes + head * self.head_nbytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one request's prompt that one step computes on a prefill worker.

    `start` and `stop` are token positions (`stop` exclusive). `pages` are the physical source pages of the
    **whole** request from position 0, so that page `i` holds tokens `[i·page_tokens, (i+1)·page_tokens)`.
    `last` marks the chunk that reaches the goal: the partly filled last page crosses with it.
    """

    request_id: str
    start: int
    stop: int
    pages: tuple[int, ...]
    last: bool

    def completed(self, page_tokens: int) -> range:
        """Page indices that this chunk completes: each page crosses once per layer, with exactly one
        chunk.
        """
        first = self.start // page_tokens
        end = -(-self.stop // page_tokens) if self.last else self.stop // page_tokens
        return range(first, end)
