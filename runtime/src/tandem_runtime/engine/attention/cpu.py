"""Paged attention on a CPU: pages are gathered head-major and torch's fused kernel does the rest.

Knows: gathering, padding, masks. Does not know: requests, sampling.

A page holds the tokens of one head contiguously, so one `index_select` of such runs yields `[K|V, row, head,
token, dim]` for many rows at once, which is the kernel's own layout. The indices do not depend on the layer
and are computed once a pass. Rows with one token (decode) are sorted by length and attend together, padded;
the sort and the cut into groups bound the padding. The query heads of one KV head become the kernel's query
positions, so keys and values are never repeated. Rows with more tokens (prompt chunks) attend one by one.

What lies behind a sequence's end in its last page is another request's past, or a NaN of one that failed. A
weight of zero does not silence a NaN, so keys and values past the end are set to zero after gathering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

    from ..kv_cache import KVCache
    from .base import Batch, Sequence

# Rows attend together while the shorter lacks no more pages than this, or a quarter of the longest: below
# that, a second gather and a second kernel cost more than the padding.
PADDING_PAGES = 8


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row with several tokens, `[begin, end)` of the batch."""

    begin: int
    end: int
    runs: Tensor | None  # None: no prefix, the keys are those of this pass alone
    mask: Tensor | None  # [tokens, stop], added to the scores
    stop: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with one token each, of about equal length, longest first."""

    index: Tensor  # [rows], where they stand in the batch
    runs: Tensor
    mask: Tensor  # [rows, 1, 1, tokens], added to the scores
    beyond: Tensor  # lines of the gathered pages that lie past their sequence's end


class CPUAttention:
    """`Attention` over `cache`; all its tensors are on the CPU."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        self._cache = cache
        self._dtype = dtype
        layout = cache.layout
        self._heads = layout.kv_heads
        self._page_tokens = layout.page_tokens
        # One run is the K or the V of one head of one page: run ((page·heads + head)·2 + (0 for K, 1 for V)).
        self._runs = cache.pool.view(layout.layers, -1, layout.page_tokens * layout.head_dim)
        self._lines = torch.empty(0)
        self._chunks: list[_Chunk] = []
        self._groups: list[_Group] = []

    def prepare(self, batch: Batch) -> None:
        self._lines = self._cache.lines(batch.slots)
        self._chunks = []
        decode: list[tuple[int, Sequence]] = []
        begin = 0
        for sequence in batch.sequences:
            if sequence.tokens == 1:
                decode.append((begin, sequence))
            else:
                self._chunks.append(self._chunk(begin, sequence))
            begin += sequence.tokens
        decode.sort(key=lambda entry: entry[1].stop, reverse=True)
        self._groups = [self._group(rows) for rows in self._cut(decode)]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        self._cache.append(layer, k, v, self._lines)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for chunk in self._chunks:
            rows = slice(chunk.begin, chunk.end)
            if chunk.runs is None:
                keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
            else:
                keys, values = self._gather(layer, chunk.runs, 1)[:, 0, :, : chunk.stop]
            out[rows] = self._attend_chunk(q[rows], keys, values, chunk.mask)
        for group in self._groups:
            gathered = self._gather(layer, group.runs, len(group.index))
            gathered.view(-1, gathered.shape[-1]).index_fill_(0, group.beyond, 0.0)
            keys, values = gathered
            queries = q[group.index].view(len(group.index), self._heads, -1, q.shape[-1])
            result = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
            out[group.index] = result.reshape(len(group.index), *q.shape[1:])
        return out

    def _gather(self, layer: int, runs: Tensor, rows: int) -> Tensor:
        """`[K|V, row, head, token, dim]` of whole pages."""
        gathered = self._runs[layer].index_select(0, runs).to(self._dtype)
        return gathered.view(2, rows, self._heads, -1, self._cache.layout.head_dim)

    def _attend_chunk(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """`q` is `[tokens, heads, dim]`, keys and values `[kv_heads, tokens, dim]`; as `[tokens, heads,
        dim]`.
        """
        tokens, heads, dim = q.shape
        group = heads // self._heads
        queries = q.transpose(0, 1).view(self._heads, group, tokens, dim)
        result = scaled_dot_product_attention(
            queries,
            keys[:, None].expand(-1, group, -1, -1),
            values[:, None].expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return result.reshape(heads, tokens, dim).transpose(0, 1)

    def _chunk(self, begin: int, sequence: Sequence) -> _Chunk:
        end = begin + sequence.tokens
        if sequence.start == 0:
            return _Chunk(begin, end, None, None, sequence.stop)
        used = -(-sequence.stop // self._page_tokens)
        runs = self._run_numbers(torch.tensor([sequence.pages[:used]]))
        mask = torch.full((sequence.tokens, sequence.stop), -torch.inf, dtype=self._dtype)
        return _Chunk(begin, end, runs, mask.triu_(sequence.start + 1), sequence.stop)

    def _cut(self, rows: list[tuple[int, Sequence]]) -> list[list[tuple[int, Sequence]]]:
        """Cut rows, longest first, so that no row is padded by much."""
        groups: list[list[tuple[int, Sequence]]] = []
        longest = 0
        for row in rows:
            pages = -(-row[1].stop // self._page_tokens)
            if not groups or longest - pages > max(PADDING_PAGES, longest // 4):
                groups.append([])
                longest = pages
            groups[-1].append(row)
        return groups

    def _group(self, rows: list[tuple[int, Sequence]]) -> _Group:
        pages = -(-rows[0][1].stop // self._page_tokens)
        table, stops = [], []
        for _, sequence in rows:
            used = sequence.pages[: -(-sequence.stop // self._page_tokens)]
            table.append(used + used[:1] * (pages - len(used)))
            stops.append(sequence.stop)
        beyond = torch.arange(pages * self._page_tokens) >= torch.tensor(stops)[:, None]
        mask = torch.zeros(beyond.shape, dtype=self._dtype).masked_fill_(beyond, -torch.inf)
        return _Group(
            index=torch.tensor([begin for begin, _ in rows]),
            runs=self._run_numbers(torch.tensor(table)),
            mask=mask[:, None, None],
            beyond=beyond[None, :, None].expand(2, -1, self._heads, -1).flatten().nonzero()[:, 0],
        )

    def _run_numbers(self, table: Tensor) -> Tensor:
        """Runs of the pages in `table` `[row, page]`, ordered `[K|V, row, head, page]`."""
        keys = (table[:, None] * self._heads + torch.arange(self._heads)[:, None]) * 2
        return torch.stack((keys, keys + 1)).flatten()
