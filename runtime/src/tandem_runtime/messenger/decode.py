"""Decode's half of the protocol with one prefill peer, pure: `(state, event) -> (state, actions)`.

Knows: the link's life, transfers' phases, which facts prove that no write can land any more. Does not know:
a clock, frames, memory.

There is no time here. Timeouts are events, and for all this module knows they may fire at any moment: so no
page can ever be returned *because* time passed. When they do fire is `patience.py`. All of it is explored
exhaustively by the tests.

    DOWN ─Open─► OPENING ─LinkOpened─► GREETING ─Greeted─► ATTACHING ─Ponged─► UP
      ▲              └──────── silence, failure, refusal, Leave ───────────────┤
      └──────────────────────────────LinkClosed──────────────────────────── CLOSING

    dispatch ─► DISPATCHED ─Accepted─► ACCEPTED ─Sent─► SETTLING ──count full──► ready, released
                    │  cancel, patience   │                 ▲ │
                    └──────► CANCELLING ◄─┘                 │ │ posted > count for too long
                                 │ └────────────────────────┘ │
                                 │  CancelAcked{posted}, drained Failed{posted}
                                 └──unanswered──► FENCED ◄────┘   the link closes, and LinkClosed releases

A transfer ends for the engine (`TellReady`, `TellFailed`, or its own cancel) once, and its pages are
returned (`Release`) once, with one of these proofs:

    full count      every planned write has landed
    count = posted  prefill has stopped after `posted` writes, and as many have landed
    refused         prefill answered REJECT or `unknown` in this epoch: it never wrote, and never will
    link closed     the endpoint through which this peer writes is gone

Epochs number the links; a HELLO for epoch e+1 leaves only after link e has closed here, which prefill takes
as proof that nobody reads its source pages through link e any more. Answers carry the epoch of the link they
came through; those of another epoch prove nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

GREETINGS = 5  # HELLOs, or ATTACHes, before a new link is tried
DISPATCHES = 10  # sends of one DISPATCH before the peer is taken for wedged
CANCELS = 3  # sends of one CANCEL before the link is closed


class Link(enum.StrEnum):
    DOWN = "down"
    OPENING = "opening"
    GREETING = "greeting"  # HELLO is out
    ATTACHING = "attaching"  # ATTACH is out
    UP = "up"
    CLOSING = "closing"


class Phase(enum.StrEnum):
    DISPATCHED = "dispatched"  # not answered yet: resent until it is
    ACCEPTED = "accepted"
    SETTLING = "settling"  # `posted` is final; the last of them are under way
    CANCELLING = "cancelling"  # CANCEL is out: resent until answered
    FENCED = "fenced"  # only the link's closing can prove anything now
    QUARANTINED = "quarantined"  # not even that did (EFA): the pages stay out of use


@dataclass(frozen=True, slots=True)
class Limits:
    """How often to ask before asking otherwise, and what closing a link proves."""

    greetings: int = GREETINGS
    dispatches: int = DISPATCHES
    cancels: int = CANCELS
    close_is_fence: bool = True


@dataclass(frozen=True, slots=True)
class Transfer:
    id: int  # slot and generation, unique among the living
    seq: int
    expected: int
    phase: Phase = Phase.DISPATCHED
    attempts: int = 1
    posted: int | None = None
    told: bool = False  # the engine has its answer, or wants none


@dataclass(frozen=True, slots=True)
class Peer:
    epoch: int = 0
    link: Link = Link.DOWN
    attempts: int = 0
    refused: bool = False  # HELLO_REJECT was the last answer
    leaving: bool = False  # the link is not opened again
    next_seq: int = 1
    transfers: tuple[Transfer, ...] = ()

    @property
    def floor(self) -> int:
        """Every transfer with a smaller seq has been released."""
        return min((t.seq for t in self.transfers), default=self.next_seq)

    def find(self, transfer: int) -> Transfer | None:
        return next((t for t in self.transfers if t.id == transfer), None)


# --- events: what happened ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Somebody should talk to this peer (again)."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The peer is gone from the list, or has been restarted: it is not talked to again under this state."""


