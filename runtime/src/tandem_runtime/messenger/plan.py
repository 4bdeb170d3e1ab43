"""Which writes one transfer makes: pure arithmetic that both sides do for themselves and compare.

Knows: tokens, pages, heads, ranks, chunks. Does not know: links, memory, time.

With N prompt tokens of which C (whole pages) are cached on decode, the tokens [C, N-1) move; the last one
is decode's first step. That is

    pages  = ceil((N-1) / page) - C / page
    writes = sum over decode's ranks of (layers · pages · sources) + tails

where `sources` is the number of prefill ranks that hold a part of one decode rank's heads. The number does
not depend on how the prompt is chunked, because a page crosses once per layer, with the chunk that
completes it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..kv import Chunk, KVLayout


def pages_to_move(prompt_tokens: int, cached_tokens: int, page_tokens: int) -> range:
    """Indices, in the prompt's page table, of the pages that cross."""
    assert cached_tokens % page_tokens == 0, (cached_tokens, page_tokens)
    first = cached_tokens // page_tokens
    return range(first, max(first, -(-(prompt_tokens - 1) // page_tokens)))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the KV heads of one model lie on the ranks of both sides. Degrees beyond the number of heads
    replicate them.
    """

    kv_heads: int
    prefill_ranks: int
    decode_ranks: int

    def heads(self, ranks: int) -> int:
        return max(1, self.kv_heads // ranks)

    @property
    def sources(self) -> int:
        """Prefill ranks that write to each decode rank: one, or more where prefill shards finer."""
        return max(1, self.heads(self.decode_ranks) // self.heads(self.prefill_ranks))

    @property
    def replica_sets(self) -> int:
        """Groups of prefill ranks that each hold the whole KV."""
        return max(1, self.prefill_ranks // self.kv_heads)

    def replica_set(self, seed: int) -> int:
        """The set that serves a transfer: the same on both sides, and spread over sets by the seed."""
        return seed % self.replica_sets


def expected_writes(sharding: Sharding, layers: int, pages: int, tails: int = 0) -> int:
    """The count of immediates at which a transfer is complete, all decode ranks together."""
    if pages == 0:
        return tails
    return sharding.decode_ranks * layers * pages * sharding.sources + tails


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous part of every page of a transfer: where it is in a prefill rank's page and in a decode
    rank's.
    """

    source_rank: int
    target_rank: int
    source_offset: int
    target_offset: int
    nbytes: int


def equal_runs(layout: KVLayout, ranks: int) -> list[Run]:
    """Equal sharding: rank to rank, whole pages."""
    return [Run(rank, rank, 0, 0, layout.page_nbytes) for rank in range(ranks)]


def unpack_u32(data: bytes) -> tuple[int, ...]:
    """Little-endian u32s, as tokens and pages travel. Raises ValueError for a length that is no multiple of
    4.
    """
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no array of u32")
    return struct.unpack(f"<{len(data) // 4}I", data)


def pack_u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


class ChunkGapError(ValueError):
    """The engine skipped pages, or announced some twice."""


class PageCursor:
    """Walks a prompt's pages as chunks complete them, and yields each exactly once: `(index, index, …)`
    into the prompt's page table.

    Pages that decode has cached are passed over; those that prefill has cached and decode lacks come first,
    from `start`.
    """

    __slots__ = ("_page_tokens", "move", "next")

    def __init__(self, move: range, page_tokens: int) -> None:
        self.move = move
        self._page_tokens = page_tokens
        self.next = 0  # every page before it has been yielded or passed over

    def _advance(self, end: int) -> range:
        sent = range(max(self.next, self.move.start), min(max(self.next, end), self.move.stop))
        self.next = max(self.next, end)
        return sent if sent.start < sent.stop else range(0)

    def start(self, hit_tokens: int) -> range:
        """What can be sent at admission, valid in all layers."""
        assert self.next == 0
        return self._advance(hit_tokens // self._page_tokens)

    def chunk(self, chunk: Chunk) -> range:
        completed = chunk.completed(self._page_tokens)
        if chunk.start // self._page_tokens != self.next:
            starts = chunk.start // self._page_tokens
            raise ChunkGapError(f"{chunk.request_id}: a chunk starts in page {starts}; expected {self.next}")
        return self._advance(completed.stop)
