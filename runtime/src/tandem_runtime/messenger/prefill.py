"""Prefill's half of the protocol with one decode peer, pure: `(state, event) -> (state, actions)`.

Knows: sessions, transfers' phases, what was answered, which facts prove that nobody reads source pages any
more. Does not know: a clock, frames, memory, chunks. As in `decode.py`, timeouts are events that may fire
at any moment.

    DOWN ─Hello─► OPENING ─LinkOpened─► GREETED ─Attached─► UP
      ▲              └───────── silence, failure ───────────┤       a later session replaces
      └──────────────────────LinkClosed──────────────── CLOSING     an earlier one at any point

    Dispatched ─┬► QUEUED ─Admitted─► SENDING ──Drained──► DONE
                │     └───────┬──────────┘                  ▲
                │             ▼ Cancelled, Failing, link    │
                │          STOPPING ────────Drained─────────┤
                │                                           └► UNFENCED  link closed, posts unaccounted for
                ├► REFUSED
                └► TOMBSTONE  its CANCEL came first

DONE, REFUSED and TOMBSTONE are records: kept, to give the same answer again, until decode's floor has passed
them. Source pages are returned (`Release`) once, with one of these proofs:

    completed     every post has completed locally
    link closed   our endpoint is closed, where that ends the reading (net, tcp, verbs)
    peer's end    where the *peer* reads (shm): its process is gone; or it has said HELLO for a later epoch,
                  which it does only after it has closed its end

A full count at decode is none: it says that all writes landed, not that nobody will read again, and prefill
does not even see it.

Sessions are `(incarnation, epoch)` of decode, ordered. A smaller one is a late HELLO and changes nothing; a
greater one closes the present link and drops its transfers. Transfers are deduplicated by seq within the
session: a DISPATCH below the floor, or with a record, is never begun again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple


class Session(NamedTuple):
    incarnation: int
    epoch: int


NO_SESSION = Session(0, 0)


class Link(enum.StrEnum):
    DOWN = "down"
    OPENING = "opening"
    GREETED = "greeted"  # HELLO_ACK is out
    UP = "up"  # ATTACH has come: decode's regions are known
    CLOSING = "closing"


class Phase(enum.StrEnum):
    QUEUED = "queued"  # accepted; the engine has it
    SENDING = "sending"  # source pages are held and posted from
    STOPPING = "stopping"  # nothing more is posted; what was posted is under way
    UNFENCED = "unfenced"  # the link is closed, but somebody may still read our pages
    DONE = "done"
    REFUSED = "refused"
    TOMBSTONE = "tombstone"  # cancelled before it was dispatched


ALIVE = (Phase.QUEUED, Phase.SENDING, Phase.STOPPING)  # work is still done, or waited for
HOLDING = (*ALIVE, Phase.UNFENCED)  # the rest are records


class Outcome(enum.StrEnum):
    """What is answered when a stopping transfer has drained, and again whenever decode asks."""

    NONE = "none"  # nobody is left to be answered
    SENT = "sent"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Fences:
    """What a provider lets us conclude. EFA: neither; pages of a broken link stay out of use."""

    close: bool = True  # closing our link ends the reading of our memory
    peer_close: bool = True  # the peer's closing of its end does


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    session: Session
    seq: int
    id: int  # decode's slot and generation
    key: int  # ours; 0 in records that never began
    phase: Phase
    outcome: Outcome = Outcome.NONE
    refusal: Refusal | None = None  # REFUSED, and FAILED's reason
    retryable: bool = True
    posted: int = 0
    reader_gone: bool = False  # the process that could read our pages has ended


@dataclass(frozen=True, slots=True)
class Peer:
    session: Session = NO_SESSION
    link: Link = Link.DOWN
    floor: int = 0
    transfers: tuple[Transfer, ...] = ()

    def find(self, key: int) -> Transfer | None:
        return next((t for t in self.transfers if t.key == key), None)

    def record(self, seq: int) -> Transfer | None:
        return next((t for t in self.transfers if t.seq == seq and t.session == self.session), None)

    @property
    def forgettable(self) -> bool:
        return self.link is Link.DOWN and not self.transfers


# --- events: what happened ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """With a good proof and a manifest equal to ours."""

    session: Session


@dataclass(frozen=True, slots=True)
class LinkOpened:
    session: Session


@dataclass(frozen=True, slots=True)
class Attached:
    session: Session


@dataclass(frozen=True, slots=True)
class LinkTimeout:
    """Silence: no ATTACH, or no frame."""


@dataclass(frozen=True, slots=True)
class LinkFailed:
    session: Session


@dataclass(frozen=True, slots=True)
class LinkClosed:
    session: Session


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """The peer's process has ended: nobody reads through any of its links."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Floor:
    session: Session
    floor: int