@dataclass(frozen=True, slots=True)
class LinkOpened:
    epoch: int


@dataclass(frozen=True, slots=True)
class Greeted:
    """A HELLO_ACK with a good proof and a manifest equal to ours."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A HELLO_REJECT, or a HELLO_ACK whose manifest differs."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Ponged:
    """A PONG with a body: prefill has our ATTACH, and the link works both ways."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LinkTimeout:
    """GREETING, ATTACHING: no answer yet. UP: silence."""


@dataclass(frozen=True, slots=True)
class LinkFailed:
    epoch: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """From here on no write lands through that link."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Only while UP. The counter is armed, and the pages pinned, before."""

    transfer: int
    expected: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The engine has lost interest: no Ready, no Failed, only Released."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Accepted:
    epoch: int
    transfer: int
    expected: int


@dataclass(frozen=True, slots=True)
class Rejected:
    epoch: int
    transfer: int
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Sent:
    epoch: int
    transfer: int
    posted: int


@dataclass(frozen=True, slots=True)
class Failed:
    epoch: int
    transfer: int
    posted: int
    drained: bool
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class CancelAcked:
    epoch: int
    transfer: int
    posted: int
    unknown: bool


@dataclass(frozen=True, slots=True)
class Counted:
    """The counter has reached what it was told to expect."""

    transfer: int
    count: int


@dataclass(frozen=True, slots=True)
class TransferTimeout:
    """DISPATCHED, CANCELLING: no answer. ACCEPTED: no sign of life. SETTLING: posted, but not landed."""

    transfer: int


Event = (
    Open
    | Leave
    | LinkOpened
    | Greeted
    | Refused
    | Ponged
    | LinkTimeout
    | LinkFailed
    | LinkClosed
    | Dispatch
    | Cancel
    | Accepted
    | Rejected
    | Sent
    | Failed
    | CancelAcked
    | Counted
    | TransferTimeout
)


# --- actions: what to do, in order ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenLink:
    epoch: int


@dataclass(frozen=True, slots=True)
class SendHello:
    epoch: int


@dataclass(frozen=True, slots=True)
class ConnectLink:
    epoch: int


@dataclass(frozen=True, slots=True)
class SendAttach:
    epoch: int


@dataclass(frozen=True, slots=True)
class Paired:
    epoch: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    epoch: int


@dataclass(frozen=True, slots=True)
class SendDispatch:
    transfer: int
    seq: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    transfer: int
    seq: int


@dataclass(frozen=True, slots=True)
class Expect:
    """Let the counter report at `posted` instead of the full count."""

    transfer: int
    posted: int


@dataclass(frozen=True, slots=True)
class TellReady:
    transfer: int


