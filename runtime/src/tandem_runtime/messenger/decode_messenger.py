"""Decode's messenger: tickets for transfers, links to prefill peers. Carries out what `decode.py` decides.

Knows: which ticket rides on which transfer, whom to ask, clocks, frames. Does not know: when memory is safe
(`decode.py`), pages' owners, the engine.

    dispatch() ─► ticket ─► ready | failed ─► released     each at most once, released always and last

The loop owns everything here; nothing blocks. Time enters twice: `on_tick` lets the timeouts of
`patience.py` fire, and a pause of our own (a stopped process, a stalled loop) is not held against the
peers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..fabric import events as fabric_events
from . import authentication, decode, patience, plan, wire
from .assembly import Assembly
from .courier import Courier
from .manifest import difference
from .peers import HEARTBEAT_S, WEDGED_S, Candidate, Health, choose, health
from .ports import PeerAddress, TransferTiming
from .slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from ..kv import KVLayout
    from .authentication import PeerKeys
    from .manifest import Manifest
    from .ports import DecodeListener, FabricPort, Identity

log = logging.getLogger("tandem.messenger")
OWN_PAUSE_S = 1.0  # a tick this late means that we were stopped
CLOSE_S = 2.0
UNTIMED_MAX = 256
NEVER_S = float("-inf")
RETRYABLE = frozenset({wire.Reject.BUSY, wire.Reject.DRAINING})


class NoPrefillError(RuntimeError):
    """No prefill peer can take a transfer now; ask `can_dispatch` first."""


@dataclass(slots=True)
class _Ticket:
    ticket: int
    transfer: int
    peer: _Peer
    request_id: str
    body: wire.Dispatch
    nbytes: int
    started_s: float
    waiting_since_s: float  # of the present phase and attempt
    mark: tuple[decode.Phase, int] | None = None
    count: int = 0
    ready_ns: int = 0
    sent: wire.Sent | None = None
    message: str = ""


@dataclass(slots=True)
class _Peer:
    address: PeerAddress
    state: decode.Peer = field(default_factory=decode.Peer)
    link: int = 0
    link_address: bytes = b""
    granted: tuple[fabric_events.GrantedRegion, ...] = ()  # what it may write with; dies with the link
    hello: wire.Hello | None = None
    key: bytes = b""  # the peer key that HELLO was proven with
    keys_tried: int = 0
    ack: wire.HelloAck | None = None
    node: int = 0
    incarnation: int = 0
    refusal: str = ""
    mark: tuple[decode.Link, int] = (decode.Link.DOWN, 0)
    waiting_since_s: float = 0.0
    pinged_s: float = 0.0
    pong: wire.Pong | None = None
    pong_s: float = 0.0  # when it came
    age_s: float = 0.0  # how old its body was then
    health: Health = Health.HEALTHY
    lost_s: float = NEVER_S  # when a link that was up was lost, until it is up again or given up
    published: bytes = b""
    dispatched: int = 0
    assembly: Assembly = field(default_factory=Assembly)
    tickets: dict[int, _Ticket] = field(default_factory=dict)  # by transfer
    untimed: dict[int, _Ticket] = field(default_factory=dict)  # ready before their SENT came

    @property
    def up(self) -> bool:
        return self.state.link is decode.Link.UP

    @property
    def credits(self) -> int:
        """Transfers that it would still take from us."""
        if not self.up or self.pong is None or self.pong.draining:
            return 0
        return self.pong.credits - len(self.state.transfers)


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
        self._fabric = fabric
        self._identity = identity
        self._manifest = manifest
        self._keys = keys
        self._layout = layout
        self._sharding = plan.Sharding(layout.kv_heads * ranks, ranks, ranks)
        self._ranks = ranks
        assert len(regions) == ranks
        self._listener = listener
        self._zone = zone
        self._clock = clock
        self._courier = Courier(fabric, identity, self)
        info = fabric.info
        self._limits = decode.Limits(close_is_fence=bool(info.close_fences_target))
        self._peers: dict[str, _Peer] = {}  # by uid
        self._former: list[_Peer] = []  # no longer listed, not yet closed
        self._by_link: dict[int, _Peer] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._by_transfer: dict[int, _Ticket] = {}
        self._slots = Slots()
        self._next_ticket = 1
        self._draining = False
        self._closing = False
        self._calls: deque[Callable[[], None]] = (
            deque()
        )  # of the listener, made when we are done with ourselves
        self._busy = 0
        self._ticked_s = clock()
        self._resumed_s = clock()
        self._all_down = asyncio.Event()
        self.quarantined = 0

    # --- what the lead calls ----------------------------------------------------------------------

    def start(self) -> None:
        self._courier.start()

    @property
    def paired(self) -> bool:
        """Some peer is attached."""
        return any(peer.up for peer in self._peers.values())

    @property
    def has_peer(self) -> bool:
        """Some peer is attached and healthy."""
        return any(peer.up and self._healthy(peer) for peer in self._peers.values())

    @property
    def peer_returns(self) -> bool:
        """Some peer's link was lost a moment ago, and the peer is still listed: it may be up in another."""
        now = self._clock()
        return any(now - peer.lost_s < patience.RETURN_S for peer in self._peers.values())

    def attached(self, uid: str) -> bool:
        peer = self._peers.get(uid)
        return peer is not None and peer.up

    def set_peers(self, addresses: Sequence[PeerAddress]) -> None:
        """The prefill workers that exist now. A peer no longer listed, or restarted, is let go."""
        with _Turn(self):
            listed = {address.uid: address for address in addresses}
            for uid in list(self._peers):
                if uid not in listed:
                    peer = self._peers.pop(uid)
                    self._former.append(peer)
                    self._apply(peer, decode.Leave())
                    self._calls.append(self._listener.changed)
            for uid, address in listed.items():
                known = self._peers.get(uid)
                if known is None:
                    self._peers[uid] = peer = _Peer(address, waiting_since_s=self._clock())
                    if not self._closing:
                        self._apply(peer, decode.Open())
                elif known.address != address:
                    known.address = address
                    known.state = dataclasses.replace(known.state, refused=False)
                    if known.incarnation and known.incarnation != address.incarnation:
                        self._apply(known, decode.LinkFailed(known.state.epoch))
            self._former = [peer for peer in self._former if not self._gone(peer)]

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
        with _Turn(self):
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
            ticket = _Ticket(self._next_ticket, transfer, peer, request_id, body, nbytes, now, now)
            self._next_ticket += 1
            self._tickets[ticket.ticket] = self._by_transfer[transfer] = peer.tickets[transfer] = ticket
            peer.dispatched += 1
            # Strictly before DISPATCH leaves: an immediate that finds no counter is lost.
            self._fabric.counter_arm(wire.slot_of(transfer), wire.gen_of(transfer), expected)
            self._apply(peer, decode.Dispatch(transfer, expected))
            self._publish(peer)
            return ticket.ticket

    def cancel(self, ticket: int, reason: str) -> None:
        """The caller has lost interest: only `released` follows. Unknown tickets are ignored: they have
        ended.
        """
        known = self._tickets.get(ticket)
        if known is not None:
            with _Turn(self):
                known.message = reason
                self._apply(known.peer, decode.Cancel(known.transfer))

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
        self._note_down()
        try:
            await asyncio.wait_for(self._all_down.wait(), CLOSE_S)
        except TimeoutError:
            log.warning("%d links did not close in %s s", len(self._former), CLOSE_S)
        self._courier.stop()
        self._flush()

    def snapshot(self) -> dict[str, object]:
        stats = self._fabric.stats()
        tally = self._courier.tally
        phases = Counter(t.phase.value for peer in self._everyone() for t in peer.state.transfers)
        return {
            "transfers": dict(phases),
            "peers": {peer.address.pod: self._describe(peer) for peer in self._peers.values()},
            "counters": {
                "stale": stats.immediates_stale,
                "unknown": stats.immediates_unknown,
                "quarantined": self.quarantined,
                "writes": stats.immediates,
                "bytes": stats.immediates * self._layout.page_nbytes,
                "malformed": tally.malformed,
                "unsent": tally.unsent,
                "faults": tally.faults,
            },
        }

    # --- events -----------------------------------------------------------------------------------

    def on_event(self, event: fabric_events.Event) -> None:
        with _Turn(self):
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
                case fabric_events.LinkFailed() | fabric_events.ProcessGone():
                    if (peer := self._by_link.get(event.link)) is not None:
                        log.info("link to %s is lost: %s", peer.address.pod, type(event).__name__)
                        self._apply(peer, decode.LinkFailed(peer.state.epoch))
                case fabric_events.LinkClosed():
                    if (peer := self._by_link.pop(event.link, None)) is not None:
                        self._apply(peer, decode.LinkClosed(peer.state.epoch))
                        self._former = [former for former in self._former if not self._gone(former)]
                        self._note_down()
                case fabric_events.Fatal():
                    log.error("the fabric has failed: %s", event)

    def _counted(self, event: fabric_events.CountReached) -> None:
        ticket = self._by_transfer.get(wire.transfer_id(event.slot, event.gen))
        if ticket is not None:
            ticket.ready_ns = event.time_ns
            self._apply(ticket.peer, decode.Counted(ticket.transfer, event.count))

    def _greeting(self, frame: bytes) -> None:
        header, data = wire.parse(frame)
        body = wire.decode_body(header.type, data)
        if not isinstance(body, wire.HelloAck | wire.HelloReject):
            raise wire.WireError(f"{header.type.name} on decode's bootstrap endpoint")
        peer = next((p for p in self._peers.values() if p.hello and p.hello.nonce == body.hello_nonce), None)
        if peer is None or header.epoch != peer.state.epoch:
            return  # an answer to a HELLO that is over
        assert peer.hello is not None
        sender = authentication.Sender(header.node, header.incarnation, header.epoch)
        if isinstance(body, wire.HelloReject):
            proof = authentication.reject_proof(peer.key, peer.hello, sender, body)
        else:
            proof = authentication.ack_proof(peer.key, peer.hello, sender, body)
        if not authentication.equal(proof, body.proof):
            raise wire.WireError(f"{header.type.name} without a good proof")
        if isinstance(body, wire.HelloReject):
            self._refused(peer, body.reason, body.field, body.yours, body.mine)
            return
        differs = difference(self._manifest, body.manifest)
        if differs is not None:
            self._refused(peer, wire.Reject.LAYOUT, *differs)
            return
        peer.ack, peer.node, peer.incarnation, peer.refusal = body, header.node, header.incarnation, ""
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
                self._explain(body.transfer, body.detail or body.reason)
                retryable = body.reason in RETRYABLE
                self._apply(peer, decode.Rejected(epoch, body.transfer, body.reason, retryable))
            case wire.Sent():
                self._sent(peer, body)
                self._apply(peer, decode.Sent(epoch, body.transfer, body.posted))
            case wire.Fail():
                self._explain(body.transfer, body.reason)
                event = decode.Failed(
                    epoch, body.transfer, body.posted, body.drained, body.reason, body.retryable
                )
                self._apply(peer, event)
            case wire.CancelAck():
                self._apply(peer, decode.CancelAcked(epoch, body.transfer, body.posted, body.unknown))
            case wire.Goodbye():
                if peer.pong is not None:
                    peer.pong = wire.Pong(0, True, peer.pong.alive)
            case _:
                raise wire.WireError(f"{header.type.name} from prefill")

    def _ponged(self, peer: _Peer, data: bytes) -> None:
        if len(data) == wire.PONG_PREFIX.size:
            return  # nothing published there yet: our ATTACH has not come
        _, age_ns, pong = wire.decode_pong(data)
        changed = peer.pong is None or (pong.credits, pong.draining) != (
            peer.pong.credits,
            peer.pong.draining,
        )
        peer.pong, peer.pong_s, peer.age_s = pong, self._clock(), age_ns / 1e9
        if peer.age_s < WEDGED_S:
            for transfer in pong.alive:
                ticket = peer.tickets.get(transfer)
                if ticket is not None and ticket.mark is not None and ticket.mark[0] is decode.Phase.ACCEPTED:
                    ticket.waiting_since_s = peer.pong_s
        self._apply(peer, decode.Ponged(peer.state.epoch))
        if changed:
            self._calls.append(self._listener.changed)

    def _explain(self, transfer: int, message: str) -> None:
        ticket = self._by_transfer.get(transfer)
        if ticket is not None:
            ticket.message = message

    # --- time -------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        with _Turn(self):
            now = self._clock()
            if now - self._ticked_s > OWN_PAUSE_S:
                self._resumed_s = now
            self._ticked_s = now
            for peer in [*self._everyone()]:
                self._tick(peer, now)

    def _tick(self, peer: _Peer, now: float) -> None:
        if now - peer.lost_s >= patience.RETURN_S and peer.lost_s != NEVER_S:
            peer.lost_s = NEVER_S
            self._calls.append(self._listener.changed)
        if peer.state.link is decode.Link.DOWN:
            if not self._closing and now - peer.waiting_since_s >= patience.decode_link_s(peer.state):
                self._apply(peer, decode.Open())
            return
        if peer.state.link in (decode.Link.ATTACHING, decode.Link.UP):
            self._heartbeat(peer, now)
        since = peer.waiting_since_s
        if peer.up:
            since = max(self._heard_s(peer), self._resumed_s)
            was = peer.health
            peer.health = health(now - since, peer.age_s + max(0.0, now - peer.pong_s))
            if peer.health is not was:
                log.info("%s is %s", peer.address.pod, peer.health)
                self._calls.append(self._listener.changed)
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
        since = max(ticket.waiting_since_s, self._resumed_s)
        listed = None
        if peer.pong is not None and peer.pong_s > since and peer.age_s < WEDGED_S:
            listed = transfer.id in peer.pong.alive
        if now - since >= patience.decode_transfer_s(transfer, listed):
            self._apply(peer, decode.TransferTimeout(transfer.id))

    def _heartbeat(self, peer: _Peer, now: float) -> None:
        self._publish(peer)
        every = HEARTBEAT_S if peer.up else patience.ATTACHING_S / 2
        if now - peer.pinged_s >= every:
            peer.pinged_s = now
            self._courier.ping(peer.link, peer.state.epoch, int(now * 1e9))

    def _publish(self, peer: _Peer) -> None:
        alive = [t.id for t in peer.state.transfers]
        self._fabric.link_set_pong(peer.link, wire.encode_body(wire.Pong(0, self._draining, alive)))

    def _heard_s(self, peer: _Peer) -> float:
        return max(peer.waiting_since_s, self._fabric.link_health(peer.link)[0] / 1e9)

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
                self._courier.ping(peer.link, epoch, int(peer.pinged_s * 1e9))
            case decode.Paired(epoch):
                log.info("attached to %s, epoch %d", peer.address.pod, epoch)
                peer.lost_s = NEVER_S
                self._calls.append(self._listener.changed)
            case decode.CloseLink():
                self._fabric.link_close(peer.link)
                if peer.pong is not None:
                    peer.lost_s = self._clock()
                peer.hello = peer.ack = peer.pong = None
                peer.untimed.clear()
                self._calls.append(self._listener.changed)
            case decode.SendDispatch(transfer, seq):
                self._send(peer, wire.MessageType.DISPATCH, seq, peer.tickets[transfer].body)
            case decode.SendCancel(transfer, seq):
                cancel = wire.Cancel(transfer=transfer, reason=peer.tickets[transfer].message)
                self._send(peer, wire.MessageType.CANCEL, seq, cancel)
            case decode.Expect(transfer, posted):
                self._fabric.counter_expect(wire.slot_of(transfer), wire.gen_of(transfer), posted)
            case decode.TellReady(transfer):
                self._tell_ready(peer.tickets[transfer])
            case decode.TellFailed(transfer, reason, retryable):
                ticket = peer.tickets[transfer]
                message = ticket.message or reason
                told = (ticket.ticket, reason, message, retryable, peer.address.pod)
                self._calls.append(partial(self._listener.failed, *told))
            case decode.Release(transfer):
                self._release(peer, transfer)
            case decode.Quarantine():
                self.quarantined += 1

    def _open(self, peer: _Peer) -> None:
        peer.link = self._courier.new_link()
        peer.assembly = Assembly()
        peer.hello = peer.ack = peer.pong = None
        self._by_link[peer.link] = peer
        self._fabric.link_open(peer.link)

    def _hello(self, peer: _Peer, epoch: int) -> None:
        if peer.hello is None:
            self._keys.refresh()
            # An unanswered epoch may mean that the peer holds the other key: take turns.
            peer.key = self._keys.accepted[peer.keys_tried % len(self._keys.accepted)]
            peer.keys_tried += 1
            hello = wire.Hello(
                nonce=authentication.new_nonce(),
                pod=self._identity.pod,
                pid=self._identity.pid,
                start_time=self._identity.start_time,
                boot_id=self._identity.boot_id,
                manifest=self._manifest,
                link_address=peer.link_address,
                reply_address=self._fabric.bootstrap_address,
            )
            sender = authentication.Sender(self._identity.node_id, self._identity.incarnation, epoch)
            proof = authentication.hello_proof(peer.key, sender, hello)
            peer.hello = replace(hello, proof=proof)
        self._courier.greet(peer.address.control_address, wire.MessageType.HELLO, epoch, peer.hello)

    def _connect(self, peer: _Peer) -> None:
        assert peer.hello is not None
        assert peer.ack is not None
        key = authentication.session_key(peer.key, peer.hello, peer.ack)
        self._fabric.link_connect(peer.link, peer.ack.link_address, key, True)
        peer.keys_tried -= 1  # this key is good: keep to it
        if peer.ack.boot_id == self._identity.boot_id:
            # Only a hint that saves us the five seconds; the fences do not lean on it.
            self._fabric.watch_process(peer.link, peer.ack.pid, peer.ack.start_time)

    def _send(self, peer: _Peer, kind: wire.MessageType, seq: int, body: msgspec.Struct) -> None:
        self._courier.send(peer.link, kind, peer.state.epoch, seq, body, peer.state.floor)

    def _release(self, peer: _Peer, transfer: int) -> None:
        ticket = peer.tickets.pop(transfer)
        del self._by_transfer[transfer], self._tickets[ticket.ticket]
        self._fabric.counter_disarm(wire.slot_of(transfer), wire.gen_of(transfer))
        self._slots.give_back(transfer)
        self._calls.append(partial(self._listener.released, ticket.ticket))

    # --- telling ----------------------------------------------------------------------------------

    def _tell_ready(self, ticket: _Ticket) -> None:
        timing = self._timing(ticket)
        self._calls.append(partial(self._listener.ready, ticket.ticket, timing))
        if ticket.sent is not None:
            self._calls.append(partial(self._listener.timed, ticket.ticket, timing))
            return
        untimed = ticket.peer.untimed
        untimed[ticket.transfer] = ticket
        if len(untimed) > UNTIMED_MAX:
            del untimed[next(iter(untimed))]

    def _sent(self, peer: _Peer, sent: wire.Sent) -> None:
        """SENT usually comes after the count is full, and readiness does not wait for it."""
        if (ticket := peer.tickets.get(sent.transfer)) is not None:
            ticket.sent = sent
        elif (ticket := peer.untimed.pop(sent.transfer, None)) is not None:
            ticket.sent = sent
            timing = self._timing(ticket)
            self._calls.append(partial(self._listener.timed, ticket.ticket, timing))

    def _timing(self, ticket: _Ticket) -> TransferTiming:
        peer, sent = ticket.peer, ticket.sent
        total_s = ticket.ready_ns / 1e9 - ticket.started_s
        if sent is None:
            return TransferTiming(peer.address.pod, ticket.nbytes, total_s)
        one_clock = peer.ack is not None and peer.ack.boot_id == self._identity.boot_id
        return TransferTiming(
            node=peer.address.pod,
            nbytes=ticket.nbytes,
            total_s=total_s,
            queue_s=sent.queue_ns / 1e9,
            prefill_s=sent.prefill_ns / 1e9,
            transfer_s=sent.transfer_ns / 1e9,
            exposed_s=max(0, ticket.ready_ns - sent.last_layer_ns) / 1e9
            if one_clock and sent.last_layer_ns
            else None,
        )

    # --- peers ------------------------------------------------------------------------------------

    def _everyone(self) -> list[_Peer]:
        return [*self._peers.values(), *self._former]

    def _healthy(self, peer: _Peer) -> bool:
        return peer.health is Health.HEALTHY

    def _gone(self, peer: _Peer) -> bool:
        return peer.state.link is decode.Link.DOWN and not peer.state.transfers

    def _note_down(self) -> None:
        if self._closing and all(peer.state.link is decode.Link.DOWN for peer in self._everyone()):
            self._all_down.set()

    def _choose(self, avoid: frozenset[str]) -> _Peer | None:
        if self._draining or self._slots.free == 0:
            return None
        candidates = [
            Candidate(uid, peer.address.zone == self._zone, peer.credits, peer.dispatched)
            for uid, peer in self._peers.items()
            if peer.up and self._healthy(peer) and peer.address.pod not in avoid
        ]
        best = choose(candidates)
        return self._peers[best.uid] if best is not None else None

    def _describe(self, peer: _Peer) -> dict[str, object]:
        rtt_ns = self._fabric.link_health(peer.link)[1] if peer.up else 0
        return {
            "link": peer.state.link.value,
            "health": peer.health.value if peer.up else Health.DEAD.value,
            "epoch": peer.state.epoch,
            "transfers": len(peer.state.transfers),
            "credits": peer.credits,
            "rtt_us": rtt_ns // 1000,
            "refusal": peer.refusal,
        }

    def _flush(self) -> None:
        while self._calls:
            self._courier.guarded(self._calls.popleft())


class _Turn:
    """Listener calls made during a turn are held back to its end, when the messenger's state is whole
    again.
    """

    __slots__ = ("_messenger",)

    def __init__(self, messenger: DecodeMessenger) -> None:
        self._messenger = messenger

    def __enter__(self) -> None:
        self._messenger._busy += 1

    def __exit__(self, *_: object) -> None:
        messenger = self._messenger
        messenger._busy -= 1
        if messenger._busy == 0 and messenger._calls:
            asyncio.get_running_loop().call_soon(messenger._flush)
