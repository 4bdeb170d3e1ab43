"""Paged attention on a GPU by FlashInfer. **Written against 0.6 and 0.7, not yet run: no GPU was at hand.**

Knows: FlashInfer's wrappers. Does not know: requests, sampling.

Nobody imports this module but the rank that serves on a GPU: FlashInfer is an optional extra. A pass in which
every row has one token runs through the decode wrapper; any other pass runs whole through the prefill
wrapper, whose causal mask is aligned to the end of each sequence, so prompt chunks with a prefix and decode
rows mix freely. Keys and values are handed over as the pool's own strided views (`HND`: heads before tokens):
the kernels honour strides, and ask only that both be equal. `plan` runs once a pass, `run` once a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flashinfer  # type: ignore[import-not-found]  # the extra `gpu`, absent where there is no GPU
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..kv_cache import KVCache
    from .base import Batch

WORKSPACE_NBYTES = 128 << 20  # what FlashInfer recommends, for each wrapper


class FlashInferAttention:
    """`Attention` over `cache`, whose pool is on `device`. `heads` are this rank's query heads."""

    def __init__(self, cache: KVCache, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._cache, self._device = cache, device
        layout = cache.layout
        self._page_tokens = layout.page_tokens
        self._shape = (heads, layout.kv_heads, layout.head_dim, layout.page_tokens)
        self._dtypes = {"q_data_type": dtype, "kv_data_type": cache.dtype}
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace(), "HND")
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(), "HND", use_tensor_cores=heads // layout.kv_heads >= 4
        )
        self._planned: Any = None
        self._lines = torch.empty(0)

    def prepare(self, batch: Batch) -> None:
        self._lines = self._cache.lines(batch.slots)
        queries, page_counts, pages, last = [0], [0], [], []
        for sequence in batch.sequences:
            used = self._cache.layout.pages_for(sequence.stop)
            queries.append(queries[-1] + sequence.tokens)
            page_counts.append(page_counts[-1] + used)
            pages += sequence.pages[:used]
            last.append(sequence.stop - (used - 1) * self._page_tokens)
        # `plan` reads these on the host; it copies the page numbers to the device itself.
        tables = [torch.tensor(values, dtype=torch.int32) for values in (page_counts, pages, last)]
        if queries[-1] == len(batch.sequences):
            self._decode.plan(*tables, *self._shape, **self._dtypes)
            self._planned = self._decode
        else:
            starts = torch.tensor(queries, dtype=torch.int32)
            self._prefill.plan(starts, *tables, *self._shape, causal=True, **self._dtypes)
            self._planned = self._prefill

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        self._cache.append(layer, k, v, self._lines)
        out: Tensor = self._planned.run(q, (self._cache.key(layer), self._cache.value(layer)))
        return out

    def _workspace(self) -> Tensor:
        return torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=self._device)
