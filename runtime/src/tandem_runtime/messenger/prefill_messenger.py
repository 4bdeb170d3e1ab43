"""Prefill's messenger: incoming transfers, links to decode peers, plans of writes. Carries out what
`prefill.py` decides.

Knows: which key is which peer's transfer, which plan holds it, clocks, frames. Does not know: when memory is
safe (`prefill.py`), the scheduler, layers' progress (the C core's).

    DISPATCH ─► dispatched(key) ─► admitted() ─► publish() computed() … ─► released(key)
                                       └ pages of a prefix hit go at once

A plan is published before its step runs, and the fabric posts layer after layer of it as the layer counter
moves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..fabric import events as fabric_events
from ..fabric.fabric import FabricError, Geometry, Segment
from . import patience, plan, prefill, wire
from .assembly import Assembly
from .calls import Calls
from .courier import Courier
from .greeting import Greeter, Heard
from .manifest import Difference, pool_pages
from .outgoing import Outgoing, sent_again, unpack
from .peers import HEARTBEAT_S, Health, health
from .ports import IncomingTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from ..kv import Chunk, KVLayout
    from .authentication import PeerKeys
    from .manifest import Manifest
    from .ports import FabricPort, Identity, PrefillListener

log = logging.getLogger("tandem.messenger")
CLOSE_S = 2.0
BUSY_RETRY_MS = 100
QUARANTINE_MAX = 64  # transfers whose source pages nothing can free; beyond it nothing new is taken


@dataclass(slots=True)
class _Link:
    id: int
    session: prefill.Session
    heard: Heard
    pages: int  # of the peer's pool
    opened_s: float
    ack: wire.HelloAck | None = None
    pinged_s: float = 0.0
    age_s: float = 0.0  # of the body in the peer's last PONG
    pong_s: float = 0.0
    assembly: Assembly = field(default_factory=Assembly)


@dataclass(slots=True)
class _Peer:
    node: int
    pod: str
    state: prefill.Peer
    link: _Link  # of the present session
    health: Health = Health.HEALTHY

    @property
    def up(self) -> bool:
        return self.state.link is prefill.Link.UP


class PrefillMessenger:
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
        listener: PrefillListener,
        max_transfers: int,
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
        self._credits = max_transfers
        self._clock = clock
        self._courier = Courier(fabric, identity, self, clock)
        self._calls = Calls(self._courier.guarded)
        info = fabric.info
        self._fences = prefill.Fences(close=info.close_fences_source, peer_close=not info.one_endpoint)
        # Where the peer reads our memory itself, the end of its process must be one that we can see.
        self._must_watch = not info.close_fences_source and not info.one_endpoint
        self._peers: dict[int, _Peer] = {}  # by node
        self._by_link: dict[int, tuple[_Peer, _Link]] = {}
        self._watched: dict[int, tuple[int, int]] = {}  # link -> node and incarnation of a watched process
        self._outgoing: dict[int, Outgoing] = {}  # by key
        self._plans: dict[int, list[int]] = {}  # counter base -> keys
        self._next_key = 1
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

    def live(self) -> int:
        """Transfers whose source pages are held, or will be."""
        return len(self._outgoing)

    def set_credits(self, transfers: int) -> None:
        """How many transfers may be under way, all decode peers together."""
        self._credits = transfers
        self._publish_all()

    def admitted(self, key: int, pages: Sequence[int], hit_tokens: int) -> None:
        """The source pages of the whole prompt but its last token. What the prefix hit covers and decode
        lacks is posted at once, in all layers.
        """
        out = self._outgoing.get(key)
        if out is None:
            return  # cancelled, and released, while it was queued
        with self._calls:
            out.source_pages, out.admitted_ns = pages, self._now_ns()
            self._apply(self._peers[out.node], prefill.Admitted(key))
            if self._sending(out) and (item := out.hit(hit_tokens)) is not None:
                self._fabric.out_post(item)

    def publish(self, counter_base: int, chunks: Sequence[tuple[int, Chunk]]) -> None:
        """Before the step that computes `chunks`: layer l of what they complete goes when the layer counter
        reaches counter_base + l + 1.
        """
        with self._calls:
            keys, items = [], []
            for key, chunk in chunks:
                out = self._outgoing.get(key)
                if out is None or not self._sending(out):
                    continue
                try:
                    item = out.chunk(chunk)
                except plan.ChunkGapError as error:
                    log.error("%s", error)
                    self._fail(key, "the chunks do not fit together", False)
                    continue
                keys.append(key)
                if item is not None:
                    items.append(item)
            if keys:
                self._plans[counter_base] = keys
            if items:
                self._fabric.plan_publish(counter_base, items)

    def computed(self, counter_base: int) -> None:
        """The step succeeded."""
        self._plans.pop(counter_base, None)

    def aborted(self, counter_base: int) -> None:
        """The step failed: nothing more of its plan is posted, and its transfers end with what was."""
        keys = self._plans.pop(counter_base, None)
        if keys is None:
            return
        with self._calls:
            self._fabric.plan_abort(counter_base)
            for key in keys:
                self._fail(key, "the forward pass failed", True)

    def fail(self, key: int, reason: str, retryable: bool) -> None:
        """The engine cannot finish the transfer. `released` follows."""
        with self._calls:
            self._fail(key, reason, retryable)

    def drain(self) -> None:
        """No new transfers; those under way are finished."""
        if self._draining:
            return
        self._draining = True
        for peer in self._peers.values():
            if peer.up:
                self._send(peer.link, wire.MessageType.GOODBYE, 0, wire.Goodbye(finish_s=0.0))
        self._publish_all()

    async def close(self) -> None:
        """Closes all links, which ends every transfer, and waits for that for a moment."""
        self.drain()
        self._closing = True
        with self._calls:
            for peer in list(self._peers.values()):
                self._apply(peer, prefill.LinkTimeout())
            self._note_down()
        try:
            await asyncio.wait_for(self._all_down.wait(), CLOSE_S)
        except TimeoutError:
            log.warning("links did not close in %s s", CLOSE_S)
        self._courier.stop()
        self._calls.make()

    def snapshot(self) -> dict[str, object]:
        stats = self._fabric.stats()
        held = [
            t.phase for p in self._peers.values() for t in p.state.transfers if t.phase in prefill.HOLDING
        ]
        phases = Counter(phase.value for phase in held)
        return {
            "transfers": dict(phases),
            "peers": {peer.pod: self._describe(peer) for peer in self._peers.values()},
            "counters": {
                "stale": stats.immediates_stale,
                "quarantined": self._unfenced(),
                "writes": stats.writes_posted,
                "bytes": stats.bytes_posted,
                **self._courier.tally.counts(),
            },
        }

    # --- links ------------------------------------------------------------------------------------

    def on_event(self, event: fabric_events.Event) -> None:
        with self._calls:
            match event:
                case fabric_events.Frame():
                    if (known := self._by_link.get(event.link)) is not None:
                        self._frame(*known, event.frame)
                case fabric_events.OutDrained():
                    self._drained(event)
                case fabric_events.BootstrapFrame():
                    self._greeted(self._greeter.hear(event.frame))
                case fabric_events.LinkOpened():
                    if (known := self._by_link.get(event.link)) is not None:
                        peer, link = known
                        link.ack = self._greeter.ack(link.heard, event.address, self._window())
                        self._apply(peer, prefill.LinkOpened(link.session))
                case fabric_events.LinkFailed():
                    if (known := self._by_link.get(event.link)) is not None:
                        peer, link = known
                        log.info("the link to %s is lost: %s", peer.pod, event)
                        self._apply(peer, prefill.LinkFailed(link.session))
                case fabric_events.LinkClosed():
                    if (known := self._by_link.pop(event.link, None)) is not None:
                        peer, link = known
                        self._apply(peer, prefill.LinkClosed(link.session))
                        self._forget(peer)
                case fabric_events.ProcessGone():
                    node, incarnation = self._watched.pop(event.link, (0, 0))
                    if (peer_or_none := self._peers.get(node)) is not None:
                        log.info("the process of %s is gone", peer_or_none.pod)
                        self._apply(peer_or_none, prefill.ProcessGone(incarnation))
                        self._forget(peer_or_none)

    def _greeted(self, heard: Heard) -> None:
        """HELLO, proven. A greater session opens a new link; the present one is answered again."""
        sender, hello = heard.sender, heard.hello
        session = prefill.Session(sender.incarnation, sender.epoch)
        peer = self._peers.get(sender.node)
        if peer is not None and session <= peer.state.session:
            if peer.link.heard.hello == hello:
                self._apply(peer, prefill.Hello(session))
            return
        if self._closing:
            return
        differs = self._greeter.differs(hello.manifest)
        if differs is not None:
            log.warning("%s does not pair with us: %s is %s here and %s there", hello.pod, *differs)
            self._refuse(heard, differs)
            return
        link = _Link(self._courier.new_link(), session, heard, pool_pages(hello.manifest), self._clock())
        watched = self._watch(link) if hello.boot_id == self._identity.boot_id else False
        if self._must_watch and not watched:
            self._refuse(heard, Difference("process", "one that can be watched", f"pid {hello.pid}"))
            return
        if peer is None:
            peer = self._peers[sender.node] = _Peer(sender.node, hello.pod, prefill.Peer(), link)
        peer.link, peer.pod = link, hello.pod
        self._by_link[link.id] = (peer, link)
        self._apply(peer, prefill.Hello(session))

    def _watch(self, link: _Link) -> bool:
        sender, hello = link.heard.sender, link.heard.hello
        process = (sender.node, sender.incarnation)
        if process in self._watched.values():
            return True
        watched = self._courier.watch(link.id, hello.pid, hello.start_time)
        if watched:
            self._watched[link.id] = process
        return watched

    def _refuse(self, heard: Heard, what: Difference) -> None:
        reject = self._greeter.reject(heard, wire.Reject.LAYOUT, what)
        address, epoch = heard.hello.reply_address, heard.sender.epoch
        self._courier.greet(address, wire.MessageType.HELLO_REJECT, epoch, reject)

    def _frame(self, peer: _Peer, link: _Link, frame: bytes) -> None:
        whole = link.assembly.take(frame)
        if whole is None:
            return
        header, data = whole
        if header.type is wire.MessageType.PONG:
            if len(data) > wire.PONG_PREFIX.size:
                _, age_ns, _ = wire.decode_pong(data)
                link.age_s, link.pong_s = age_ns / 1e9, self._clock()
            return
        body = wire.decode_body(header.type, data)
        if header.floor:
            self._apply(peer, prefill.Floor(link.session, header.floor))
        match body:
            case wire.Attach():
                self._attached(peer, link, body)
            case wire.Dispatch():
                self._dispatched(peer, link, header.seq, body)
            case wire.Cancel():
                self._apply(peer, prefill.Cancelled(link.session, header.seq, body.transfer))
            case wire.Goodbye():
                log.info("%s is draining", peer.pod)
            case _:
                raise wire.WireError(f"{header.type.name} from decode")

    def _attached(self, peer: _Peer, link: _Link, body: wire.Attach) -> None:
        if peer.state.link is not prefill.Link.GREETED or peer.link is not link:
            return
        wanted = self._layout.layers * link.pages * self._layout.page_nbytes
        if len(body.regions) != self._ranks or any(region.nbytes < wanted for region in body.regions):
            sizes = [region.nbytes for region in body.regions]
            raise wire.WireError(f"ATTACH: regions of {sizes} bytes; {self._ranks} of {wanted} are needed")
        self._fabric.link_regions(link.id, [(r.key, r.base, r.nbytes) for r in body.regions])
        self._apply(peer, prefill.Attached(link.session))
        log.info("%s is attached, epoch %d", peer.pod, link.session.epoch)
        self._publish_all()

    # --- transfers --------------------------------------------------------------------------------

    def _dispatched(self, peer: _Peer, link: _Link, seq: int, body: wire.Dispatch) -> None:
        if not peer.up or peer.link is not link:
            return
        wire.check_transfer(body.transfer)
        out: Outgoing | prefill.Refusal | None = None
        if seq >= peer.state.floor and peer.state.record(seq) is None:
            out = self._refusal(peer) or unpack(
                body,
                key=self._next_key,
                node=peer.node,
                layout=self._layout,
                sharding=self._sharding,
                target_pool_pages=link.pages,
                now_ns=self._now_ns(),
            )
        key = 0
        if isinstance(out, Outgoing):
            key = out.key
            self._next_key += 1
            self._outgoing[key] = out
        refusal = out if isinstance(out, prefill.Refusal) else None
        self._apply(peer, prefill.Dispatched(link.session, seq, body.transfer, key, refusal))

    def _refusal(self, peer: _Peer) -> prefill.Refusal | None:
        """Why nothing new is taken now, whatever it is."""
        if self._draining:
            return prefill.Refusal(wire.Reject.DRAINING)
        held = sum(t.phase in prefill.HOLDING for t in peer.state.transfers)
        # Twice the window: decode may know of an end before we do.
        if held >= 2 * self._window() or self._unfenced() >= QUARANTINE_MAX:
            return prefill.Refusal(wire.Reject.BUSY)
        return None

    def _unfenced(self) -> int:
        phases = (t.phase for peer in self._peers.values() for t in peer.state.transfers)
        return sum(phase is prefill.Phase.UNFENCED for phase in phases)

    def _sending(self, out: Outgoing) -> bool:
        transfer = self._peers[out.node].state.find(out.key)
        return transfer is not None and transfer.phase is prefill.Phase.SENDING

    def _fail(self, key: int, reason: str, retryable: bool) -> None:
        out = self._outgoing.get(key)
        if out is not None:
            self._apply(self._peers[out.node], prefill.Failing(key, reason, retryable))

    def _drained(self, event: fabric_events.OutDrained) -> None:
        out = self._outgoing.get(event.transfer)
        if out is None:
            return
        out.drained = event
        clean = event.completed + event.failed == event.posted
        peer = self._peers[out.node]
        drained = prefill.Drained(out.key, event.posted, event.failed > 0, clean, event.link_closed)
        self._apply(peer, drained)
        self._forget(peer)

    # --- time -------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        with self._calls:
            now = self._clock()
            for peer in list(self._peers.values()):
                self._tick(peer, peer.link, now)

    def _tick(self, peer: _Peer, link: _Link, now: float) -> None:
        since = max(link.opened_s, self._courier.resumed_s)
        if peer.up:
            self._publish(peer)
            if now - link.pinged_s >= HEARTBEAT_S:
                link.pinged_s = now
                self._courier.ping(link.id, link.session.epoch)
            since = max(since, self._fabric.link_health(link.id)[0] / 1e9)
            age_s = link.age_s + now - max(link.pong_s, self._courier.resumed_s) if link.pong_s else 0.0
            peer.health = health(now - since, age_s)
        if now - since >= patience.prefill_link_s(peer.state):
            log.info("%s is silent", peer.pod)
            self._apply(peer, prefill.LinkTimeout())

    def _window(self) -> int:
        """Transfers that each attached peer may have under way: its share, so that they never race."""
        attached = sum(peer.up for peer in self._peers.values())
        return max(1, self._credits // max(1, attached)) if self._credits > 0 else 0

    def _publish_all(self) -> None:
        for peer in self._peers.values():
            if peer.up:
                self._publish(peer)

    def _publish(self, peer: _Peer) -> None:
        session = peer.state.session
        alive = [t.id for t in peer.state.transfers if t.session == session and t.phase in prefill.ALIVE]
        credits = 0 if self._draining else self._window()
        self._courier.publish(peer.link.id, wire.Pong(credits, self._draining, alive))

    # --- carrying out -----------------------------------------------------------------------------

    def _apply(self, peer: _Peer, event: prefill.Event) -> None:
        peer.state, actions = prefill.step(peer.state, event, self._fences)
        for action in actions:
            self._perform(peer, peer.link, action)

    def _perform(self, peer: _Peer, link: _Link, action: prefill.Action) -> None:
        match action:
            case prefill.OpenLink():
                self._fabric.link_open(link.id)
            case prefill.ConnectLink():
                assert link.ack is not None
                heard = link.heard
                address = heard.hello.link_address
                self._courier.connect(link.id, address, heard.key, heard.hello, link.ack, False)
            case prefill.SendHelloAck(session):
                assert link.ack is not None
                address = link.heard.hello.reply_address
                self._courier.greet(address, wire.MessageType.HELLO_ACK, session.epoch, link.ack)
            case prefill.CloseLink(session):
                for owner, other in self._by_link.values():
                    if owner is peer and other.session == session:
                        self._fabric.link_close(other.id)
            case prefill.SendAccept(seq, transfer, key):
                if (out := self._outgoing.get(key)) is not None:  # else Begin has failed
                    accept = wire.Accept(transfer=transfer, expected=out.expected, credits=self._window())
                    self._send(link, wire.MessageType.ACCEPT, seq, accept)
            case prefill.SendReject(seq, transfer, refusal):
                reject = wire.RejectBody(
                    transfer=transfer,
                    reason=refusal.reason,
                    detail=refusal.detail,
                    retry_ms=BUSY_RETRY_MS,
                )
                self._send(link, wire.MessageType.REJECT, seq, reject)
            case prefill.SendSent(seq, transfer, key, posted):
                out = self._outgoing.get(key)
                sent = out.sent(transfer, posted) if out else sent_again(transfer, posted)
                self._send(link, wire.MessageType.SENT, seq, sent)
            case prefill.SendFail(seq, transfer, posted, drained, reason, retryable):
                fail = wire.Fail(
                    transfer=transfer, posted=posted, drained=drained, reason=reason, retryable=retryable
                )
                self._send(link, wire.MessageType.FAIL, seq, fail)
            case prefill.SendCancelAck(seq, transfer, posted, unknown):
                acknowledged = wire.CancelAck(transfer=transfer, posted=posted, unknown=unknown)
                self._send(link, wire.MessageType.CANCEL_ACK, seq, acknowledged)
            case prefill.Begin(key):
                self._begin(peer, self._outgoing[key])
            case prefill.Stop(key):
                self._stop(peer, self._outgoing[key])
            case prefill.TellCancelled():
                if self._outgoing[action.key].begun:
                    self._calls.add(partial(self._listener.cancelled, action.key))
            case prefill.Release():
                if self._outgoing.pop(action.key).begun:
                    self._calls.add(partial(self._listener.released, action.key))

    def _send(self, link: _Link, kind: wire.MessageType, seq: int, body: msgspec.Struct) -> None:
        self._courier.send(link.id, kind, link.session.epoch, seq, body)

    def _begin(self, peer: _Peer, out: Outgoing) -> None:
        layout, link = self._layout, peer.link
        geometry = Geometry(
            source_page_nbytes=layout.page_nbytes,
            source_layer_nbytes=layout.layer_nbytes,
            target_page_nbytes=layout.page_nbytes,
            target_layer_nbytes=link.pages * layout.page_nbytes,
            layers=layout.layers,
        )
        segments = [
            Segment(run.source_rank, run.target_rank, run.source_offset, run.target_offset, run.nbytes)
            for run in plan.equal_runs(layout, self._ranks)
        ]
        immediate = wire.immediate(wire.IMM_PAGE, out.dispatch.transfer)
        try:
            self._fabric.out_begin(out.key, link.id, immediate, geometry, segments)
        except FabricError as error:  # the link has broken, and its LinkFailed waits behind this event
            self._fail(out.key, str(error), True)
            return
        out.begun = True
        dispatch = out.dispatch
        incoming = IncomingTransfer(
            out.key,
            dispatch.request_id,
            list(out.tokens),
            dispatch.cached_tokens,
            dispatch.priority,
            peer.pod,
        )
        self._calls.add(partial(self._listener.dispatched, incoming))

    def _stop(self, peer: _Peer, out: Outgoing) -> None:
        if not out.begun:
            self._apply(peer, prefill.Drained(out.key, 0, False, True, False))
            return
        try:
            self._fabric.out_stop(out.key)
        except FabricError:
            log.debug("transfer %d has drained already; its event waits behind the one at hand", out.key)

    # --- peers ------------------------------------------------------------------------------------

    def _forget(self, peer: _Peer) -> None:
        """A peer that is down and owes nothing: a later HELLO starts afresh, whatever its incarnation."""
        if peer.state.forgettable and self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
        self._note_down()

    def _note_down(self) -> None:
        if self._closing and all(peer.state.link is prefill.Link.DOWN for peer in self._peers.values()):
            self._all_down.set()

    def _describe(self, peer: _Peer) -> dict[str, object]:
        return {
            "link": peer.state.link.value,
            "health": peer.health.value if peer.up else Health.DEAD.value,
            "epoch": peer.state.session.epoch,
            "transfers": sum(t.phase in prefill.HOLDING for t in peer.state.transfers),
            "rtt_us": self._fabric.link_health(peer.link.id)[1] // 1000 if peer.up else 0,
        }

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)
