"""Decode's messenger: tickets for transfers, links to prefill peers. Carries out what `decode.py` decides.

Knows: which ticket rides on which transfer, whom to ask, clocks, frames. Does not know: when memory is safe
(`decode.py`), pages' owners, the engine.

    dispatch() ─► ticket ─► ready | failed ─► released     each at most once, released always and last

The loop owns everything here; nothing blocks. Time enters twice: `on_tick` lets the timeouts of
`patience.py` fire, and a pause of our own (a stopped process, a stalled loop) is not held against the peers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..fabric import events as fabric_events
from . import decode, patience, plan, wire
from .assembly import Assembly
from .calls import Calls
from .courier import Courier
from .greeting import Greeter
from .peers import DEAD_S, HEARTBEAT_S, WEDGED_S, Candidate, Health, choose, health
from .slots import Slots
from .tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from ..kv import KVLayout
    from .authentication import PeerKeys
    from .manifest import Manifest
    from .ports import DecodeListener, FabricPort, Identity, PeerAddress

log = logging.getLogger("tandem.messenger")
CLOSE_S = 2.0
UNTIMED_MAX = 256
QUARANTINE_MAX = 64  # transfers whose pages nothing can free; beyond it nothing new is dispatched
NEVER_S = float("-inf")
RETRYABLE = frozenset({wire.Reject.BUSY, wire.Reject.DRAINING})


class NoPrefillError(RuntimeError):
    """No prefill peer can take a transfer now; ask `can_dispatch` first."""


@dataclass(slots=True)
class _Peer:
    address: PeerAddress
    state: decode.Peer = field(default_factory=decode.Peer)
    link: int = 0
    link_address: bytes = b""
    granted: tuple[fabric_events.GrantedRegion, ...] = ()  # what it may write with; dies with the link
    hello: wire.Hello | None = None
    key: bytes = b""  # the peer key that HELLO was proven with
    attempts: int = 0  # of keys
    ack: wire.HelloAck | None = None
    incarnation: int = 0
    refusal: str = ""
    mark: tuple[decode.Link, int] = (decode.Link.DOWN, 0)
    waiting_since_s: float = 0.0
    pinged_s: float = 0.0
    pong: wire.Pong | None = None
    pong_s: float = 0.0  # when it came
    age_s: float = 0.0  # how old its body was then
    health: Health = Health.HEALTHY
    seen_s: float = NEVER_S  # when it was last heard through a link that was up, until it is given up
    dispatched: int = 0
    assembly: Assembly = field(default_factory=Assembly)
    tickets: dict[int, Ticket] = field(default_factory=dict)  # by transfer
    untimed: dict[int, Ticket] = field(default_factory=dict)  # ready before their SENT came

    @property
    def up(self) -> bool:
        return self.state.link is decode.Link.UP

    @property
    def healthy(self) -> bool:
        return self.up and self.health is Health.HEALTHY

    @property
    def credits(self) -> int:
        """Transfers that it would still take from us."""
        if not self.up or self.pong is None or self.pong.draining:
            return 0
        held = sum(t.phase is not decode.Phase.QUARANTINED for t in self.state.transfers)
        return self.pong.credits - held

    @property
    def gone(self) -> bool:
        return self.state.link is decode.Link.DOWN and not self.state.transfers


class DecodeMessenger:
    def __init__(
        self,
        *,
        fabric: FabricPort,
        identity: Identity,
        manifest: Manifest,
        keys: PeerKeys,
        layout: KVLayout,
        ranks: int,
        regions: Sequence[wire.Region],
        listener: DecodeListener,
        zone: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert len(regions) == ranks
        self._fabric = fabric
        self._identity = identity
        self._greeter = Greeter(identity, manifest, keys)
        self._layout = layout
        self._ranks = ranks
        self._sharding = plan.Sharding(layout.kv_heads * ranks, ranks, ranks)
        self._listener = listener
        self._zone = zone
        self._clock = clock
        self._courier = Courier(fabric, identity, self, clock)
        self._calls = Calls(self._courier.guarded)
        self._limits = decode.Limits(close_is_fence=fabric.info.close_fences_target)
        self._peers: dict[str, _Peer] = {}  # by uid
        self._former: dict[str, _Peer] = {}  # no longer listed, not yet closed
        self._epochs: dict[str, int] = {}  # the last of peers that are gone: epochs never go back
        self._by_link: dict[int, _Peer] = {}
        self._tickets: dict[int, Ticket] = {}
        self._owners: dict[int, _Peer] = {}  # by transfer
        self._watched: dict[int, tuple[str, int, int]] = {}  # link -> uid, pid, start time of its process
        self._slots = Slots()
        self._next_ticket = 1
        self._draining = False
        self._closing = False
        self._all_down = asyncio.Event()

    # --- what the lead calls ----------------------------------------------------------------------

    def start(self) -> None:
        self._courier.start()

    @property
    def fault(self) -> str | None:
        """Why the fabric cannot be used any more; None while it can."""
        return self._courier.fault

    @property
    def paired(self) -> bool:
        """Some peer is attached."""
        return any(peer.up for peer in self._peers.values())

    @property
    def has_peer(self) -> bool:
        """Some peer is attached and healthy."""
        return any(peer.healthy for peer in self._peers.values())

    @property
    def peer_returns(self) -> bool:
        """Some listed peer was attached a moment ago, and may be again."""
        return any(
            peer.seen_s != NEVER_S and not peer.state.refused and peer.health is not Health.WEDGED
            for peer in self._peers.values()
        )

    def attached(self, uid: str) -> bool:
        peer = self._peers.get(uid)
        return peer is not None and peer.up

    def set_peers(self, addresses: Sequence[PeerAddress]) -> None:
        """The prefill workers that exist now. A peer no longer listed, or restarted, is let go."""
        with self._calls:
            listed = {address.uid: address for address in addresses}
            for uid in [uid for uid in self._peers if uid not in listed]:
                peer = self._former[uid] = self._peers.pop(uid)
                self._apply(peer, decode.Leave())
                self._calls.add(self._listener.changed)
            for uid, address in listed.items():
                self._list(uid, address)
            self._bury()

    def _list(self, uid: str, address: PeerAddress) -> None:
        peer = self._peers.get(uid)
        if peer is None and (peer := self._former.pop(uid, None)) is not None:
            # Back before its link was closed. Its epochs go on from there.
            peer.state = dataclasses.replace(peer.state, leaving=False)
            self._peers[uid] = peer
        if peer is None:
            state = decode.Peer(epoch=self._epochs.pop(uid, 0))
            peer = self._peers[uid] = _Peer(address, state, waiting_since_s=self._clock())
            self._apply(peer, decode.Open())
        elif peer.address != address:
            peer.address = address
            peer.state = dataclasses.replace(peer.state, refused=False)
            if peer.incarnation not in (0, address.incarnation):
                self._apply(peer, decode.LinkFailed(peer.state.epoch))

    def can_dispatch(self, avoid: frozenset[str] = frozenset()) -> bool:
        return self._choose(avoid) is not None

    def dispatch(
        self,
        request_id: str,
        tokens: Sequence[int],
        cached_tokens: int,
        pages: Sequence[int],
        *,
        priority: int = 0,
        avoid: frozenset[str] = frozenset(),
    ) -> int:
        """Asks a prefill peer for the KV of `tokens[cached_tokens:-1]`, to be written into `pages`. Returns
        the ticket.

        The caller keeps `pages` pinned until `released(ticket)`. `avoid` names pods. Raises NoPrefillError.
        """
        move = plan.pages_to_move(len(tokens), cached_tokens, self._layout.page_tokens)
        if not pages or len(pages) != len(move):
            raise ValueError(f"{request_id}: {len(pages)} pages for {len(move)} to move")
        peer = self._choose(avoid)
        if peer is None:
            raise NoPrefillError("no attached prefill peer has a credit")
        with self._calls:
            expected = plan.expected_writes(self._sharding, self._layout.layers, len(pages))
            transfer = self._slots.take()
            body = wire.Dispatch(
                transfer=transfer,
                request_id=request_id,
                tokens=plan.pack_u32(tokens),
                cached_tokens=cached_tokens,
                pages=plan.pack_u32(pages),
                expected=expected,
                replica_seed=transfer,
                priority=priority,
            )
            nbytes = expected * self._layout.page_nbytes
            now = self._clock()
            ticket = Ticket(self._next_ticket, transfer, peer.address.pod, body, nbytes, now, now)
            self._next_ticket += 1
            self._tickets[ticket.ticket] = peer.tickets[transfer] = ticket
            self._owners[transfer] = peer
            peer.dispatched += 1
            # Strictly before DISPATCH leaves: an immediate that finds no counter is lost.
            self._fabric.counter_arm(wire.slot_of(transfer), wire.gen_of(transfer), expected)
            self._apply(peer, decode.Dispatch(transfer, expected))
            return ticket.ticket

    def cancel(self, ticket: int, reason: str) -> None:
        """The caller has lost interest: only `released` follows. Ignores tickets that have ended."""
        known = self._tickets.get(ticket)
        if known is not None:
            with self._calls:
                known.message, known.abandoned = reason, True
                self._apply(self._owners[known.transfer], decode.Cancel(known.transfer))

    def drain(self) -> None:
        """No new transfers; those under way go on."""
        if not self._draining:
            self._draining = True
            for peer in self._peers.values():
                if peer.up:
                    self._send(peer, wire.MessageType.GOODBYE, 0, wire.Goodbye(finish_s=0.0))

    async def close(self) -> None:
        """Closes all links, so that every ticket ends, and waits for that for a moment."""
        self._closing = True
        self.drain()
        self.set_peers([])
        try:
            await asyncio.wait_for(self._all_down.wait(), CLOSE_S)
        except TimeoutError:
            log.warning("%d links did not close in %s s", len(self._former), CLOSE_S)
        self._courier.stop()
        self._calls.make()

    def snapshot(self) -> dict[str, object]:
        stats = self._fabric.stats()
        phases = Counter(t.phase.value for peer in self._everyone() for t in peer.state.transfers)
        return {
            "transfers": dict(phases),
            "peers": {peer.address.pod: self._describe(peer) for peer in self._peers.values()},
            "counters": {
                "stale": stats.immediates_stale,
                "unknown": stats.immediates_unknown,
                "quarantined": self._quarantined(),
                "writes": stats.immediates,
                "bytes": stats.immediates * self._layout.page_nbytes,
                **self._courier.tally.counts(),
            },
        }

    # --- events -----------------------------------------------------------------------------------

    def on_event(self, event: fabric_events.Event) -> None:
        with self._calls:
            match event:
                case fabric_events.Frame():
                    self._frame(event.link, event.frame)
                case fabric_events.CountReached():
                    self._counted(event)
                case fabric_events.BootstrapFrame():
                    self._greeting(event.frame)
                case fabric_events.LinkOpened():
                    if (peer := self._by_link.get(event.link)) is not None:
                        peer.link_address, peer.granted = event.address, event.regions
                        self._apply(peer, decode.LinkOpened(peer.state.epoch))
                case fabric_events.LinkFailed():
                    if (peer := self._by_link.get(event.link)) is not None:
                        log.info("the link to %s is lost: %s", peer.address.pod, event)
                        self._apply(peer, decode.LinkFailed(peer.state.epoch))
                case fabric_events.ProcessGone():
                    self._process_gone(*self._watched.pop(event.link, ("", 0, 0)))
                case fabric_events.LinkClosed():
                    if (peer := self._by_link.pop(event.link, None)) is not None:
                        self._apply(peer, decode.LinkClosed(peer.state.epoch))
                        self._bury()

    def _process_gone(self, uid: str, pid: int, start_time: int) -> None:
        peer = self._peers.get(uid)
        ack = peer.ack if peer is not None else None
        if peer is not None and ack is not None and (ack.pid, ack.start_time) == (pid, start_time):
            log.info("the process of %s is gone", peer.address.pod)
            self._apply(peer, decode.LinkFailed(peer.state.epoch))

    def _counted(self, event: fabric_events.CountReached) -> None:
        transfer = wire.transfer_id(event.slot, event.gen)
        peer = self._owners.get(transfer)
        if peer is not None:
            peer.tickets[transfer].ready_ns = event.time_ns
            self._apply(peer, decode.Counted(transfer, event.count))

    def _greeting(self, frame: bytes) -> None:
        header, data = wire.parse(frame)
        body = wire.decode_body(header.type, data)
        if not isinstance(body, wire.HelloAck | wire.HelloReject):
            raise wire.WireError(f"{header.type.name} on decode's bootstrap endpoint")
        nonce = body.hello_nonce
        peer = next((p for p in self._peers.values() if p.hello is not None and p.hello.nonce == nonce), None)
        if peer is None or peer.hello is None or header.epoch != peer.state.epoch:
            return  # an answer to a HELLO that is over
        self._greeter.check_answer(peer.key, peer.hello, header, body)
        if peer.state.link is not decode.Link.GREETING:
            return  # answered already: a second answer changes nothing, least of all the session key
        if isinstance(body, wire.HelloReject):
            self._refused(peer, body.reason, body.field, body.yours, body.mine)
        elif (differs := self._greeter.differs(body.manifest)) is not None:
            self._refused(peer, wire.Reject.LAYOUT, *differs)
        else:
            peer.ack, peer.incarnation, peer.refusal = body, header.incarnation, ""
            self._apply(peer, decode.Greeted(header.epoch))

    def _refused(self, peer: _Peer, reason: str, name: str, mine: str, yours: str) -> None:
        peer.refusal = f"{reason}: {name} is {mine} here and {yours} there" if name else reason
        log.warning("%s does not pair with us: %s", peer.address.pod, peer.refusal)
        self._apply(peer, decode.Refused(peer.state.epoch))

    def _frame(self, link: int, frame: bytes) -> None:
        peer = self._by_link.get(link)
        if peer is None:
            return
        whole = peer.assembly.take(frame)
        if whole is None:
            return
        header, data = whole
        if header.type is wire.MessageType.PONG:
            self._ponged(peer, data)
            return
        body = wire.decode_body(header.type, data)
        epoch = peer.state.epoch
        match body:
            case wire.Accept():
                self._apply(peer, decode.Accepted(epoch, body.transfer, body.expected))
            case wire.RejectBody():
                self._explain(peer, body.transfer, body.detail or body.reason)
                retryable = body.reason in RETRYABLE
                self._apply(peer, decode.Rejected(epoch, body.transfer, body.reason, retryable))
            case wire.Sent():
                self._check_posted(peer, body)
                self._sent(peer, body)
                self._apply(peer, decode.Sent(epoch, body.transfer, body.posted))
            case wire.Fail():
                self._check_posted(peer, body)
                self._explain(peer, body.transfer, body.reason)
                event = decode.Failed(
                    epoch, body.transfer, body.posted, body.drained, body.reason, body.retryable
                )
                self._apply(peer, event)
            case wire.CancelAck():
                self._check_posted(peer, body)
                self._apply(peer, decode.CancelAcked(epoch, body.transfer, body.posted, body.unknown))
            case wire.Goodbye():
                if peer.pong is not None:
                    peer.pong = wire.Pong(0, True, peer.pong.alive)
            case _:
                raise wire.WireError(f"{header.type.name} from prefill")

    def _check_posted(self, peer: _Peer, body: wire.Sent | wire.Fail | wire.CancelAck) -> None:
        ticket = peer.tickets.get(body.transfer)
        if ticket is not None and not 0 <= body.posted <= ticket.dispatch.expected:
            raise wire.WireError(f"{body.posted} writes posted of {ticket.dispatch.expected}")

    def _ponged(self, peer: _Peer, data: bytes) -> None:
        if len(data) == wire.PONG_PREFIX.size:
            return  # nothing published there yet: our ATTACH has not come
        _, age_ns, pong = wire.decode_pong(data)
        before = (peer.pong.credits, peer.pong.draining) if peer.pong is not None else None
        peer.pong, peer.pong_s, peer.age_s = pong, self._clock(), age_ns / 1e9
        if peer.age_s < WEDGED_S:
            for transfer in pong.alive:
                ticket = peer.tickets.get(transfer)
                if ticket is not None and ticket.mark is not None and ticket.mark[0] is decode.Phase.ACCEPTED:
                    ticket.waiting_since_s = peer.pong_s
        self._apply(peer, decode.Ponged(peer.state.epoch))
        if before != (pong.credits, pong.draining):
            self._calls.add(self._listener.changed)

    def _explain(self, peer: _Peer, transfer: int, message: str) -> None:
        ticket = peer.tickets.get(transfer)
        if ticket is not None:
            ticket.message = message

    # --- time -------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        with self._calls:
            now = self._clock()
            for peer in self._everyone():
                self._tick(peer, now)

    def _tick(self, peer: _Peer, now: float) -> None:
        if peer.up and self._courier.pause_s >= DEAD_S:
            self._apply(peer, decode.LinkTimeout())  # it has given us up meanwhile, by the same patience
        if peer.seen_s != NEVER_S and now - max(peer.seen_s, self._courier.resumed_s) >= patience.RETURN_S:
            peer.seen_s = NEVER_S
            self._calls.add(self._listener.changed)
        if peer.state.link is decode.Link.DOWN:
            if now - peer.waiting_since_s >= patience.decode_link_s(peer.state):
                self._apply(peer, decode.Open())
            return
        if peer.state.link in (decode.Link.ATTACHING, decode.Link.UP):
            self._heartbeat(peer, now)
        since = max(peer.waiting_since_s, self._courier.resumed_s)
        if peer.up:
            peer.seen_s = self._fabric.link_health(peer.link)[0] / 1e9
            since = max(since, peer.seen_s)
            age_s = peer.age_s + now - max(peer.pong_s, self._courier.resumed_s)
            was, peer.health = peer.health, health(now - since, age_s)
            if peer.health is not was:
                log.info("%s is %s", peer.address.pod, peer.health)
                self._calls.add(self._listener.changed)
        if now - since >= patience.decode_link_s(peer.state):
            self._apply(peer, decode.LinkTimeout())
        for transfer in peer.state.transfers:
            self._tick_transfer(peer, transfer, now)

    def _tick_transfer(self, peer: _Peer, transfer: decode.Transfer, now: float) -> None:
        ticket = peer.tickets[transfer.id]
        if transfer.phase in (decode.Phase.ACCEPTED, decode.Phase.SETTLING):
            count = self._fabric.counter_read(wire.slot_of(transfer.id), wire.gen_of(transfer.id))
            if count != ticket.count:
                ticket.count, ticket.waiting_since_s = count, now
        since = max(ticket.waiting_since_s, self._courier.resumed_s)
        listed = None
        if peer.pong is not None and peer.pong_s > since and peer.age_s < WEDGED_S:
            listed = transfer.id in peer.pong.alive
        if now - since >= patience.decode_transfer_s(transfer, listed):
            self._apply(peer, decode.TransferTimeout(transfer.id))

    def _heartbeat(self, peer: _Peer, now: float) -> None:
        alive = [t.id for t in peer.state.transfers]
        self._courier.publish(peer.link, wire.Pong(0, self._draining, alive))
        if now - peer.pinged_s >= (HEARTBEAT_S if peer.up else patience.ATTACHING_S / 2):
            peer.pinged_s = now
            self._courier.ping(peer.link, peer.state.epoch)

    # --- carrying out -----------------------------------------------------------------------------

    def _apply(self, peer: _Peer, event: decode.Event) -> None:
        peer.state, actions = decode.step(peer.state, event, self._limits)
        now = self._clock()
        mark = (peer.state.link, peer.state.attempts)
        if mark != peer.mark:
            peer.mark, peer.waiting_since_s = mark, now
        for transfer in peer.state.transfers:
            ticket = peer.tickets[transfer.id]
            waiting = (transfer.phase, transfer.attempts)
            if waiting != ticket.mark:
                ticket.mark, ticket.waiting_since_s = waiting, now
        for action in actions:
            self._perform(peer, action)

    def _perform(self, peer: _Peer, action: decode.Action) -> None:
        match action:
            case decode.OpenLink():
                self._open(peer)
            case decode.SendHello(epoch):
                self._hello(peer, epoch)
            case decode.ConnectLink():
                self._connect(peer)
            case decode.SendAttach(epoch):
                regions = [wire.Region(*granted) for granted in peer.granted[: self._ranks]]
                self._send(peer, wire.MessageType.ATTACH, 0, wire.Attach(regions=regions))
                peer.pinged_s = self._clock()
                self._courier.ping(peer.link, epoch)
            case decode.Paired(epoch):
                log.info("attached to %s, epoch %d", peer.address.pod, epoch)
                peer.seen_s = self._clock()
                self._calls.add(self._listener.changed)
            case decode.CloseLink():
                self._fabric.link_close(peer.link)
                peer.hello = peer.ack = peer.pong = None
                peer.untimed.clear()
                self._calls.add(self._listener.changed)
            case decode.SendDispatch(transfer, seq):
                self._send(peer, wire.MessageType.DISPATCH, seq, peer.tickets[transfer].dispatch)
            case decode.SendCancel(transfer, seq):
                cancel = wire.Cancel(transfer=transfer, reason=peer.tickets[transfer].message)
                self._send(peer, wire.MessageType.CANCEL, seq, cancel)
            case decode.Expect(transfer, posted):
                self._fabric.counter_expect(wire.slot_of(transfer), wire.gen_of(transfer), posted)
            case decode.TellReady(transfer):
                self._tell_ready(peer, peer.tickets[transfer])
            case decode.TellFailed(transfer, reason, retryable):
                ticket = peer.tickets[transfer]
                told = (ticket.ticket, reason, ticket.message or reason, retryable, ticket.node)
                self._tell(ticket, partial(self._listener.failed, *told))
            case decode.Release(transfer):
                self._release(peer, transfer)
            case decode.Quarantine(transfer):
                log.error("the pages of transfer %#x stay out of use: a peer may still write them", transfer)

    def _open(self, peer: _Peer) -> None:
        peer.link = self._courier.new_link()
        peer.assembly = Assembly()
        peer.health = Health.HEALTHY
        self._by_link[peer.link] = peer
        self._fabric.link_open(peer.link)

    def _hello(self, peer: _Peer, epoch: int) -> None:
        if peer.hello is None:
            peer.key = self._greeter.key(peer.attempts)
            peer.attempts += 1
            reply = self._fabric.bootstrap_address
            peer.hello = self._greeter.hello(peer.key, epoch, peer.link_address, reply)
        self._courier.greet(peer.address.control_address, wire.MessageType.HELLO, epoch, peer.hello)

    def _connect(self, peer: _Peer) -> None:
        assert peer.hello is not None
        assert peer.ack is not None
        peer.attempts -= 1  # this key is good: keep to it
        self._courier.connect(peer.link, peer.ack.link_address, peer.key, peer.hello, peer.ack, True)
        process = (peer.address.uid, peer.ack.pid, peer.ack.start_time)
        visible = self._one_clock(peer) and process not in self._watched.values()
        # Only a hint that saves us the five seconds; no fence leans on it.
        if visible and self._courier.watch(peer.link, peer.ack.pid, peer.ack.start_time):
            self._watched[peer.link] = process

    def _send(self, peer: _Peer, kind: wire.MessageType, seq: int, body: msgspec.Struct) -> None:
        self._courier.send(peer.link, kind, peer.state.epoch, seq, body, peer.state.floor)

    def _release(self, peer: _Peer, transfer: int) -> None:
        ticket = peer.tickets.pop(transfer)
        del self._owners[transfer], self._tickets[ticket.ticket]
        self._fabric.counter_disarm(wire.slot_of(transfer), wire.gen_of(transfer))
        self._slots.give_back(transfer)
        self._calls.add(partial(self._listener.released, ticket.ticket))

    # --- telling ----------------------------------------------------------------------------------

    def _tell(self, ticket: Ticket, call: Callable[[], None]) -> None:
        """Unless the engine cancels the ticket before it has been told."""
        self._calls.add(lambda: None if ticket.abandoned else call())

    def _tell_ready(self, peer: _Peer, ticket: Ticket) -> None:
        timing = ticket.timing(self._one_clock(peer))
        self._tell(ticket, partial(self._listener.ready, ticket.ticket, timing))
        if ticket.sent is not None:
            self._tell(ticket, partial(self._listener.timed, ticket.ticket, timing))
            return
        peer.untimed[ticket.transfer] = ticket
        if len(peer.untimed) > UNTIMED_MAX:
            del peer.untimed[next(iter(peer.untimed))]

    def _sent(self, peer: _Peer, sent: wire.Sent) -> None:
        """SENT usually comes after the count is full, and readiness does not wait for it."""
        if (ticket := peer.tickets.get(sent.transfer)) is not None:
            ticket.sent = sent
        elif (ticket := peer.untimed.pop(sent.transfer, None)) is not None:
            ticket.sent = sent
            timing = ticket.timing(self._one_clock(peer))
            self._tell(ticket, partial(self._listener.timed, ticket.ticket, timing))

    def _one_clock(self, peer: _Peer) -> bool:
        return peer.ack is not None and peer.ack.boot_id == self._identity.boot_id

    # --- peers ------------------------------------------------------------------------------------

    def _everyone(self) -> list[_Peer]:
        return [*self._peers.values(), *self._former.values()]

    def _bury(self) -> None:
        for uid in [uid for uid, peer in self._former.items() if peer.gone]:
            self._epochs[uid] = self._former.pop(uid).state.epoch
        if self._closing and all(peer.state.link is decode.Link.DOWN for peer in self._everyone()):
            self._all_down.set()

    def _quarantined(self) -> int:
        phases = (t.phase for peer in self._everyone() for t in peer.state.transfers)
        return sum(phase is decode.Phase.QUARANTINED for phase in phases)

    def _choose(self, avoid: frozenset[str]) -> _Peer | None:
        if self._draining or self._slots.free == 0 or self._quarantined() >= QUARANTINE_MAX:
            return None
        candidates = [
            Candidate(uid, peer.address.zone == self._zone, peer.credits, peer.dispatched)
            for uid, peer in self._peers.items()
            if peer.healthy and peer.address.pod not in avoid
        ]
        best = choose(candidates)
        return self._peers[best.uid] if best is not None else None

    def _describe(self, peer: _Peer) -> dict[str, object]:
        return {
            "link": peer.state.link.value,
            "health": peer.health.value if peer.up else Health.DEAD.value,
            "epoch": peer.state.epoch,
            "transfers": len(peer.state.transfers),
            "credits": peer.credits,
            "rtt_us": self._fabric.link_health(peer.link)[1] // 1000 if peer.up else 0,
            "refusal": peer.refusal,
        }
