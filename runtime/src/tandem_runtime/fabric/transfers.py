"""The shapes of outgoing transfers: where pages lie on both sides, and which of them to write.

Knows: strides, segments, page ids. Does not know: links, when anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

ffi = _core.ffi


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous run inside every page, in bytes: equal sharding has one, the whole page."""

    source_region: int
    target_region: int
    source_offset: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Strides of our pool and of the peer's, in bytes."""

    source_page_nbytes: int
    source_layer_nbytes: int
    target_page_nbytes: int
    target_layer_nbytes: int
    layers: int


@dataclass(frozen=True, slots=True)
class PlanItem:
    """Pages of one transfer: `source_pages[i]` is written to `target_pages[i]`, in every layer. `last`:
    nothing follows.
    """

    transfer: int
    source_pages: Sequence[int]
    target_pages: Sequence[int]
    last: bool


def c_geometry(geometry: Geometry) -> Any:
    """A C tdm_geometry."""
    return ffi.new(
        "tdm_geometry *",
        (
            geometry.source_page_nbytes,
            geometry.source_layer_nbytes,
            geometry.target_page_nbytes,
            geometry.target_layer_nbytes,
            geometry.layers,
        ),
    )


def c_segments(segments: Sequence[Segment]) -> Any:
    """A C array of tdm_segment."""
    return ffi.new(
        "tdm_segment[]",
        [
            (part.source_region, part.target_region, part.source_offset, part.target_offset, part.nbytes)
            for part in segments
        ],
    )


def c_plan_items(items: Sequence[PlanItem]) -> tuple[Any, list[Any]]:
    """A C array of `tdm_plan_item`, and the page arrays it points into, to be kept until the call is done."""
    c_items = ffi.new("tdm_plan_item[]", len(items))
    kept: list[Any] = []
    for c_item, item in zip(c_items, items, strict=True):
        if len(item.source_pages) != len(item.target_pages):
            raise ValueError(
                f"transfer {item.transfer}: {len(item.source_pages)} source pages,"
                f" {len(item.target_pages)} target pages"
            )
        source = ffi.new("uint32_t[]", list(item.source_pages))
        target = ffi.new("uint32_t[]", list(item.target_pages))
        kept += (source, target)
        c_item.transfer = item.transfer
        c_item.source_pages, c_item.target_pages = source, target
        c_item.n_pages = len(item.source_pages)
        c_item.last = item.last
    return c_items, kept
