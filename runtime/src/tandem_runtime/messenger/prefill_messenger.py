"""Prefill's messenger: incoming transfers, links to decode peers, plans of writes. Carries out what
`prefill.py` decides.

Knows: which key is which peer's transfer, which pages each chunk completes, clocks, frames. Does not know:
when memory is safe (`prefill.py`), the scheduler, layers' progress (the C core's).

    DISPATCH ─► dispatched(key) ─► admitted() ─► publish() computed() … ─► released(key)
                                       └ pages of a prefix hit go at once

A plan is published before its step runs, and the fabric posts layer after layer of it as the layer counter
moves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..fabric import events as fabric_events
from ..fabric.fabric import FabricError, Geometry, PlanItem, Segment
from . import authentication, patience, plan, prefill, wire
from .assembly import Assembly
from .courier import Courier
from .manifest import difference, pool_pages
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
OWN_PAUSE_S = 1.0  # a tick this late means that we were stopped
CLOSE_S = 2.0
BUSY_RETRY_MS = 100
QUARANTINE_MAX = 64  # transfers whose source pages nothing can free; beyond it nothing new is taken


@dataclass(slots=True)
class _Outgoing:
    """One transfer as the engine and the fabric know it."""

    key: int
    peer: _Peer
    request_id: str
    tokens: list[int]
    cached_tokens: int
    priority: int
    target_pages: tuple[int, ...]
    expected: int
    immediate: int
    move: range
    cursor: plan.PageCursor
    dispatched_ns: int
    begun: bool = False  # known to the fabric
    told: bool = False  # known to the engine
    source_pages: Sequence[int] = ()
    admitted_ns: int = 0
    drained: fabric_events.OutDrained | None = None


@dataclass(slots=True)
class _Link:
    id: int
    session: prefill.Session
    hello: wire.Hello
    key: bytes  # the peer key that proved HELLO
    opened_s: float
    ack: wire.HelloAck | None = None
    pages: int = 0  # of the peer's pool
    pinged_s: float = 0.0
    age_s: float = 0.0
    pong_s: float = 0.0
    assembly: Assembly = field(default_factory=Assembly)


@dataclass(slots=True)
class _Peer:
    node: int
    pod: str
    state: prefill.Peer = field(default_factory=prefill.Peer)
    link: _Link | None = None  # of the present session
    health: Health = Health.HEALTHY


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
        self._fabric = fabric
        self._identity = identity
        self._manifest = manifest
        self._keys = keys
        self._layout = layout
        self._ranks = ranks
        self._sharding = plan.Sharding(layout.kv_heads * ranks, ranks, ranks)
        self._runs = plan.equal_runs(layout, ranks)
        self._listener = listener
        self._credits = max_transfers
        self._clock = clock
        self._courier = Courier(fabric, identity, self)
        info = fabric.info
        self._fences = prefill.Fences(close=bool(info.close_fences_source), peer_close=not info.one_endpoint)
        self._must_watch = not info.close_fences_source and not info.one_endpoint
        self._peers: dict[int, _Peer] = {}  # by node
        self._by_link: dict[int, tuple[_Peer, _Link]] = {}
        self._watched: dict[
            int, tuple[_Peer, int]
        ] = {}  # link -> peer and incarnation whose process is watched
        self._outgoing: dict[int, _Outgoing] = {}  # by key
        self._plans: dict[int, list[int]] = {}  # counter base -> keys
        self._next_key = 1
        self._draining = False
        self._calls: deque[Callable[[], None]] = deque()
        self._busy = 0
        self._ticked_s = clock()
        self._resumed_s = clock()
        self._all_down = asyncio.Event()
        self._closing = False

    # --- what the lead calls ----------------------------------------------------------------------

    def start(self) -> None:
        self._courier.start()

    def live(self) -> int:
        """Transfers whose source pages are held, or will be."""
        return len(self._outgoing)

    def set_credits(self, transfers: int) -> None:
        """How many transfers may be under way, all decode peers together."""
        with _Turn(self):
            self._credits = transfers
            self._publish_all()

    def admitted(self, key: int, pages: Sequence[int], hit_tokens: int) -> None:
        """The source pages of the whole prompt but its last token. What the prefix hit covers and decode
        lacks is posted at once, in all layers.
        """
        out = self._outgoing.get(key)
        if out is None:
            return  # cancelled, and released, while it was queued
        with _Turn(self):
            out.source_pages, out.admitted_ns = pages, self._now_ns()
            self._apply(out.peer, prefill.Admitted(key))
            if self._sending(out):
                item = self._item(out, out.cursor.start(hit_tokens), last=False)
                if item is not None:
                    self._fabric.out_post(item)

    def publish(self, counter_base: int, chunks: Sequence[tuple[int, Chunk]]) -> None:
        """Before the step that computes `chunks`: layer l of what they complete goes when the layer counter
        reaches counter_base + l + 1.
        """
        with _Turn(self):
            items = []
            keys = []
            for key, chunk in chunks:
                out = self._outgoing.get(key)
                if out is None or not self._sending(out):
                    continue
                item = self._item(out, out.cursor.chunk(chunk), last=chunk.last)
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
        with _Turn(self):
            self._fabric.plan_abort(counter_base)
            for key in keys:
                self._fail(key, "the forward pass failed", True)

    def fail(self, key: int, reason: str, retryable: bool) -> None:
        """The engine cannot finish the transfer. `released` follows."""
        with _Turn(self):
            self._fail(key, reason, retryable)

    def drain(self) -> None:
        """No new transfers; those under way are finished."""
        if self._draining:
            return
        self._draining = True
        with _Turn(self):
            for peer in self._peers.values():
                if peer.link is not None and peer.state.link is prefill.Link.UP:
                    body = wire.Goodbye(finish_s=0.0)
                    self._courier.send(
                        peer.link.id, wire.MessageType.GOODBYE, peer.link.session.epoch, 0, body
                    )
            self._publish_all()

    async def close(self) -> None:
        """Closes all links, which ends every transfer, and waits for that for a moment."""
        self.drain()
        self._closing = True
        with _Turn(self):
            for peer in list(self._peers.values()):
                self._apply(peer, prefill.LinkTimeout())
            self._note_down()
        try:
            await asyncio.wait_for(self._all_down.wait(), CLOSE_S)
        except TimeoutError:
            log.warning("links did not close in %s s", CLOSE_S)
        self._courier.stop()
        self._flush()

    def snapshot(self) -> dict[str, object]:
        stats = self._fabric.stats()
        tally = self._courier.tally
        phases = Counter(
            t.phase.value
            for peer in self._peers.values()
            for t in peer.state.transfers
            if t.phase in prefill.HOLDING
        )
        return {
            "transfers": dict(phases),
            "peers": {peer.pod: self._describe(peer) for peer in self._peers.values()},
            "counters": {
                "stale": stats.immediates_stale,
                "quarantined": phases[prefill.Phase.UNFENCED.value],
                "writes": stats.writes_posted,
                "bytes": stats.bytes_posted,
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
                case fabric_events.OutDrained():
                    self._drained(event)
                case fabric_events.BootstrapFrame():
                    self._greeting(event.frame)
                case fabric_events.LinkOpened():
                    if (known := self._by_link.get(event.link)) is not None:
                        self._opened(*known, event.address)
                case fabric_events.LinkFailed():
                    if (known := self._by_link.get(event.link)) is not None:
                        log.info("link to %s is lost: %s", known[0].pod, event)
                        self._apply(known[0], prefill.LinkFailed(known[1].session))
                case fabric_events.LinkClosed():
                    if (known := self._by_link.pop(event.link, None)) is not None:
                        self._apply(known[0], prefill.LinkClosed(known[1].session))
                        self._forget(known[0])
                case fabric_events.ProcessGone():
                    if (watched := self._watched.pop(event.link, None)) is not None:
                        log.info("the process of %s is gone", watched[0].pod)
                        self._apply(watched[0], prefill.ProcessGone(watched[1]))
                        self._forget(watched[0])
                case fabric_events.Fatal():
                    log.error("the fabric has failed: %s", event)

    def _greeting(self, frame: bytes) -> None:
        """HELLO. Nothing is answered, and no address used, before its proof holds: anybody can send here."""
        header, data = wire.parse(frame)
        hello = wire.decode_body(header.type, data)
        if not isinstance(hello, wire.Hello):
            raise wire.WireError(f"{header.type.name} on prefill's bootstrap endpoint")
        self._keys.refresh()
        sender = authentication.Sender(header.node, header.incarnation, header.epoch)
        key = next(
            (
                key
                for key in self._keys.accepted
                if authentication.equal(authentication.hello_proof(key, sender, hello), hello.proof)
            ),
            None,
        )
        if key is None:
            raise wire.WireError("HELLO without a good proof")
        if self._closing:
            return
        session = prefill.Session(header.incarnation, header.epoch)
        peer = self._peers.get(header.node)
        if peer is not None and session <= peer.state.session:
            if peer.link is not None and peer.link.hello == hello:
                self._apply(peer, prefill.Hello(session))
            return
        differs = difference(self._manifest, hello.manifest)
        if differs is not None:
            log.warning("%s does not pair with us: %s is %s here and %s there", hello.pod, *differs)
            self._reject(key, hello, session, wire.Reject.LAYOUT, *differs)
            return
        link = _Link(self._courier.new_link(), session, hello, key, self._clock())
        link.pages = pool_pages(hello.manifest)
        here = hello.boot_id == self._identity.boot_id
        seen = here and self._fabric.watch_process(link.id, hello.pid, hello.start_time)
        if self._must_watch and not seen:
            # Its reading of our memory ends only with its process, so that process must be one we can see
            # end.
            self._reject(key, hello, session, wire.Reject.LAYOUT, "process", "visible", str(hello.pid))
            return
        if peer is None:
            peer = self._peers[header.node] = _Peer(header.node, hello.pod)
        if seen:
            self._watched[link.id] = (peer, session.incarnation)
        peer.link = link
        peer.pod = hello.pod
        self._by_link[link.id] = (peer, link)
        self._apply(peer, prefill.Hello(session))

    def _reject(
        self,
        key: bytes,
        hello: wire.Hello,
        session: prefill.Session,
        reason: str,
        name: str = "",
        mine: str = "",
        yours: str = "",
    ) -> None:
        reject = wire.HelloReject(hello_nonce=hello.nonce, reason=reason, field=name, mine=mine, yours=yours)
        proof = authentication.reject_proof(key, hello, self._sender(session), reject)
        reject = replace(reject, proof=proof)
        self._courier.greet(hello.reply_address, wire.MessageType.HELLO_REJECT, session.epoch, reject)

    def _opened(self, peer: _Peer, link: _Link, address: bytes) -> None:
        ack = wire.HelloAck(
            nonce=authentication.new_nonce(),
            hello_nonce=link.hello.nonce,
            pod=self._identity.pod,
            pid=self._identity.pid,
            start_time=self._identity.start_time,
            boot_id=self._identity.boot_id,
            manifest=self._manifest,
            link_address=address,
            credits=self._window(),
        )
        proof = authentication.ack_proof(link.key, link.hello, self._sender(link.session), ack)
        link.ack = replace(ack, proof=proof)
        self._apply(peer, prefill.LinkOpened(link.session))

    def _sender(self, session: prefill.Session) -> authentication.Sender:
        return authentication.Sender(self._identity.node_id, self._identity.incarnation, session.epoch)

    def _frame(self, link_id: int, frame: bytes) -> None:
        known = self._by_link.get(link_id)
        if known is None:
            return
        peer, link = known
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
            raise wire.WireError(
                f"ATTACH: {len(body.regions)} regions; {self._ranks} of {wanted} bytes are needed"
            )
        self._fabric.link_regions(link.id, [(r.key, r.base, r.nbytes) for r in body.regions])
        self._apply(peer, prefill.Attached(link.session))
        log.info("%s is attached, epoch %d", peer.pod, link.session.epoch)
        self._publish_all()

    # --- transfers --------------------------------------------------------------------------------

    def _dispatched(self, peer: _Peer, link: _Link, seq: int, body: wire.Dispatch) -> None:
        if peer.state.link is not prefill.Link.UP or peer.link is not link:
            return
        if seq < peer.state.floor or peer.state.record(seq) is not None:
            again = prefill.Dispatched(link.session, seq, body.transfer, 0)
            self._apply(peer, again)
            return
        out = self._unpack(peer, link, body)
        if isinstance(out, prefill.Refusal):
            self._apply(peer, prefill.Dispatched(link.session, seq, body.transfer, 0, out))
            return
        self._next_key += 1
        self._outgoing[out.key] = out
        self._apply(peer, prefill.Dispatched(link.session, seq, body.transfer, out.key))

    def _unpack(self, peer: _Peer, link: _Link, body: wire.Dispatch) -> _Outgoing | prefill.Refusal:
        """The transfer that a DISPATCH asks for, or what is wrong with it."""
        layout = self._layout
        if self._draining:
            return prefill.Refusal(wire.Reject.DRAINING)
        alive = sum(t.phase in prefill.HOLDING for t in peer.state.transfers)
        unfenced = sum(
            t.phase is prefill.Phase.UNFENCED for p in self._peers.values() for t in p.state.transfers
        )
        # Twice the window: decode may know of an end before we do.
        if alive >= 2 * self._window() or unfenced >= QUARANTINE_MAX:
            return prefill.Refusal(wire.Reject.BUSY)
        try:
            tokens, pages = plan.unpack_u32(body.tokens), plan.unpack_u32(body.pages)
        except ValueError as error:
            return prefill.Refusal(wire.Reject.BAD_PAGES, str(error))
        if len(tokens) > layout.pages * layout.page_tokens:
            detail = f"{len(tokens)} tokens; the pool holds {layout.pages * layout.page_tokens}"
            return prefill.Refusal(wire.Reject.TOO_LONG, detail)
        if (
            body.cached_tokens < 0
            or body.cached_tokens % layout.page_tokens
            or body.cached_tokens >= len(tokens) - 1
        ):
            return prefill.Refusal(
                wire.Reject.BAD_PAGES, f"{body.cached_tokens} cached of {len(tokens)} tokens"
            )
        move = plan.pages_to_move(len(tokens), body.cached_tokens, layout.page_tokens)
        if len(pages) != len(move) or len(set(pages)) != len(pages) or max(pages) >= link.pages:
            return prefill.Refusal(
                wire.Reject.BAD_PAGES, f"{len(pages)} pages; {len(move)} different ones are needed"
            )
        if body.tails:
            return prefill.Refusal(wire.Reject.LAYOUT, "tails are not supported")
        expected = plan.expected_writes(self._sharding, layout.layers, len(pages))
        if body.expected != expected:
            return prefill.Refusal(wire.Reject.COUNT, f"{body.expected} writes there, {expected} here")
        return _Outgoing(
            key=self._next_key,
            peer=peer,
            request_id=body.request_id,
            tokens=list(tokens),
            cached_tokens=body.cached_tokens,
            priority=body.priority,
            target_pages=pages,
            expected=expected,
            immediate=wire.immediate(wire.IMM_PAGE, body.transfer),
            move=move,
            cursor=plan.PageCursor(move, layout.page_tokens),
            dispatched_ns=self._now_ns(),
        )

    def _sending(self, out: _Outgoing) -> bool:
        transfer = out.peer.state.find(out.key)
        return transfer is not None and transfer.phase is prefill.Phase.SENDING

    def _item(self, out: _Outgoing, indices: range, last: bool) -> PlanItem | None:
        if not indices and not last:
            return None
        source = [out.source_pages[index] for index in indices]
        target = [out.target_pages[index - out.move.start] for index in indices]
        return PlanItem(transfer=out.key, source_pages=source, target_pages=target, last=last)

    def _fail(self, key: int, reason: str, retryable: bool) -> None:
        out = self._outgoing.get(key)
        if out is not None:
            self._apply(out.peer, prefill.Failing(key, reason, retryable))

    def _drained(self, event: fabric_events.OutDrained) -> None:
        out = self._outgoing.get(event.transfer)
        if out is None:
            return
        out.drained = event
        clean = event.completed + event.failed == event.posted
        drained = prefill.Drained(out.key, event.posted, event.failed > 0, clean, bool(event.link_closed))
        self._apply(out.peer, drained)
        self._forget(out.peer)

    # --- time -------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        with _Turn(self):
            now = self._clock()
            if now - self._ticked_s > OWN_PAUSE_S:
                self._resumed_s = now
            self._ticked_s = now
            for peer in list(self._peers.values()):
                if peer.link is not None:
                    self._tick(peer, peer.link, now)

    def _tick(self, peer: _Peer, link: _Link, now: float) -> None:
        since = max(link.opened_s, self._resumed_s)
        if peer.state.link is prefill.Link.UP:
            self._publish(peer, link)
            if now - link.pinged_s >= HEARTBEAT_S:
                link.pinged_s = now
                self._courier.ping(link.id, link.session.epoch, int(now * 1e9))
            since = max(since, self._fabric.link_health(link.id)[0] / 1e9)
            age_s = link.age_s + now - link.pong_s if link.pong_s else 0.0
            peer.health = health(now - since, age_s)
        if now - since >= patience.prefill_link_s(peer.state):
            log.info("%s is silent", peer.pod)
            self._apply(peer, prefill.LinkTimeout())

    def _window(self) -> int:
        """Transfers that each attached peer may have under way: its share, so that no two peers race for
        the last one.
        """
        attached = sum(peer.state.link is prefill.Link.UP for peer in self._peers.values())
        return max(1, self._credits // max(1, attached)) if self._credits > 0 else 0

    def _publish_all(self) -> None:
        for peer in self._peers.values():
            if peer.link is not None and peer.state.link is prefill.Link.UP:
                self._publish(peer, peer.link)

    def _publish(self, peer: _Peer, link: _Link) -> None:
        alive = [
            t.id
            for t in peer.state.transfers
            if t.session == link.session
            and t.phase in (prefill.Phase.QUEUED, prefill.Phase.SENDING, prefill.Phase.STOPPING)
        ]
        credits = 0 if self._draining else self._window()
        self._fabric.link_set_pong(link.id, wire.encode_body(wire.Pong(credits, self._draining, alive)))

    # --- carrying out -----------------------------------------------------------------------------

    def _apply(self, peer: _Peer, event: prefill.Event) -> None:
        peer.state, actions = prefill.step(peer.state, event, self._fences)
        for action in actions:
            self._perform(peer, action)

    def _perform(self, peer: _Peer, action: prefill.Action) -> None:
        link = peer.link
        assert link is not None
        match action:
            case prefill.OpenLink():
                self._fabric.link_open(link.id)
            case prefill.ConnectLink():
                assert link.ack is not None
                session_key = authentication.session_key(link.key, link.hello, link.ack)
                self._fabric.link_connect(link.id, link.hello.link_address, session_key, False)
            case prefill.SendHelloAck(session):
                assert link.ack is not None
                self._courier.greet(
                    link.hello.reply_address, wire.MessageType.HELLO_ACK, session.epoch, link.ack
                )
            case prefill.CloseLink(session):
                self._close_link(peer, session)
            case prefill.SendAccept(seq, transfer, key):
                expected = self._outgoing[key].expected
                accept = wire.Accept(transfer=transfer, expected=expected, credits=self._window())
                self._send(link, wire.MessageType.ACCEPT, seq, accept)
            case prefill.SendReject(seq, transfer, refusal):
                reject = wire.RejectBody(
                    transfer=transfer, reason=refusal.reason, detail=refusal.detail, retry_ms=BUSY_RETRY_MS
                )
                self._send(link, wire.MessageType.REJECT, seq, reject)
            case prefill.SendSent(seq, transfer, key, posted):
                self._send(link, wire.MessageType.SENT, seq, self._sent(transfer, key, posted))
            case prefill.SendFail(seq, transfer, posted, drained, reason, retryable):
                fail = wire.Fail(
                    transfer=transfer, posted=posted, drained=drained, reason=reason, retryable=retryable
                )
                self._send(link, wire.MessageType.FAIL, seq, fail)
            case prefill.SendCancelAck(seq, transfer, posted, unknown):
                acknowledged = wire.CancelAck(transfer=transfer, posted=posted, unknown=unknown)
                self._send(link, wire.MessageType.CANCEL_ACK, seq, acknowledged)
            case prefill.Begin(key):
                self._begin(self._outgoing[key], link)
            case prefill.Stop(key):
                self._stop(self._outgoing[key])
            case prefill.TellCancelled():
                if self._outgoing[action.key].told:
                    self._calls.append(partial(self._listener.cancelled, action.key))
            case prefill.Release():
                self._release(action.key)

    def _send(self, link: _Link, kind: wire.MessageType, seq: int, body: msgspec.Struct) -> None:
        self._courier.send(link.id, kind, link.session.epoch, seq, body)

    def _sent(self, transfer: int, key: int, posted: int) -> wire.Sent:
        out = self._outgoing.get(key)
        if out is None or out.drained is None:  # asked for again after its end: the count is what matters
            return wire.Sent(
                transfer=transfer,
                posted=posted,
                nbytes=0,
                queue_ns=0,
                prefill_ns=0,
                last_layer_ns=0,
                transfer_ns=0,
            )
        event = out.drained
        return wire.Sent(
            transfer=transfer,
            posted=posted,
            nbytes=event.nbytes,
            queue_ns=max(0, out.admitted_ns - out.dispatched_ns),
            prefill_ns=max(0, event.last_layer_ns - out.admitted_ns),
            last_layer_ns=event.last_layer_ns,
            transfer_ns=max(0, event.last_completion_ns - event.first_post_ns),
        )

    def _close_link(self, peer: _Peer, session: prefill.Session) -> None:
        for owner, link in self._by_link.values():
            if owner is peer and link.session == session:
                self._fabric.link_close(link.id)

    def _begin(self, out: _Outgoing, link: _Link) -> None:
        layout = self._layout
        geometry = Geometry(
            source_page_nbytes=layout.page_nbytes,
            source_layer_nbytes=layout.layer_nbytes,
            target_page_nbytes=layout.page_nbytes,
            target_layer_nbytes=link.pages * layout.page_nbytes,
            layers=layout.layers,
        )
        segments = [
            Segment(
                source_region=run.source_rank,
                target_region=run.target_rank,
                source_offset=run.source_offset,
                target_offset=run.target_offset,
                nbytes=run.nbytes,
            )
            for run in self._runs
        ]
        try:
            self._fabric.out_begin(out.key, link.id, out.immediate, geometry, segments)
        except FabricError as error:  # the link has broken, and its LinkFailed waits behind this event
            self._fail(out.key, str(error), True)
            return
        out.begun = out.told = True
        incoming = IncomingTransfer(
            out.key, out.request_id, out.tokens, out.cached_tokens, out.priority, out.peer.pod
        )
        self._calls.append(partial(self._listener.dispatched, incoming))

    def _stop(self, out: _Outgoing) -> None:
        if out.begun:
            self._fabric.out_stop(out.key)
        else:
            self._apply(out.peer, prefill.Drained(out.key, 0, False, True, False))

    def _release(self, key: int) -> None:
        out = self._outgoing.pop(key)
        if out.told:
            self._calls.append(partial(self._listener.released, key))

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
        up = peer.state.link is prefill.Link.UP and peer.link is not None
        rtt_ns = self._fabric.link_health(peer.link.id)[1] if peer.link is not None and up else 0
        return {
            "link": peer.state.link.value,
            "health": peer.health.value if up else Health.DEAD.value,
            "epoch": peer.state.session.epoch,
            "transfers": sum(t.phase in prefill.HOLDING for t in peer.state.transfers),
            "rtt_us": rtt_ns // 1000,
        }

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _flush(self) -> None:
        while self._calls:
            self._courier.guarded(self._calls.popleft())


class _Turn:
    """Listener calls made during a turn are held back to its end, when the messenger's state is whole
    again.
    """

    __slots__ = ("_messenger",)

    def __init__(self, messenger: PrefillMessenger) -> None:
        self._messenger = messenger

    def __enter__(self) -> None:
        self._messenger._busy += 1

    def __exit__(self, *_: object) -> None:
        messenger = self._messenger
        messenger._busy -= 1
        if messenger._busy == 0 and messenger._calls:
            asyncio.get_running_loop().call_soon(messenger._flush)