@dataclass(frozen=True, slots=True)
class Dispatched:
    """`key` is fresh. `refusal` is what the caller found wrong with it, if anything."""

    session: Session
    seq: int
    transfer: int
    key: int
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    session: Session
    seq: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine holds source pages: from here on the fabric may read them."""

    key: int


@dataclass(frozen=True, slots=True)
class Failing:
    """The engine cannot finish it."""

    key: int
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing more is posted, and what was posted has ended, or its link is closed. `clean`: every post has
    completed locally.
    """

    key: int
    posted: int
    failed: bool
    clean: bool
    link_closed: bool


Event = (
    Hello
    | LinkOpened
    | Attached
    | LinkTimeout
    | LinkFailed
    | LinkClosed
    | ProcessGone
    | Floor
    | Dispatched
    | Cancelled
    | Admitted
    | Failing
    | Drained
)


# --- actions: what to do, in order ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenLink:
    session: Session


@dataclass(frozen=True, slots=True)
class ConnectLink:
    session: Session


@dataclass(frozen=True, slots=True)
class SendHelloAck:
    session: Session


@dataclass(frozen=True, slots=True)
class CloseLink:
    session: Session


@dataclass(frozen=True, slots=True)
class SendAccept:
    seq: int
    transfer: int
    key: int


@dataclass(frozen=True, slots=True)
class SendReject:
    seq: int
    transfer: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class SendSent:
    seq: int
    transfer: int
    key: int
    posted: int


@dataclass(frozen=True, slots=True)
class SendFail:
    seq: int
    transfer: int
    posted: int
    drained: bool
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class SendCancelAck:
    seq: int
    transfer: int
    posted: int
    unknown: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """A transfer to carry out: declare it to the fabric and hand it to the engine."""

    key: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Post nothing more. Answered by Drained."""

    key: int


@dataclass(frozen=True, slots=True)
class TellCancelled:
    """The engine need not go on with it."""

    key: int


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody reads the source pages any more."""

    key: int


Action = (
    OpenLink
    | ConnectLink
    | SendHelloAck
    | CloseLink
    | SendAccept
    | SendReject
    | SendSent
    | SendFail
    | SendCancelAck
    | Begin
    | Stop
    | TellCancelled
    | Release
)

Step = tuple[Peer, tuple[Action, ...]]
FENCES = Fences()


def step(peer: Peer, event: Event, fences: Fences = FENCES) -> Step:
    """Events that do not fit the state change nothing: a message may come late, twice, or out of order."""
    match event:
        case Hello(session):
            return _hello(peer, session, fences)
        case LinkTimeout():
            return _close(peer)
        case ProcessGone(incarnation):
            return _process_gone(peer, incarnation)
        case LinkOpened() | Attached() | LinkFailed() | LinkClosed():
            return _link_event(peer, event) if event.session == peer.session else (peer, ())
        case Floor() | Dispatched() | Cancelled():
            if event.session != peer.session or peer.link is not Link.UP:
                return peer, ()
            return _asked(peer, event)
        case Admitted(key):
            t = peer.find(key)
            if t is None or t.phase is not Phase.QUEUED:
                return peer, ()
            return _update(peer, replace(t, phase=Phase.SENDING)), ()
        case Failing(key, reason, retryable):
            t = peer.find(key)
            if t is None or t.phase not in (Phase.QUEUED, Phase.SENDING):
                return peer, ()
            refusal = Refusal(reason)
            t = replace(t, phase=Phase.STOPPING, outcome=Outcome.FAILED, refusal=refusal, retryable=retryable)
            return _update(peer, t), (Stop(key), SendFail(t.seq, t.id, 0, False, reason, retryable))
        case Drained(key):
            t = peer.find(key)
            return _drained(peer, t, event, fences) if t is not None else (peer, ())


