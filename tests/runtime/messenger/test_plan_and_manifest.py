"""Counts, runs, cursors, differences: tables."""

from __future__ import annotations

import itertools

import pytest
from messenger_pair import layout_of, manifest

from tandem_runtime.kv import Chunk
from tandem_runtime.messenger import wire
from tandem_runtime.messenger.manifest import MUST_EQUAL, difference, pool_pages
from tandem_runtime.messenger.plan import (
    ChunkGapError,
    PageCursor,
    Run,
    Sharding,
    equal_runs,
    expected_writes,
    pack_u32,
    pages_to_move,
    unpack_u32,
)


@pytest.mark.parametrize(
    ("prompt", "cached", "pages"),
    [
        (2, 0, [0]),  # one token moves
        (16, 0, [0]),
        (17, 0, [0]),  # sixteen tokens: one whole page
        (18, 0, [0, 1]),
        (33, 16, [1]),
        (34, 16, [1, 2]),
        (33, 32, []),  # all but the last token is there
        (1, 0, []),
    ],
)
def test_the_pages_that_move_hold_all_tokens_but_the_last(prompt: int, cached: int, pages: list[int]) -> None:
    assert list(pages_to_move(prompt, cached, 16)) == pages


@pytest.mark.parametrize(
    ("kv_heads", "prefill", "decode", "sources", "sets"),
    [
        (8, 1, 1, 1, 1),
        (8, 8, 8, 1, 1),
        (8, 8, 4, 2, 1),  # prefill shards finer: each decode rank has two sources
        (8, 8, 1, 8, 1),
        (8, 4, 8, 1, 1),  # decode shards finer: one source each, half a page's heads
        (4, 8, 8, 1, 2),  # heads are replicated: two sets hold them all
        (4, 16, 2, 2, 4),
        (1, 8, 1, 1, 8),  # one latent head everywhere
    ],
)
def test_sources_and_replica_sets_follow_from_the_heads(
    kv_heads: int, prefill: int, decode: int, sources: int, sets: int
) -> None:
    sharding = Sharding(kv_heads, prefill, decode)
    assert (sharding.sources, sharding.replica_sets) == (sources, sets)
    assert {sharding.replica_set(seed) for seed in range(64)} == set(range(sets))
    # Every head of every decode rank is written once: sources times the heads of one write.
    per_write = min(sharding.heads(prefill), sharding.heads(decode))
    assert sources * per_write == sharding.heads(decode)


def test_the_count_is_layers_times_pages_times_sources_over_all_decode_ranks() -> None:
    assert expected_writes(Sharding(8, 8, 8), layers=3, pages=5) == 8 * 3 * 5
    assert expected_writes(Sharding(8, 8, 4), layers=3, pages=5) == 4 * 3 * 5 * 2
    assert expected_writes(Sharding(8, 8, 8), layers=3, pages=5, tails=1) == 8 * 3 * 5 + 1
    assert expected_writes(Sharding(8, 8, 8), layers=3, pages=0, tails=1) == 1
    assert expected_writes(Sharding(8, 8, 8), layers=3, pages=0) == 0


def test_equal_sharding_moves_whole_pages_from_rank_to_rank() -> None:
    layout = layout_of(layers=1)
    assert equal_runs(layout, 2) == [Run(r, r, 0, 0, layout.page_nbytes) for r in range(2)]


def chunked(goal: int, start: int, size: int) -> list[Chunk]:
    stops = [*range(start + size, goal, size), goal]
    return [Chunk("r", begin, stop, (), stop == goal) for begin, stop in itertools.pairwise([start, *stops])]


@pytest.mark.parametrize("goal", [1, 4, 5, 8, 15, 16, 17])
@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
def test_every_page_is_yielded_once_whatever_the_chunks_and_the_caches(goal: int, size: int) -> None:
    for cached, hit in itertools.product(range(0, goal, 4), repeat=2):
        move = pages_to_move(goal + 1, cached, 4)
        cursor = PageCursor(move, 4)
        yielded = [*cursor.start(hit)]
        for chunk in chunked(goal, hit, size):
            yielded += cursor.chunk(chunk)
        assert yielded == list(move), (cached, hit)


def test_a_chunk_that_does_not_follow_the_last_is_refused() -> None:
    cursor = PageCursor(range(4), 4)
    cursor.start(0)
    cursor.chunk(Chunk("r", 0, 8, (), False))
    with pytest.raises(ChunkGapError, match="starts in page 3; expected 2"):
        cursor.chunk(Chunk("r", 12, 16, (), True))
    with pytest.raises(ChunkGapError, match="starts in page 0; expected 2"):
        cursor.chunk(Chunk("r", 0, 8, (), False))


def test_numbers_travel_as_little_endian_words() -> None:
    assert pack_u32([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert unpack_u32(pack_u32(range(5))) == (0, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_u32(bytes(5))


@pytest.mark.parametrize("field", MUST_EQUAL)
def test_every_field_that_must_be_equal_is_named_with_both_values(field: str) -> None:
    mine = manifest(layout_of(layers=2))
    assert difference(mine, {**mine, field: "another"}) == (field, str(mine[field]), "another")
    missing = {name: value for name, value in mine.items() if name != field}
    assert difference(mine, missing) == (field, str(mine[field]), "absent")


def test_pool_sizes_and_unknown_fields_may_differ() -> None:
    mine = manifest(layout_of(layers=2))
    assert difference(mine, {**mine, "pages": 1, "of the future": True}) is None


@pytest.mark.parametrize("pages", [0, -1, True, "4", 1.5, None, 1 << 40])
def test_a_pool_size_that_is_none_is_refused(pages: object) -> None:
    with pytest.raises(wire.WireError):
        pool_pages({"pages": pages})