@dataclass(frozen=True, slots=True)
class TellFailed:
    transfer: int
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Release:
    """No write can land any more: the pages may be reused. The counter is disarmed."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    transfer: int


Action = (
    OpenLink
    | SendHello
    | ConnectLink
    | SendAttach
    | Paired
    | CloseLink
    | SendDispatch
    | SendCancel
    | Expect
    | TellReady
    | TellFailed
    | Release
    | Quarantine
)

Step = tuple[Peer, tuple[Action, ...]]
LIMITS = Limits()


def step(peer: Peer, event: Event, limits: Limits = LIMITS) -> Step:
    """Events that do not fit the state change nothing: a message may come late, twice, or out of order."""
    match event:
        case Open():
            if peer.link is not Link.DOWN or peer.leaving:
                return peer, ()
            epoch = peer.epoch + 1
            return replace(peer, epoch=epoch, link=Link.OPENING, attempts=0), (OpenLink(epoch),)
        case Leave():
            peer = replace(peer, leaving=True)
            return _close(peer, "the peer is gone") if peer.link is not Link.DOWN else (peer, ())
        case LinkTimeout():
            return _link_timeout(peer, limits)
        case Dispatch(transfer, expected):
            assert peer.link is Link.UP
            t = Transfer(transfer, peer.next_seq, expected)
            peer = replace(peer, next_seq=t.seq + 1, transfers=(*peer.transfers, t))
            return peer, (SendDispatch(t.id, t.seq),)
        case Cancel(transfer):
            t_or_none = peer.find(transfer)
            return _cancel(peer, t_or_none) if t_or_none is not None else (peer, ())
        case Counted(transfer, count):
            t_or_none = peer.find(transfer)
            return _counted(peer, t_or_none, count) if t_or_none is not None else (peer, ())
        case TransferTimeout(transfer):
            t_or_none = peer.find(transfer)
            return _transfer_timeout(peer, t_or_none, limits) if t_or_none is not None else (peer, ())
        case LinkOpened() | Greeted() | Refused() | Ponged() | LinkFailed() | LinkClosed():
            return _link_event(peer, event, limits) if event.epoch == peer.epoch else (peer, ())
        case Accepted() | Rejected() | Sent() | Failed() | CancelAcked():
            t_or_none = peer.find(event.transfer)
            if t_or_none is None or event.epoch != peer.epoch or peer.link is not Link.UP:
                return peer, ()
            return _answer(peer, t_or_none, event)


# --- the link -------------------------------------------------------------------------------------


def _link_event(
    peer: Peer, event: LinkOpened | Greeted | Refused | Ponged | LinkFailed | LinkClosed, limits: Limits
) -> Step:
    match event:
        case LinkOpened(epoch) if peer.link is Link.OPENING:
            return replace(peer, link=Link.GREETING, attempts=1), (SendHello(epoch),)
        case Greeted(epoch) if peer.link is Link.GREETING:
            peer = replace(peer, link=Link.ATTACHING, attempts=1, refused=False)
            return peer, (ConnectLink(epoch), SendAttach(epoch))
        case Refused() if peer.link is Link.GREETING:
            return _close(replace(peer, refused=True), "refused")
        case Ponged(epoch) if peer.link is Link.ATTACHING:
            return replace(peer, link=Link.UP, attempts=0), (Paired(epoch),)
        case LinkFailed() if peer.link not in (Link.DOWN, Link.CLOSING):
            return _close(peer, "the link failed")
        case LinkClosed() if peer.link is Link.CLOSING:
            return _closed(peer, limits)
    return peer, ()


def _link_timeout(peer: Peer, limits: Limits) -> Step:
    match peer.link:
        case Link.GREETING | Link.ATTACHING if peer.attempts < limits.greetings:
            send = SendHello(peer.epoch) if peer.link is Link.GREETING else SendAttach(peer.epoch)
            return replace(peer, attempts=peer.attempts + 1), (send,)
        case Link.GREETING | Link.ATTACHING | Link.UP:
            return _close(peer, "the peer is silent")
    return peer, ()


def _close(peer: Peer, reason: str) -> Step:
    """Every transfer of the link fails for the engine now; the pages wait for LinkClosed."""
    if peer.link is Link.CLOSING:
        return peer, ()
    told = tuple(TellFailed(t.id, reason, True) for t in peer.transfers if not t.told)
    transfers = tuple(
        t if t.phase is Phase.QUARANTINED else replace(t, phase=Phase.FENCED, told=True, attempts=0)
        for t in peer.transfers
    )
    return replace(peer, link=Link.CLOSING, transfers=transfers), (CloseLink(peer.epoch), *told)


def _closed(peer: Peer, limits: Limits) -> Step:
    if not limits.close_is_fence:
        fresh = tuple(Quarantine(t.id) for t in peer.transfers if t.phase is Phase.FENCED)
        kept = tuple(replace(t, phase=Phase.QUARANTINED) for t in peer.transfers)
        return replace(peer, link=Link.DOWN, attempts=0, transfers=kept), fresh
    released = tuple(Release(t.id) for t in peer.transfers)
    return replace(peer, link=Link.DOWN, attempts=0, transfers=()), released


# --- transfers ------------------------------------------------------------------------------------


def _update(peer: Peer, transfer: Transfer) -> Peer:
    return replace(peer, transfers=tuple(transfer if t.id == transfer.id else t for t in peer.transfers))


def _release(peer: Peer, transfer: Transfer, *before: Action) -> Step:
    peer = replace(peer, transfers=tuple(t for t in peer.transfers if t.id != transfer.id))
    return peer, (*before, Release(transfer.id))


def _fail(transfer: Transfer, reason: str, retryable: bool) -> tuple[Action, ...]:
    return () if transfer.told else (TellFailed(transfer.id, reason, retryable),)


def _cancel(peer: Peer, t: Transfer) -> Step:
    if t.told:
        return peer, ()
    if t.phase is Phase.SETTLING:  # prefill has stopped posting already: there is nothing to cancel
        return _update(peer, replace(t, told=True)), ()
    peer = _update(peer, replace(t, phase=Phase.CANCELLING, attempts=1, told=True))
    return peer, (SendCancel(t.id, t.seq),)


def _counted(peer: Peer, t: Transfer, count: int) -> Step:
    if count == t.expected:
        return _release(peer, t, *(() if t.told else (TellReady(t.id),)))
    if count == t.posted:  # known only once it is final
        return _release(peer, t, *_fail(t, "the transfer ended short", True))
    return peer, ()


def _answer(peer: Peer, t: Transfer, event: Accepted | Rejected | Sent | Failed | CancelAcked) -> Step:
    match event:
        case Accepted() if t.phase is Phase.DISPATCHED:
            if event.expected == t.expected:
                return _update(peer, replace(t, phase=Phase.ACCEPTED, attempts=0)), ()
            failed = _fail(t, "count", False)
            peer = _update(peer, replace(t, phase=Phase.CANCELLING, attempts=1, told=True))
            return peer, (*failed, SendCancel(t.id, t.seq))
        case Rejected() if t.phase in (Phase.DISPATCHED, Phase.CANCELLING):
            return _release(peer, t, *_fail(t, event.reason, event.retryable))
        case Sent() if t.phase in (Phase.DISPATCHED, Phase.ACCEPTED, Phase.CANCELLING):
            return _settle(peer, t, event.posted)
        case Failed() if t.phase in (Phase.DISPATCHED, Phase.ACCEPTED, Phase.CANCELLING):
            failed = _fail(t, event.reason, event.retryable)
            t = replace(t, told=True)
            if event.drained:
                peer, actions = _settle(peer, t, event.posted)
                return peer, (*failed, *actions)
            if t.phase is Phase.CANCELLING:
                return peer, ()
            peer = _update(peer, replace(t, phase=Phase.CANCELLING, attempts=1))
            return peer, (*failed, SendCancel(t.id, t.seq))
        case CancelAcked() if t.phase is Phase.CANCELLING:
            return _release(peer, t) if event.unknown else _settle(peer, t, event.posted)
    return peer, ()


def _settle(peer: Peer, t: Transfer, posted: int) -> Step:
    """`posted` writes are all there will ever be; when as many have landed, none is left that could."""
    peer = _update(peer, replace(t, phase=Phase.SETTLING, posted=posted, attempts=0))
    return peer, (Expect(t.id, posted),)


def _transfer_timeout(peer: Peer, t: Transfer, limits: Limits) -> Step:
    if peer.link is not Link.UP:
        return peer, ()
    match t.phase:
        case Phase.DISPATCHED if t.attempts < limits.dispatches:
            return _update(peer, replace(t, attempts=t.attempts + 1)), (SendDispatch(t.id, t.seq),)
        case Phase.DISPATCHED | Phase.ACCEPTED:
            failed = _fail(t, "prefill shows no progress", True)
            peer = _update(peer, replace(t, phase=Phase.CANCELLING, attempts=1, told=True))
            return peer, (*failed, SendCancel(t.id, t.seq))
        case Phase.CANCELLING if t.attempts < limits.cancels:
            return _update(peer, replace(t, attempts=t.attempts + 1)), (SendCancel(t.id, t.seq),)
        case Phase.CANCELLING:
            return _close(peer, "a cancel was not answered")
        case Phase.SETTLING:
            return _close(peer, "writes were posted and never landed")
    return peer, ()
