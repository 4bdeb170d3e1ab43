"""The KV pool of one rank: a memfd that the lead maps too, seen here as one tensor.

Knows: the pool's memory and how keys and values are written into it. Does not know: which request owns a
page, how attention reads pages.

The memory is allocated and prefaulted before the rank reports itself loaded: a page fault in the middle of a
pass would cost milliseconds, and a pool that does not fit must fail at start, with a message, not by SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..kv import KVLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}


class PoolTooLarge(Exception):
    """The machine has no memory for the KV pool."""


class KVCache:
    """`pool` is `[layer, page, head, K|V, token, dim]`; `memfd` holds the same bytes, for the lead."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.memfd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        nbytes = layout.pool_nbytes
        try:
            os.posix_fallocate(self.memfd, 0, nbytes)
        except OSError as error:
            os.close(self.memfd)
            raise PoolTooLarge(
                f"kv.pages is {layout.pages}, {nbytes} bytes on this rank: {error.strerror}"
            ) from error
        # Nobody who holds the descriptor can cut the pool short under our feet.
        fcntl.fcntl(self.memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self.memfd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.pool = torch.frombuffer(self._map, dtype=TORCH_DTYPES[layout.dtype]).view(layout.shape)
        # Every run of `dim` elements is one line; token t of head h of page p has its key in line
        # ((p·heads + h)·2)·page_tokens + t and its value page_tokens lines later.
        self._lines = self.pool.view(layout.layers, -1, layout.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    def key(self, layer: int) -> Tensor:
        """Keys of a layer as a strided view `[page, head, token, dim]`."""
        return self.pool[layer, :, :, 0]

    def value(self, layer: int) -> Tensor:
        """Values of a layer as a strided view `[page, head, token, dim]`, with the strides of `key`."""
        return self.pool[layer, :, :, 1]

    def lines(self, slots: Tensor) -> Tensor:
        """Where the K and V of tokens go: `[2, tokens, heads]` line numbers, the same in every layer.

        A slot is `page · page_tokens + token in page`. Computed once a pass, used by `append` in each layer.
        """
        page_tokens, heads = self.layout.page_tokens, self.layout.kv_heads
        page, token = slots // page_tokens, slots % page_tokens
        head = page[:, None] * heads + torch.arange(heads, device=slots.device)
        key = head * (2 * page_tokens) + token[:, None]
        return torch.stack((key, key + page_tokens))

    def append(self, layer: int, k: Tensor, v: Tensor, lines: Tensor) -> None:
        """Write `k` and `v`, both `[tokens, heads, dim]`, into the pool at `lines`."""
        target = self._lines[layer]
        target.index_copy_(0, lines[0].view(-1), k.reshape(-1, k.shape[-1]).to(target.dtype))
        target.index_copy_(0, lines[1].view(-1), v.reshape(-1, v.shape[-1]).to(target.dtype))

    def close(self) -> None:
        """Close our descriptor. The mapping lives until the tensors on it are gone."""
        os.close(self.memfd)
