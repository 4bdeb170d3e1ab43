"""How long each state waits before its timeout fires: all the times of the protocol in one place.

The machines in `decode.py` and `prefill.py` know none of them, and are right whatever they are. A wait
restarts when the phase changes, when another attempt is made, and on a sign of life that fits the phase.
"""

from __future__ import annotations

from . import decode, prefill
from .peers import DEAD_S

TICK_S = 0.25
OWN_PAUSE_S = 1.0  # a tick this late means that we were stopped
REOPEN_S = 0.5
RETURN_S = DEAD_S + 1.0  # since a peer was last heard: so long it may come back, and requests wait for it
REOPEN_REFUSED_S = 10.0  # a refusal stands until somebody restarts with another configuration
UNATTACHED_S = 5.0
GREETING_S = 1.0
ATTACHING_S = 0.5
UNANSWERED_S = 0.5  # DISPATCH; ten of them
NO_LIFE_S = 10.0  # no count, and no PONG that could list the transfer
NOT_LISTED_S = 2.0  # PONGs that do not list it: its SENT or FAIL was lost
CANCEL_S = 2.0
LANDING_S = 2.0  # posted, not landed, and the count stands still


def decode_link_s(peer: decode.Peer) -> float:
    match peer.link:
        case decode.Link.DOWN:
            return REOPEN_REFUSED_S if peer.refused else REOPEN_S
        case decode.Link.GREETING:
            return GREETING_S
        case decode.Link.ATTACHING:
            return ATTACHING_S
        case decode.Link.UP:
            return DEAD_S
    return float("inf")  # the fabric answers


def decode_transfer_s(transfer: decode.Transfer, listed: bool | None) -> float:
    """`listed`: whether the peer's last fresh PONG lists the transfer as alive; None when there was none
    since the phase began.
    """
    match transfer.phase:
        case decode.Phase.DISPATCHED:
            return UNANSWERED_S
        case decode.Phase.ACCEPTED:
            return NOT_LISTED_S if listed is False else NO_LIFE_S
        case decode.Phase.SETTLING:
            return LANDING_S
        case decode.Phase.CANCELLING:
            return CANCEL_S
    return float("inf")


def prefill_link_s(peer: prefill.Peer) -> float:
    match peer.link:
        case prefill.Link.OPENING | prefill.Link.GREETED:
            return UNATTACHED_S
        case prefill.Link.UP:
            return DEAD_S
    return float("inf")