# --- the link -------------------------------------------------------------------------------------


def _hello(peer: Peer, session: Session, fences: Fences) -> Step:
    if session < peer.session:
        return peer, ()
    if session == peer.session:
        return peer, (SendHelloAck(session),) if peer.link in (Link.GREETED, Link.UP) else ()
    closed, actions = _close(peer)
    peer = replace(closed, session=session, link=Link.OPENING, floor=0)
    released = [t for t in peer.transfers if t.phase is Phase.UNFENCED and _reader_closed(peer, t, fences)]
    peer = replace(peer, transfers=tuple(t for t in peer.transfers if t not in released))
    return peer, (*actions, *(Release(t.key) for t in released), OpenLink(session))


def _link_event(peer: Peer, event: LinkOpened | Attached | LinkFailed | LinkClosed) -> Step:
    match event:
        case LinkOpened(session) if peer.link is Link.OPENING:
            return replace(peer, link=Link.GREETED), (ConnectLink(session), SendHelloAck(session))
        case Attached() if peer.link is Link.GREETED:
            return replace(peer, link=Link.UP), ()
        case LinkFailed():
            return _close(peer)
        case LinkClosed() if peer.link is Link.CLOSING:
            return replace(peer, link=Link.DOWN), ()
    return peer, ()


def _close(peer: Peer) -> Step:
    """The records go with the link, since nobody can ask again; what was posted is waited for."""
    if peer.link in (Link.DOWN, Link.CLOSING):
        return peer, ()
    kept = []
    told: list[Action] = []
    for t in peer.transfers:
        if t.phase in (Phase.QUEUED, Phase.SENDING):
            told.append(TellCancelled(t.key))
        if t.phase in HOLDING:
            phase = t.phase if t.phase is Phase.UNFENCED else Phase.STOPPING
            kept.append(replace(t, phase=phase, outcome=Outcome.NONE))
    return replace(peer, link=Link.CLOSING, transfers=tuple(kept)), (CloseLink(peer.session), *told)


def _process_gone(peer: Peer, incarnation: int) -> Step:
    actions: tuple[Action, ...] = ()
    if incarnation == peer.session.incarnation:
        peer, actions = _close(peer)
    released = [
        t for t in peer.transfers if t.phase is Phase.UNFENCED and t.session.incarnation == incarnation
    ]
    kept = tuple(
        replace(t, reader_gone=True) if t.session.incarnation == incarnation else t
        for t in peer.transfers
        if t not in released
    )
    return replace(peer, transfers=kept), (*actions, *(Release(t.key) for t in released))


def _reader_closed(peer: Peer, t: Transfer, fences: Fences) -> bool:
    """Whether the peer can no longer read `t`'s source pages: its process is gone, or it speaks in a later
    epoch, having closed that link.
    """
    later = t.session.incarnation == peer.session.incarnation and t.session.epoch < peer.session.epoch
    return t.reader_gone or (fences.peer_close and later)


# --- transfers ------------------------------------------------------------------------------------


def _update(peer: Peer, transfer: Transfer) -> Peer:
    """Replaces the record with the same session and seq; a finished one below the floor is dropped."""
    kept = []
    for t in peer.transfers:
        if t.session == transfer.session and t.seq == transfer.seq:
            t = transfer
        if t.phase in HOLDING or t.seq >= peer.floor:
            kept.append(t)
    return replace(peer, transfers=tuple(kept))


