"""Carries frames and events between the fabric and one of the messengers, on the event loop.

Knows: the event fd, headers, the tick, what to do with garbage. Does not know: what messages mean.

Nothing that comes from outside raises out of the loop: a malformed frame is counted and dropped, and a
fault in handling one event is logged, counted, and does not keep the next from being handled. Frames that
the fabric's queue has no room for are lost like any other: whoever misses an answer asks again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..fabric import events as fabric_events
from ..fabric.fabric import FabricError
from . import authentication, wire
from .patience import OWN_PAUSE_S, TICK_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from .ports import FabricPort, Identity

log = logging.getLogger("tandem.messenger")


class Handler(Protocol):
    def on_event(self, event: fabric_events.Event) -> None: ...
    def on_tick(self) -> None: ...


@dataclass(slots=True)
class Tally:
    malformed: int = 0  # frames that were not what they claimed, or not from whom
    unsent: int = 0  # frames that the link had no room for, or that found it broken
    faults: int = 0  # exceptions in our own handling: defects

    def counts(self) -> dict[str, int]:
        return dataclasses.asdict(self)


class Courier:
    def __init__(
        self, fabric: FabricPort, identity: Identity, handler: Handler, clock: Callable[[], float]
    ) -> None:
        self._fabric = fabric
        self._identity = identity
        self._handler = handler
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._links = 0
        self._ticked_s = clock()
        self.pause_s = 0.0  # between the last two ticks
        self.resumed_s = clock()  # the end of the last pause of our own: nobody is late because we were
        self.fault: str | None = None
        self.tally = Tally()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fabric.event_fd, self.pump)
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fabric.event_fd)
        if self._timer is not None:
            self._timer.cancel()

    def pump(self) -> None:
        for event in self._fabric.events():
            if isinstance(event, fabric_events.Fatal):
                self.fault = event.text
                log.error("the fabric has failed: %s", event.text)
            else:
                self.guarded(partial(self._handler.on_event, event))

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(TICK_S, self._tick)
        now = self._clock()
        self.pause_s = now - self._ticked_s
        if self.pause_s > OWN_PAUSE_S:
            self.resumed_s = now
        self._ticked_s = now
        self.guarded(self._handler.on_tick)

    def guarded(self, handle: Callable[[], None]) -> None:
        """The fault boundary: one event's defect must not stop the others, nor leave pages pinned that later
        events would return.
        """
        try:
            handle()
        except wire.WireError as error:
            self.tally.malformed += 1
            log.debug("dropped a frame: %s", error)
        except Exception:  # the fault boundary of an event: counted, shown in /state, and the loop goes on
            self.tally.faults += 1
            log.exception("an event could not be handled")

    # --- links ------------------------------------------------------------------------------------

    def new_link(self) -> int:
        """A link id; never reused within the fabric's life."""
        self._links += 1
        return self._links

    def connect(
        self,
        link: int,
        address: bytes,
        peer_key: bytes,
        hello: wire.Hello,
        ack: wire.HelloAck,
        initiator: bool,
    ) -> None:
        """A link that cannot be connected stays silent, and is given up as such."""
        try:
            session_key = authentication.session_key(peer_key, hello, ack)
            self._fabric.link_connect(link, address, session_key, initiator)
        except FabricError as error:
            log.warning("%s", error)

    def watch(self, link: int, pid: int, start_time: int) -> bool:
        """Whether the end of that process will be told, as ProcessGone of `link`."""
        try:
            return self._fabric.watch_process(link, pid, start_time)
        except FabricError as error:
            log.warning("%s", error)
            return False

    # --- frames -----------------------------------------------------------------------------------

    def send(
        self, link: int, kind: wire.MessageType, epoch: int, seq: int, body: msgspec.Struct, floor: int = 0
    ) -> None:
        self._send(link, kind, epoch, seq, wire.encode_body(body), floor)

    def ping(self, link: int, epoch: int) -> None:
        now_ns = int(self._clock() * 1e9)
        self._send(link, wire.MessageType.PING, epoch, 0, wire.encode_ping(now_ns), 0)

    def _send(self, link: int, kind: wire.MessageType, epoch: int, seq: int, body: bytes, floor: int) -> None:
        identity = self._identity
        for frame in wire.frames(kind, identity.node_id, identity.incarnation, epoch, seq, body, floor):
            try:
                sent = self._fabric.link_send(link, frame)
            except FabricError:  # the link has broken, and its LinkFailed waits behind the event at hand
                sent = False
            if not sent:
                self.tally.unsent += 1
                return

    def publish(self, link: int, pong: wire.Pong) -> None:
        """What answers the link's PINGs from now on."""
        self._fabric.link_set_pong(link, wire.encode_body(pong))

    def greet(self, address: bytes, kind: wire.MessageType, epoch: int, body: msgspec.Struct) -> None:
        """One frame from the bootstrap endpoint, best effort."""
        identity = self._identity
        data = wire.encode_body(body)
        (frame,) = wire.frames(kind, identity.node_id, identity.incarnation, epoch, 0, data)
        try:
            self._fabric.bootstrap_send(address, frame)
        except FabricError as error:
            log.warning("%s", error)
            self.tally.unsent += 1
