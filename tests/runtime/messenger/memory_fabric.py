"""A fabric in memory whose network loses, repeats and reorders frames, and whose writes take their time.

It keeps the contract of `fabric/csrc/tandem_fabric.h`, in virtual time: what may be late is late by chance,
what must not happen after a close does not. Every write checks both its pages at the moment it touches
them, and `Ether.wrongs` collects what it finds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_runtime.fabric.events import (
    BootstrapFrame,
    CountReached,
    Frame,
    GrantedRegion,
    LinkClosed,
    LinkOpened,
    OutDrained,
)
from tandem_runtime.fabric.fabric import FabricError, FabricInfo, FabricStats
from tandem_runtime.messenger import wire

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tandem_runtime.fabric.events import Event
    from tandem_runtime.fabric.fabric import Geometry, PlanItem, Segment


@dataclass
class Ether:
    """What all fabrics of a test share."""

    chance: random.Random
    loss: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.01
    addresses: dict[bytes, MemoryFabric | Endpoint] = field(default_factory=dict)
    wrongs: list[str] = field(default_factory=list)
    names: itertools.count[int] = field(default_factory=itertools.count)

    def name(self) -> bytes:
        return b"address-%d" % next(self.names)

    def later(self, call: Callable[[], None], scale: float = 1.0) -> None:
        delay_s = self.chance.expovariate(1 / (self.delay_s * scale))
        asyncio.get_running_loop().call_later(delay_s, call)

    def carry(self, deliver: Callable[[], None]) -> None:
        copies = 0 if self.chance.random() < self.loss else 1
        copies += self.chance.random() < self.repeat
        for _ in range(copies):
            self.later(deliver)


@dataclass(eq=False)
class Endpoint:
    fabric: MemoryFabric
    link: int
    address: bytes
    peer: bytes = b""
    key: bytes = b""
    regions: bool = False
    open: bool = True
    closing: bool = False
    heard_ns: int = 0
    pong: bytes = b""
    pong_ns: int = 0

    def hear(self, frame: bytes, key: bytes) -> None:
        if self.fabric.deaf:
            self.fabric.ether.later(lambda: self.hear(frame, key), 10)
            return
        if not self.open or self.closing or key != self.key:
            return
        now_ns = self.fabric.now_ns()
        self.heard_ns = now_ns
        header, body = wire.parse(frame)
        if header.type is not wire.MessageType.PING:
            self.fabric.emit(Frame(self.link, frame, now_ns))
            return
        age_ns = now_ns - self.pong_ns if self.pong_ns else 0
        answer = wire.PONG_PREFIX.pack(wire.PING_BODY.unpack(body)[0], age_ns) + self.pong
        for pong in wire.frames(wire.MessageType.PONG, self.fabric.node, 1, header.epoch, 0, answer):
            self.say(pong)

    def say(self, frame: bytes) -> None:
        def deliver() -> None:
            peer = self.fabric.ether.addresses.get(self.peer)
            if isinstance(peer, Endpoint):
                peer.hear(frame, self.key)

        self.fabric.ether.carry(deliver)


@dataclass(eq=False)
class Out:
    transfer: int
    endpoint: Endpoint
    immediate: int
    layers: int
    segments: int
    stopped: bool = False
    last: bool = False
    drained: bool = False
    queued: int = 0  # writes to be posted
    posted: int = 0
    completed: int = 0


class MemoryFabric:
    """A FabricPort. `pinned` says whose each page is: the test's engines keep it. Unless `honest`, it
    claims that the closing of a link ends all reading, which over shm it does not.
    """

    def __init__(self, ether: Ether, node: int, *, shm: bool, honest: bool = True) -> None:
        self.ether = ether
        self.node = node
        self.shm = shm
        self.deaf_until_s = 0.0
        self.info = FabricInfo(
            provider="shm" if shm else "net",
            fabric="",
            domain="",
            version="",
            has_wait_fd=True,
            virtual_address=False,
            provider_keys=False,
            delivery_complete=True,
            immediate_nbytes=4,
            one_endpoint=False,
            close_fences_target=True,
            close_fences_source=not shm or not honest,
            max_message=1 << 20,
            max_write=1 << 30,
            tx_window=256,
        )
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.bootstrap_address = ether.name()
        ether.addresses[self.bootstrap_address] = self
        self.pinned: dict[int, object] = {}  # page -> whose
        self.landed: dict[object, set[tuple[int, int]]] = {}  # owner -> (layer, page)
        self.writes = Counter[str]()
        self._events: list[Event] = []
        self._links: dict[int, Endpoint] = {}
        self._outs: dict[int, Out] = {}
        self._counters: dict[int, list[int]] = {}  # transfer -> count, expected
        self._plans: dict[int, list[Out]] = {}
        self._aborted: set[int] = set()

    @property
    def deaf(self) -> bool:
        """As a stopped process: what is sent or written to it waits until it goes on."""
        return asyncio.get_running_loop().time() < self.deaf_until_s

    def now_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9)

    def emit(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self.event_fd, 1)

    def events(self) -> list[Event]:
        os.eventfd_read(self.event_fd)
        events, self._events = self._events, []
        return events

    def stats(self) -> FabricStats:
        fields = dict.fromkeys(FabricStats.__dataclass_fields__, 0)
        fields["immediates"], fields["immediates_stale"] = self.writes["counted"], self.writes["stale"]
        return FabricStats(**fields)

    # --- links ------------------------------------------------------------------------------------

    def bootstrap_send(self, address: bytes, frame: bytes) -> None:
        def deliver() -> None:
            peer = self.ether.addresses.get(address)
            if isinstance(peer, MemoryFabric):
                peer.emit(BootstrapFrame(frame))

        self.ether.carry(deliver)

    def link_open(self, link: int) -> None:
        endpoint = self._links[link] = Endpoint(self, link, self.ether.name())
        self.ether.addresses[endpoint.address] = endpoint
        regions = (GrantedRegion(7, 0, 1 << 40),)
        self.ether.later(lambda: self.emit(LinkOpened(link, endpoint.address, regions)))

    def link_connect(self, link: int, address: bytes, key: bytes, initiator: bool) -> None:
        endpoint = self._links[link]
        endpoint.peer, endpoint.key = address, key

    def link_regions(self, link: int, regions: Sequence[tuple[int, int, int]]) -> None:
        self._links[link].regions = True

    def link_send(self, link: int, frame: bytes) -> bool:
        endpoint = self._links.get(link)
        if endpoint is None or not endpoint.open or not endpoint.peer:
            raise FabricError(self.info.provider, "link_send", "not connected")
        endpoint.say(frame)
        return True

    def link_set_pong(self, link: int, body: bytes) -> None:
        self._links[link].pong, self._links[link].pong_ns = body, self.now_ns()

    def link_close(self, link: int) -> None:
        endpoint = self._links[link]
        assert not endpoint.closing
        endpoint.closing = True
        self.ether.later(lambda: self._shut(endpoint))

    def _shut(self, endpoint: Endpoint) -> None:
        endpoint.open = False
        for out in self._outs.values():
            if out.endpoint is endpoint and not out.drained:
                self._drain(out, link_closed=True)
        self.emit(LinkClosed(endpoint.link))

    def link_health(self, link: int) -> tuple[int, int]:
        return self._links[link].heard_ns, 1000

    def watch_process(self, link: int, pid: int, start_time: int) -> bool:
        return True

    # --- counters ---------------------------------------------------------------------------------

    def counter_arm(self, slot: int, gen: int, expected: int) -> None:
        self._counters[wire.transfer_id(slot, gen)] = [0, expected]

    def counter_expect(self, slot: int, gen: int, expected: int) -> None:
        counter = self._counters[wire.transfer_id(slot, gen)]
        counter[1] = expected
        if counter[0] == expected:
            self.emit(CountReached(slot, gen, expected, self.now_ns()))

    def counter_disarm(self, slot: int, gen: int) -> None:
        del self._counters[wire.transfer_id(slot, gen)]

    def counter_read(self, slot: int, gen: int) -> int:
        return self._counters[wire.transfer_id(slot, gen)][0]

    def count(self, transfer: int) -> None:
        counter = self._counters.get(transfer)
        if counter is None:
            self.writes["stale"] += 1
            return
        self.writes["counted"] += 1
        counter[0] += 1
        if counter[0] == counter[1]:
            slot, gen = wire.slot_of(transfer), wire.gen_of(transfer)
            self.emit(CountReached(slot, gen, counter[0], self.now_ns()))

    # --- writes -----------------------------------------------------------------------------------

    def out_begin(
        self, transfer: int, link: int, immediate: int, geometry: Geometry, segments: Sequence[Segment]
    ) -> None:
        endpoint = self._links[link]
        if not endpoint.regions or endpoint.closing:
            raise FabricError(self.info.provider, "out_begin", "not connected")
        self._outs[transfer] = Out(transfer, endpoint, immediate, geometry.layers, len(segments))

    def out_post(self, item: PlanItem) -> None:
        self._publish(None, item)

    def plan_publish(self, base: int, items: Sequence[PlanItem]) -> None:
        for item in items:
            self._publish(base, item)

    def _publish(self, base: int | None, item: PlanItem) -> None:
        out = self._outs[item.transfer]
        out.last |= item.last
        for layer in range(out.layers):
            for source, target in zip(item.source_pages, item.target_pages, strict=True):
                out.queued += 1

                def post(layer: int = layer, source: int = source, target: int = target) -> None:
                    out.queued -= 1
                    if not out.stopped and not out.drained and base not in self._aborted:
                        self._post(out, layer, source, target)
                    else:
                        self._check_drained(out)

                self.ether.later(post, 3 * (layer + 1))

    def plan_abort(self, base: int) -> None:
        self._aborted.add(base)

    def out_stop(self, transfer: int) -> None:
        out = self._outs[transfer]
        out.stopped = True
        self.ether.later(lambda: self._check_drained(out))

    def _post(self, out: Out, layer: int, source: int, target: int) -> None:
        out.posted += 1
        peer = self.ether.addresses.get(out.endpoint.peer)
        assert isinstance(peer, Endpoint)

        def land() -> None:
            if not peer.open:
                return
            if peer.fabric.deaf:
                self.ether.later(land, 10)
                return
            if self.shm:
                self._read(out, source)
            peer.fabric.take(out.immediate, layer, target)
            self.ether.later(complete)

        def read() -> None:
            """Into the sender's socket: from here on the source is not needed."""
            if out.endpoint.open:
                self._read(out, source)
                self.ether.later(land)

        def complete() -> None:
            if out.endpoint.open and not out.drained:
                out.completed += 1
                self._check_drained(out)

        self.ether.later(land if self.shm else read)

    def _read(self, out: Out, page: int) -> None:
        if self.pinned.get(page) != out.transfer:
            self.ether.wrongs.append(f"page {page} of transfer {out.transfer} was read after its release")

    def take(self, immediate: int, layer: int, page: int) -> None:
        transfer = immediate & ((1 << 30) - 1)
        if self.pinned.get(page) != transfer:
            self.ether.wrongs.append(f"page {page} was written by transfer {transfer:#x} after its release")
        self.landed.setdefault(transfer, set()).add((layer, page))
        self.count(transfer)

    def _check_drained(self, out: Out) -> None:
        over = out.stopped or (out.last and out.queued == 0)
        if over and not out.drained and out.completed == out.posted:
            self._drain(out, link_closed=False)

    def _drain(self, out: Out, *, link_closed: bool) -> None:
        out.drained = True
        now_ns = self.now_ns()
        self.emit(
            OutDrained(
                transfer=out.transfer,
                link=out.endpoint.link,
                link_closed=link_closed,
                posted=out.posted,
                completed=out.completed,
                failed=0,
                nbytes=out.posted,
                hidden_nbytes=0,
                first_post_ns=now_ns,
                last_layer_ns=now_ns,
                last_completion_ns=now_ns,
                time_ns=now_ns,
            )
        )
