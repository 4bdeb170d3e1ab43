"""The world in which the two pure machines are checked: an adversarial network, a fabric that writes when it
likes, crashes.

One state is everything about one (decode, prefill) pair: both machines, frames under way, endpoints, writes,
tickets. `moves` yields every next state. What the adversary may do, at any time:

    frames    deliver any frame ever sent on a link that is still open: late, again, out of order (delivery
              uses nothing up); forget all of them
    timeouts  fire any of them: there is no clock, so a pause of either side is some order of moves
    writes    read the source, and land, whenever their endpoints allow; or get lost
    crashes   end a process; its next incarnation knows nothing
    engines   admit, fail, cancel; refuse a transfer

Abstractions, each towards more behaviour, or none less. A lead handles an event when it happens: its events
come in order, so handling one later is the same as its happening later. A local completion may come any time
after the source was read. A page's content is right if its own transfer wrote it. There is one layer, and the
pages of a transfer are posted in order.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tandem_runtime.messenger import decode, prefill
from tandem_runtime.messenger.prefill import Refusal, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    DecodeStep = Callable[[decode.Peer, decode.Event, decode.Limits], decode.Step]
    PrefillStep = Callable[[prefill.Peer, prefill.Event, prefill.Fences], prefill.Step]

UNREAD, READ, LANDED, LOST = range(4)
UNBORN, LIVE, READY, FAILED, CANCELLED = range(5)

NO_PAGE_REUSED_UNDER_A_WRITER = "no destination page is reused while a write can land in it"
NO_PAGE_REUSED_UNDER_A_READER = "no source page is reused while it can be read"
READY_MEANS_RIGHT_BYTES = "ready means that every page was written, by its own transfer"
EVERY_TICKET_ENDS_ONCE = "every ticket ends once"
EVERY_TICKET_ENDS = "every ticket ends, and every page comes back"


class Violation(Exception):
    """An invariant is broken; its name is the message."""


@dataclass(frozen=True)
class Bounds:
    transfers: int = 1
    pages: int = 2
    epochs: int = 1
    decode_incarnations: int = 1
    prefill_incarnations: int = 1
    memories: int = 1  # how often prefill may forget a peer, and one
    attempts: int = 1
    shm: bool = False
    one_endpoint: bool = False  # EFA: closing a link ends nothing, so pages of a broken one stay out of use
    losses: bool = True
    refusals: bool = True
    engine_failures: bool = True


class Life(NamedTuple):
    """As long as prefill remembers a peer: to the end of its process, or until it forgets one it owes
    nothing.
    """

    incarnation: int = 1
    memory: int = 1


class Out(NamedTuple):
    """One transfer in prefill's fabric."""

    life: Life
    key: int
    transfer: int
    session: Session
    writes: tuple[int, ...] = ()  # posted so far, by page
    admitted: bool = False
    stopped: bool = False
    drained: bool = False
    released: bool = False


class Ticket(NamedTuple):
    """`landed`: the pages written with its immediate, in order of page, with repetition."""

    fate: int = UNBORN
    released: bool = False
    landed: tuple[int, ...] = ()


class Note(enum.Enum):
    """Bodies that carry nothing."""

    HELLO = enum.auto()
    HELLO_ACK = enum.auto()
    ATTACH = enum.auto()
    PONG = enum.auto()


@dataclass(frozen=True)
class FloorIs:
    floor: int


class Frame(NamedTuple):
    """Through the link of `session` with this life of prefill; HELLO has none yet."""

    to_decode: bool
    session: Session
    life: Life | None
    body: object


class World(NamedTuple):
    """Machines and frames by their numbers in `Model`, the latter as bits."""

    decode: int
    connected: Life | None  # the prefill at the other end of decode's link
    prefill: int
    life: Life
    endpoints: tuple[Session, ...]  # prefill's, open or closing
    outs: tuple[Out, ...]
    frames: int
    incarnation: int  # decode's
    tickets: tuple[Ticket, ...]