def _asked(peer: Peer, event: Floor | Dispatched | Cancelled) -> Step:
    if isinstance(event, Floor):
        floor = max(peer.floor, event.floor)
        kept = tuple(t for t in peer.transfers if t.phase in HOLDING or t.seq >= floor)
        return replace(peer, floor=floor, transfers=kept), ()
    if event.seq < peer.floor:
        return peer, ()
    t = peer.record(event.seq)
    if isinstance(event, Cancelled):
        return _cancelled(peer, event, t)
    if t is not None:
        return peer, _same_answer(t)
    t = Transfer(event.session, event.seq, event.transfer, event.key, Phase.QUEUED)
    if event.refusal is not None:
        t = replace(t, key=0, phase=Phase.REFUSED, refusal=event.refusal)
        return replace(peer, transfers=(*peer.transfers, t)), _same_answer(t)
    return replace(peer, transfers=(*peer.transfers, t)), (Begin(t.key), SendAccept(t.seq, t.id, t.key))


def _same_answer(t: Transfer) -> tuple[Action, ...]:
    """What decode has been told of `t`, or would have been but for a lost frame."""
    match t.phase:
        case Phase.QUEUED | Phase.SENDING:
            return (SendAccept(t.seq, t.id, t.key),)
        case Phase.REFUSED:
            assert t.refusal is not None
            return (SendReject(t.seq, t.id, t.refusal),)
        case Phase.TOMBSTONE:
            return (SendCancelAck(t.seq, t.id, 0, True),)
        case Phase.DONE:
            return _final(t)
    return ()


def _final(t: Transfer) -> tuple[Action, ...]:
    match t.outcome:
        case Outcome.SENT:
            return (SendSent(t.seq, t.id, t.key, t.posted),)
        case Outcome.CANCELLED:
            return (SendCancelAck(t.seq, t.id, t.posted, False),)
        case Outcome.FAILED:
            assert t.refusal is not None
            return (SendFail(t.seq, t.id, t.posted, True, t.refusal.reason, t.retryable),)
    return ()


def _cancelled(peer: Peer, event: Cancelled, t: Transfer | None) -> Step:
    if t is None:
        t = Transfer(event.session, event.seq, event.transfer, 0, Phase.TOMBSTONE)
        return replace(peer, transfers=(*peer.transfers, t)), _same_answer(t)
    match t.phase:
        case Phase.QUEUED | Phase.SENDING:
            t = replace(t, phase=Phase.STOPPING, outcome=Outcome.CANCELLED)
            return _update(peer, t), (Stop(t.key), TellCancelled(t.key))
        case Phase.DONE:
            return peer, (SendCancelAck(t.seq, t.id, t.posted, False),)
    return peer, _same_answer(t)


def _drained(peer: Peer, t: Transfer, event: Drained, fences: Fences) -> Step:
    if t.phase not in (Phase.QUEUED, Phase.SENDING, Phase.STOPPING):
        return peer, ()
    proven = event.clean or (event.link_closed and (fences.close or _reader_closed(peer, t, fences)))
    cut_off = event.link_closed or t.session != peer.session
    told: tuple[Action, ...] = () if t.phase is Phase.STOPPING else (TellCancelled(t.key),)
    if not proven:
        return _update(peer, replace(t, phase=Phase.UNFENCED, outcome=Outcome.NONE)), told
    if cut_off or peer.link is not Link.UP:
        peer = replace(peer, transfers=tuple(other for other in peer.transfers if other.key != t.key))
        return peer, (*told, Release(t.key))
    if t.phase is not Phase.STOPPING and not event.failed:
        told = ()
        t = replace(t, outcome=Outcome.SENT)
    elif t.phase is not Phase.STOPPING:
        t = replace(t, outcome=Outcome.FAILED, refusal=Refusal("a write failed"))
    t = replace(t, phase=Phase.DONE, posted=event.posted)
    return _update(peer, t), (*told, *_final(t), Release(t.key))
