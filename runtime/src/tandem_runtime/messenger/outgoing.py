"""A transfer that prefill carries out: what DISPATCH asked for, checked, and which pages go with which chunk.

Knows: one DISPATCH, its pages on both sides, the numbers that SENT reports. Does not know: links, whether
posting is allowed (`prefill.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..fabric.fabric import PlanItem
from . import plan, wire
from .prefill import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fabric.events import OutDrained
    from ..kv import Chunk, KVLayout


@dataclass(slots=True)
class Outgoing:
    key: int
    node: int  # of decode
    dispatch: wire.Dispatch
    tokens: tuple[int, ...]
    target_pages: tuple[int, ...]
    expected: int
    cursor: plan.PageCursor
    dispatched_ns: int
    begun: bool = False  # known to the fabric and to the engine
    source_pages: Sequence[int] = ()
    admitted_ns: int = 0
    drained: OutDrained | None = None

    def hit(self, tokens: int) -> PlanItem | None:
        """What prefill's prefix hit covers and decode lacks."""
        return self._item(self.cursor.start(tokens), last=False)

    def chunk(self, chunk: Chunk) -> PlanItem | None:
        """What `chunk` completes. Raises ChunkGapError."""
        return self._item(self.cursor.chunk(chunk), last=chunk.last)

    def _item(self, indices: range, last: bool) -> PlanItem | None:
        if not indices and not last:
            return None
        source = [self.source_pages[index] for index in indices]
        target = [self.target_pages[index - self.cursor.move.start] for index in indices]
        return PlanItem(self.key, source, target, last)

    def sent(self, transfer: int, posted: int) -> wire.Sent:
        """Times are zero when the fabric has not told them (yet)."""
        event = self.drained
        return wire.Sent(
            transfer=transfer,
            posted=posted,
            nbytes=event.nbytes if event else 0,
            hidden_nbytes=event.hidden_nbytes if event else 0,
            queue_ns=max(0, self.admitted_ns - self.dispatched_ns),
            prefill_ns=max(0, event.last_layer_ns - self.admitted_ns) if event else 0,
            last_layer_ns=event.last_layer_ns if event else 0,
            transfer_ns=max(0, event.last_completion_ns - event.first_post_ns) if event else 0,
        )


def sent_again(transfer: int, posted: int) -> wire.Sent:
    """For who asks after the transfer was forgotten: the count is what matters."""
    return wire.Sent(
        transfer=transfer,
        posted=posted,
        nbytes=0,
        hidden_nbytes=0,
        queue_ns=0,
        prefill_ns=0,
        last_layer_ns=0,
        transfer_ns=0,
    )


def unpack(
    dispatch: wire.Dispatch,
    *,
    key: int,
    node: int,
    layout: KVLayout,
    sharding: plan.Sharding,
    target_pool_pages: int,
    now_ns: int,
) -> Outgoing | Refusal:
    """The transfer that a DISPATCH asks for, or what is wrong with it."""
    page_tokens, cached = layout.page_tokens, dispatch.cached_tokens
    try:
        tokens, pages = plan.unpack_u32(dispatch.tokens), plan.unpack_u32(dispatch.pages)
    except ValueError as error:
        return Refusal(wire.Reject.BAD_PAGES, str(error))
    if len(tokens) > layout.pages * page_tokens:
        detail = f"{len(tokens)} tokens; the pool holds {layout.pages * page_tokens}"
        return Refusal(wire.Reject.TOO_LONG, detail)
    if cached < 0 or cached % page_tokens or cached >= len(tokens) - 1:
        return Refusal(wire.Reject.BAD_PAGES, f"{cached} cached of {len(tokens)} tokens")
    move = plan.pages_to_move(len(tokens), cached, page_tokens)
    if len(pages) != len(move) or len(set(pages)) != len(pages) or max(pages) >= target_pool_pages:
        return Refusal(wire.Reject.BAD_PAGES, f"{len(pages)} pages; {len(move)} different ones are needed")
    if dispatch.tails:
        return Refusal(wire.Reject.LAYOUT, "tails are not supported")
    expected = plan.expected_writes(sharding, layout.layers, len(pages))
    if dispatch.expected != expected:
        return Refusal(wire.Reject.COUNT, f"{dispatch.expected} writes there, {expected} here")
    cursor = plan.PageCursor(move, page_tokens)
    return Outgoing(key, node, dispatch, tokens, pages, expected, cursor, now_ns)
