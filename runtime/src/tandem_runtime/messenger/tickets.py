"""A ticket: one transfer as decode's engine knows it, and where its time went.

Knows: one DISPATCH and the times around it. Does not know: phases' meaning (`decode.py`), peers' health.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .ports import TransferTiming

if TYPE_CHECKING:
    from . import decode, wire


@dataclass(slots=True)
class Ticket:
    ticket: int
    transfer: int
    node: str  # prefill's pod
    dispatch: wire.Dispatch
    nbytes: int
    started_s: float
    waiting_since_s: float  # of the present phase and attempt, or the last sign of life
    mark: tuple[decode.Phase, int] | None = None
    count: int = 0
    ready_ns: int = 0
    sent: wire.Sent | None = None
    message: str = ""
    abandoned: bool = False  # the engine has cancelled it: it hears of the release only

    def timing(self, one_clock: bool) -> TransferTiming:
        """`one_clock`: prefill's monotonic times can be compared with ours."""
        total_s = self.ready_ns / 1e9 - self.started_s
        sent = self.sent
        if sent is None:
            return TransferTiming(self.node, self.nbytes, total_s)
        exposed_s = None
        if one_clock and sent.last_layer_ns:
            exposed_s = max(0, self.ready_ns - sent.last_layer_ns) / 1e9
        return TransferTiming(
            node=self.node,
            nbytes=self.nbytes,
            total_s=total_s,
            queue_s=sent.queue_ns / 1e9,
            prefill_s=sent.prefill_ns / 1e9,
            transfer_s=sent.transfer_ns / 1e9,
            exposed_s=exposed_s,
            hidden_nbytes=sent.hidden_nbytes if sent.last_layer_ns else None,
        )