class Move(NamedTuple):
    """`fair`: part of any fair continuation. The rest (losses, crashes, new work) may also never happen
    again. `crash`: of a process that may belong to other pairs too.
    """

    name: str
    fair: bool
    world: World
    crash: str = ""


class Scene:
    """A world being changed."""

    __slots__ = World._fields

    def __init__(self, world: World) -> None:
        (
            self.decode,
            self.connected,
            self.prefill,
            self.life,
            self.endpoints,
            self.outs,
            self.frames,
            self.incarnation,
            self.tickets,
        ) = world

    def change_out(self, life: Life, key: int, **changes: object) -> None:
        self.outs = tuple(
            out._replace(**changes) if out.key == key and out.life == life else out for out in self.outs
        )

    def change_ticket(self, transfer: int, **changes: object) -> None:
        ticket = self.tickets[transfer]._replace(**changes)
        self.tickets = (*self.tickets[:transfer], ticket, *self.tickets[transfer + 1 :])

    def fate(self, transfer: int, fate: int) -> None:
        if self.tickets[transfer].fate != LIVE:
            raise Violation(EVERY_TICKET_ENDS_ONCE)
        self.change_ticket(transfer, fate=fate)


class Model:
    """The moves of one pair. Machine steps are remembered: the same one is taken in very many worlds."""

    def __init__(
        self,
        bounds: Bounds,
        decode_step: DecodeStep = decode.step,
        prefill_step: PrefillStep = prefill.step,
    ) -> None:
        self.bounds = bounds
        self._limits = decode.Limits(
            bounds.attempts, bounds.attempts, bounds.attempts, close_is_fence=not bounds.one_endpoint
        )
        closes = not bounds.shm and not bounds.one_endpoint
        self._fences = prefill.Fences(close=closes, peer_close=not bounds.one_endpoint)
        self._decode_step, self._prefill_step = decode_step, prefill_step
        self.decodes: list[decode.Peer] = []
        self.prefills: list[prefill.Peer] = []
        self.frames: list[Frame] = []
        self._decode_numbers: dict[decode.Peer, int] = {}
        self._prefill_numbers: dict[prefill.Peer, int] = {}
        self._frame_bits: dict[Frame, int] = {}
        self._decode_steps: dict[tuple[int, decode.Event], tuple[int, tuple[decode.Action, ...]]] = {}
        self._prefill_steps: dict[tuple[int, prefill.Event], tuple[int, tuple[prefill.Action, ...]]] = {}
        self._relevant: dict[tuple[object, ...], tuple[int, int]] = {}
        # One epoch more than transfers get, where prefill may need to hear that decode has closed the last.
        self._last_epoch = bounds.epochs + (1 if bounds.shm else 0)
        self._new_decode = self._number_decode(decode.Peer())
        self._new_prefill = self._number_prefill(prefill.Peer())

    def start(self) -> World:
        tickets = (Ticket(),) * self.bounds.transfers
        return World(self._new_decode, None, self._new_prefill, Life(), (), (), 0, 1, tickets)

    def ended(self, world: World) -> bool:
        """Every ticket has its end, and every page, of both sides, is back, or known to be out of use."""
        if self.bounds.one_endpoint:
            return all(t.fate != LIVE for t in world.tickets)
        tickets = all(t.fate != LIVE and (t.released or t.fate == UNBORN) for t in world.tickets)
        return tickets and all(out.released for out in world.outs)

    def moves(self, world: World) -> Iterator[Move]:
        yield from self._decode_moves(world)
        yield from self._prefill_moves(world)
        yield from self._frame_moves(world)
        for out in world.outs:
            yield from self._write_moves(world, out)
        if world.incarnation < self.bounds.decode_incarnations:
            yield Move("decode crashes", False, self.decode_crashed(world), "decode")
        if world.life.incarnation < self.bounds.prefill_incarnations:
            yield Move("prefill crashes", False, self.prefill_crashed(world), "prefill")

    # --- what each side may do --------------------------------------------------------------------

    def _decode_moves(self, world: World) -> Iterator[Move]:
        state = self.decodes[world.decode]
        match state.link:
            case decode.Link.DOWN:
                if state.epoch < self._last_epoch:
                    yield self._decode(world, "decode opens a link", decode.Open())
            case decode.Link.OPENING:
                yield self._decode(world, "decode's link is open", decode.LinkOpened(state.epoch))
            case decode.Link.CLOSING:
                yield self._decode(world, "decode's link is closed", decode.LinkClosed(state.epoch))
            case decode.Link.GREETING if state.epoch > self.bounds.epochs:
                scene = Scene(world)
                self._send(scene, Frame(False, Session(world.incarnation, state.epoch), None, Note.HELLO))
                yield Move("the last HELLO is sent again", True, self._world(scene))
            case _:
                yield self._decode(world, "decode's link times out", decode.LinkTimeout())
        if state.link is decode.Link.UP:
            # In order, since the transfers are alike: which is first is only a name.
            number = next((n for n, ticket in enumerate(world.tickets) if ticket.fate == UNBORN), None)
            if number is not None:
                scene = Scene(world)
                scene.change_ticket(number, fate=LIVE)
                self._step_decode(scene, decode.Dispatch(number, self.bounds.pages))
                yield Move(f"dispatch {number}", False, self._world(scene))
        for t in state.transfers:
            if t.phase is not decode.Phase.FENCED:
                yield self._decode(world, f"transfer {t.id} times out", decode.TransferTimeout(t.id))
            if not t.told:
                scene = Scene(world)
                scene.change_ticket(t.id, fate=CANCELLED)
                self._step_decode(scene, decode.Cancel(t.id))
                yield Move(f"cancel {t.id}", False, self._world(scene))

    def _prefill_moves(self, world: World) -> Iterator[Move]:
        state = self.prefills[world.prefill]
        if state.link is prefill.Link.OPENING:
            yield self._prefill(world, "prefill's link is open", prefill.LinkOpened(state.session))
        if state.link in (prefill.Link.OPENING, prefill.Link.GREETED, prefill.Link.UP):
            yield self._prefill(world, "prefill's link times out", prefill.LinkTimeout())
        if (
            state.forgettable
            and state.session != prefill.NO_SESSION
            and world.life.memory < self.bounds.memories
        ):
            scene = Scene(world)
            scene.prefill = self._new_prefill
            scene.life = world.life._replace(memory=world.life.memory + 1)
            yield Move("prefill forgets its peer", False, self._world(scene))
        for session in world.endpoints:
            if session != state.session or state.link is prefill.Link.CLOSING:
                yield from self._prefill_closes(world, session)
        for out in world.outs:
            if out.life == world.life and not out.drained:
                if not out.admitted:
                    yield self._prefill(world, f"admit {out.transfer}", prefill.Admitted(out.key))
                if self.bounds.engine_failures and not out.stopped:
                    failing = prefill.Failing(out.key, "failed", True)
                    yield self._prefill(world, f"the engine fails {out.transfer}", failing, fair=False)
        if self.bounds.shm and world.incarnation > 1:
            gone = prefill.ProcessGone(world.incarnation - 1)
            yield self._prefill(world, "decode's old process is seen to be gone", gone)

    def _prefill_closes(self, world: World, session: Session) -> Iterator[Move]:
        """Its endpoint closes: OutDrained for each transfer, then LinkClosed. Whether what was read had also
        completed before is anybody's guess."""
        outs = [o for o in world.outs if o.session == session and o.life == world.life and not o.drained]
        for clean in (True, False):
            if any(UNREAD in out.writes for out in outs) if clean else not any(out.writes for out in outs):
                continue
            scene = Scene(world)
            scene.endpoints = tuple(s for s in world.endpoints if s != session)
            for out in outs:
                # On net, tcp and verbs what was not read yet never will be.
                writes = _lose(out.writes, UNREAD) if self._fences.close else out.writes
                scene.change_out(out.life, out.key, drained=True, writes=writes)
                done = clean or not out.writes
                event = prefill.Drained(out.key, len(out.writes), False, done, True)
                self._step_prefill(scene, event)
            self._step_prefill(scene, prefill.LinkClosed(session))
            yield Move(f"prefill's link {tuple(session)} is closed, {clean=}", True, self._world(scene))

    def _frame_moves(self, world: World) -> Iterator[Move]:
        bits = world.frames
        while bits:
            bit = bits & -bits
            bits ^= bit
            frame = self.frames[bit.bit_length() - 1]
            if frame.to_decode:
                yield from self._to_decode(world, frame)
            else:
                yield from self._to_prefill(world, frame)
        if world.frames and self.bounds.losses:
            yield Move("all frames are lost", False, world._replace(frames=0))

    def _to_decode(self, world: World, frame: Frame) -> Iterator[Move]:
        epoch = frame.session.epoch
        if frame.body is Note.HELLO_ACK:
            if epoch <= self.bounds.epochs:
                scene = Scene(world)
                scene.connected = frame.life
                self._step_decode(scene, decode.Greeted(epoch))
                yield Move("HELLO_ACK", True, self._world(scene))
            return
        event: decode.Event
        match frame.body:
            case Note.PONG:
                event = decode.Ponged(epoch)
            case prefill.SendAccept(_, transfer, _):
                event = decode.Accepted(epoch, transfer, self.bounds.pages)
            case prefill.SendReject(_, transfer, refusal):
                event = decode.Rejected(epoch, transfer, refusal.reason, True)
            case prefill.SendSent(_, transfer, _, posted):
                event = decode.Sent(epoch, transfer, posted)
            case prefill.SendFail(_, transfer, posted, drained, reason, retryable):
                event = decode.Failed(epoch, transfer, posted, drained, reason, retryable)
            case prefill.SendCancelAck(_, transfer, posted, unknown):
                event = decode.CancelAcked(epoch, transfer, posted, unknown)
            case _:
                raise AssertionError(frame)
        yield self._decode(world, f"decode gets {event}", event)

    def _to_prefill(self, world: World, frame: Frame) -> Iterator[Move]:
        match frame.body:
            case Note.HELLO:
                yield self._prefill(world, f"HELLO {tuple(frame.session)}", prefill.Hello(frame.session))
            case Note.ATTACH:
                yield self._prefill(world, "ATTACH", prefill.Attached(frame.session))
            case FloorIs(floor):
                yield self._prefill(world, f"floor {floor}", prefill.Floor(frame.session, floor))
            case decode.SendCancel(transfer, seq):
                event = prefill.Cancelled(frame.session, seq, transfer)
                yield self._prefill(world, f"CANCEL {transfer}", event)
            case decode.SendDispatch(transfer, seq):
                taken = {out.key for out in world.outs}
                taken |= {t.key for t in self.prefills[world.prefill].transfers}
                key = next(key for key in range(1, len(taken) + 2) if key not in taken)
                for refusal in (None, Refusal("busy")) if self.bounds.refusals else (None,):
                    dispatched = prefill.Dispatched(frame.session, seq, transfer, key, refusal)
                    name = f"DISPATCH {transfer}{' is refused' if refusal else ''}"
                    yield self._prefill(world, name, dispatched)

    # --- writes -----------------------------------------------------------------------------------

    def _write_moves(self, world: World, out: Out) -> Iterator[Move]:
        sending = out.life == world.life and out.session in world.endpoints
        writes = out.writes
        if sending and out.admitted and not out.stopped and len(writes) < self.bounds.pages:
            yield self._written(world, out, (*writes, UNREAD), f"post {out.transfer}.{len(writes)}")
        lands = self._lands(world, out)
        for page, write in enumerate(writes):
            if self.bounds.shm:
                # The target reads, and lands, in one go, as long as the source's process lives.
                if write == UNREAD and lands and out.life.incarnation == world.life.incarnation:
                    _check_source(out)
                    yield self._land(world, out, page)
            elif write == UNREAD and (sending or (self.bounds.one_endpoint and out.life == world.life)):
                _check_source(out)
                read = (*writes[:page], READ, *writes[page + 1 :])
                yield self._written(world, out, read, f"read {out.transfer}.{page}")
            elif write == READ and lands:
                yield self._land(world, out, page)
        if self.bounds.losses and (UNREAD in writes or READ in writes):
            lost = _lose(writes, UNREAD, READ)
            yield self._written(world, out, lost, f"writes of {out.transfer} are lost", fair=False)
        if sending and not out.drained:
            yield from self._drains(world, out)

    def _lands(self, world: World, out: Out) -> bool:
        """Whether decode's end of the link that `out` writes through is open."""
        if self.bounds.one_endpoint:
            return out.session.incarnation == world.incarnation
        state = self.decodes[world.decode]
        here = state.link in (decode.Link.ATTACHING, decode.Link.UP, decode.Link.CLOSING)
        return here and out.session == (world.incarnation, state.epoch) and out.life == world.connected

    def _written(
        self, world: World, out: Out, writes: tuple[int, ...], name: str, *, fair: bool = True
    ) -> Move:
        scene = Scene(world)
        scene.change_out(out.life, out.key, writes=writes)
        return Move(name, fair, self._world(scene))

    def _land(self, world: World, out: Out, page: int) -> Move:
        ticket = world.tickets[out.transfer]
        if ticket.released:
            raise Violation(NO_PAGE_REUSED_UNDER_A_WRITER)
        scene = Scene(world)
        scene.change_ticket(out.transfer, landed=tuple(sorted((*ticket.landed, page))))
        scene.change_out(out.life, out.key, writes=(*out.writes[:page], LANDED, *out.writes[page + 1 :]))
        self._count(scene, out.transfer)
        return Move(f"land {out.transfer}.{page}", True, self._world(scene))

    def _count(self, scene: Scene, transfer: int) -> None:
        """The counter reports when it equals what it was told to expect."""
        t = self.decodes[scene.decode].find(transfer)
        count = len(scene.tickets[transfer].landed)
        if t is not None and count == (t.expected if t.posted is None else t.posted):
            self._step_decode(scene, decode.Counted(transfer, count))

    def _drains(self, world: World, out: Out) -> Iterator[Move]:
        """All that was posted has completed locally: each may, as soon as its source has been read."""
        whole = len(out.writes) == self.bounds.pages
        lost = LOST in out.writes
        if (whole or out.stopped or lost) and all(
            w >= (LANDED if self.bounds.shm else READ) for w in out.writes
        ):
            for failed in (False, True) if lost else (False,):
                if failed or whole or out.stopped:
                    scene = Scene(world)
                    scene.change_out(out.life, out.key, drained=True, stopped=True)
                    event = prefill.Drained(out.key, len(out.writes), failed, True, False)
                    self._step_prefill(scene, event)
                    yield Move(f"drained {out.transfer}, {failed=}", True, self._world(scene))

    # --- crashes ----------------------------------------------------------------------------------

    def decode_crashed(self, world: World) -> World:
        scene = Scene(world)
        scene.decode, scene.connected, scene.incarnation = self._new_decode, None, world.incarnation + 1
        scene.tickets = tuple(Ticket(CANCELLED, True) if t.fate else t for t in world.tickets)
        return self._world(scene)

    def prefill_crashed(self, world: World) -> World:
        """Its memory and endpoints are gone; what the kernel had taken of its writes may still arrive."""
        scene = Scene(world)
        scene.prefill, scene.life, scene.endpoints = self._new_prefill, Life(world.life.incarnation + 1), ()
        scene.outs = tuple(
            out._replace(drained=True, stopped=True, released=True, writes=_lose(out.writes, UNREAD))
            for out in world.outs
        )
        return self._world(scene)

    # --- carrying out actions ---------------------------------------------------------------------

    def _decode(self, world: World, name: str, event: decode.Event) -> Move:
        scene = Scene(world)
        self._step_decode(scene, event)
        return Move(name, True, self._world(scene))

    def _prefill(self, world: World, name: str, event: prefill.Event, *, fair: bool = True) -> Move:
        scene = Scene(world)
        self._step_prefill(scene, event)
        return Move(name, fair, self._world(scene))

    def _step_decode(self, scene: Scene, event: decode.Event) -> None:
        step = self._decode_steps.get((scene.decode, event))
        if step is None:
            state, actions = self._decode_step(self.decodes[scene.decode], event, self._limits)
            step = self._decode_steps[scene.decode, event] = self._number_decode(state), actions
        scene.decode, actions = step
        if not actions:
            return
        state = self.decodes[scene.decode]
        session = Session(scene.incarnation, state.epoch)
        for action in actions:
            match action:
                case decode.OpenLink():
                    scene.connected = None
                case decode.SendHello(epoch):
                    hello = Session(scene.incarnation, epoch)
                    self._send(scene, Frame(False, hello, None, Note.HELLO))
                case decode.SendAttach():
                    self._send(scene, Frame(False, session, scene.connected, Note.ATTACH))
                case decode.SendDispatch() | decode.SendCancel():
                    self._send(scene, Frame(False, session, scene.connected, action))
                    if state.floor > 1:
                        self._send(scene, Frame(False, session, scene.connected, FloorIs(state.floor)))
                case decode.TellReady(transfer):
                    if scene.tickets[transfer].landed != tuple(range(self.bounds.pages)):
                        raise Violation(READY_MEANS_RIGHT_BYTES)
                    scene.fate(transfer, READY)
                case decode.TellFailed(transfer):
                    scene.fate(transfer, FAILED)
                case decode.Release(transfer):
                    if scene.tickets[transfer].released or scene.tickets[transfer].fate == LIVE:
                        raise Violation(EVERY_TICKET_ENDS_ONCE)
                    scene.change_ticket(transfer, released=True)
        for action in actions:
            if isinstance(action, decode.Expect):
                self._count(scene, action.transfer)

    def _step_prefill(self, scene: Scene, event: prefill.Event) -> None:
        step = self._prefill_steps.get((scene.prefill, event))
        if step is None:
            state, actions = self._prefill_step(self.prefills[scene.prefill], event, self._fences)
            step = self._prefill_steps[scene.prefill, event] = self._number_prefill(state), actions
        scene.prefill, actions = step
        state = self.prefills[scene.prefill]
        life = scene.life
        for action in actions:
            match action:
                case prefill.OpenLink(session):
                    scene.endpoints = (*scene.endpoints, session)
                case prefill.SendHelloAck(session):
                    self._send(scene, Frame(True, session, life, Note.HELLO_ACK))
                case prefill.Begin(key):
                    t = state.find(key)
                    assert t is not None
                    scene.outs = (*scene.outs, Out(life, key, t.id, t.session))
                case prefill.Stop(key):
                    scene.change_out(life, key, stopped=True)
                case prefill.Release(key):
                    scene.change_out(life, key, released=True)
                case prefill.ConnectLink() | prefill.CloseLink() | prefill.TellCancelled():
                    pass  # CLOSING lets the endpoint close; the engine may be told when it likes
                case _:
                    self._send(scene, Frame(True, state.session, life, action))
        if isinstance(event, prefill.Admitted):
            t = state.find(event.key)
            if t is not None and t.phase is prefill.Phase.SENDING:
                scene.change_out(life, event.key, admitted=True)
        elif isinstance(event, prefill.Attached) and state.link is prefill.Link.UP:
            self._send(scene, Frame(True, state.session, life, Note.PONG))

    def _send(self, scene: Scene, frame: Frame) -> None:
        bit = self._frame_bits.get(frame)
        if bit is None:
            bit = self._frame_bits[frame] = 1 << len(self.frames)
            self.frames.append(frame)
        scene.frames |= bit

    # --- equal worlds are equal -------------------------------------------------------------------

    def _number_decode(self, state: decode.Peer) -> int:
        number = self._decode_numbers.setdefault(state, len(self.decodes))
        if number == len(self.decodes):
            self.decodes.append(state)
        return number

    def _number_prefill(self, state: prefill.Peer) -> int:
        number = self._prefill_numbers.setdefault(state, len(self.prefills))
        if number == len(self.prefills):
            self.prefills.append(state)
        return number

    def _world(self, scene: Scene) -> World:
        """Without what can have no effect any more: frames of closed links, transfers that are over."""
        state = self.decodes[scene.decode]
        here = (scene.incarnation, state.epoch)
        outs = scene.outs
        if outs:
            outs = tuple(out for out in outs if not (out.released and out.drained and self._over(out, here)))
        frames = scene.frames
        if frames:
            place = (scene.decode, scene.connected, scene.prefill, scene.life, scene.endpoints, here)
            known, mask = self._relevant.get(place, (0, 0))
            if known < len(self.frames):
                for number in range(known, len(self.frames)):
                    if self._matters(self.frames[number], scene, here):
                        mask |= 1 << number
                self._relevant[place] = len(self.frames), mask
            frames &= mask
        return World(
            scene.decode,
            scene.connected,
            scene.prefill,
            scene.life,
            scene.endpoints,
            outs,
            frames,
            scene.incarnation,
            scene.tickets,
        )

    def _over(self, out: Out, here: tuple[int, int]) -> bool:
        if self.bounds.one_endpoint and out.session.incarnation == here[0]:
            return not (UNREAD in out.writes or READ in out.writes)
        return out.session != here or not (UNREAD in out.writes or READ in out.writes)

    def _matters(self, frame: Frame, scene: Scene, here: tuple[int, int]) -> bool:
        """Whether delivering `frame` could ever do anything, from here on. What ends for good is a link, a
        HELLO's question, a released transfer at decode.
        """
        state, peer = self.decodes[scene.decode], self.prefills[scene.prefill]
        if frame.body is Note.HELLO:
            forgetful = (
                scene.life.memory < self.bounds.memories
                or scene.life.incarnation < self.bounds.prefill_incarnations
            )
            asked = frame.session == here and state.link is decode.Link.GREETING
            return forgetful or asked or frame.session > peer.session
        if frame.body is Note.HELLO_ACK:
            return frame.session == here and state.link is decode.Link.GREETING
        if frame.to_decode:
            if frame.session != here or frame.life != scene.connected:
                return False
            if frame.body is Note.PONG:
                return state.link is decode.Link.ATTACHING
            transfer: int = frame.body.transfer  # type: ignore[attr-defined]  # all answers name theirs
            return state.link is decode.Link.UP and state.find(transfer) is not None
        if frame.life != scene.life or frame.session != peer.session or frame.session not in scene.endpoints:
            return False
        if frame.body is Note.ATTACH:
            return peer.link in (prefill.Link.OPENING, prefill.Link.GREETED)
        if isinstance(frame.body, FloorIs):
            return frame.body.floor > peer.floor and peer.link is not prefill.Link.CLOSING
        return peer.link in (prefill.Link.GREETED, prefill.Link.UP)


def _check_source(out: Out) -> None:
    if out.released:
        raise Violation(NO_PAGE_REUSED_UNDER_A_READER)


def _lose(writes: tuple[int, ...], *which: int) -> tuple[int, ...]:
    return tuple(LOST if write in which else write for write in writes)
