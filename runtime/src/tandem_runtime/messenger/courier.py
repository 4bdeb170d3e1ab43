"""Carries frames and events between the fabric and one of the messengers, on the event loop.

Knows: the event fd, headers, the tick, what to do with garbage. Does not know: what messages mean.

Nothing that comes from outside raises out of the loop: a malformed frame is counted and dropped, and a
fault in handling one event is logged, counted, and does not keep the next from being handled. Frames that
the fabric's queue has no room for are lost like any other: whoever misses an answer asks again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from . import wire
from .patience import TICK_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from ..fabric.events import Event
    from .ports import FabricPort, Identity

log = logging.getLogger("tandem.messenger")


class Handler(Protocol):
    def on_event(self, event: Event) -> None: ...
    def on_tick(self) -> None: ...


@dataclass(slots=True)
class Tally:
    malformed: int = 0  # frames that were not what they claimed, or not from whom
    unsent: int = 0  # frames that the link's queue had no room for
    faults: int = 0  # exceptions in our own handling: defects


class Courier:
    def __init__(self, fabric: FabricPort, identity: Identity, handler: Handler) -> None:
        self._fabric = fabric
        self._identity = identity
        self._handler = handler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._links = 0
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
            self.guarded(partial(self._handler.on_event, event))

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.guarded(self._handler.on_tick)

    def guarded(self, handle: Callable[[], None]) -> None:
        """The fault boundary: one event's defect must not stop the others, nor leave pages pinned that
        later events would return.
        """
        try:
            handle()
        except wire.WireError as error:
            self.tally.malformed += 1
            log.debug("dropped a frame: %s", error)
        except Exception:
            self.tally.faults += 1
            log.exception("an event could not be handled")

    # --- frames -----------------------------------------------------------------------------------

    def new_link(self) -> int:
        """A link id; never reused within the fabric's life."""
        self._links += 1
        return self._links

    def send(
        self, link: int, kind: wire.MessageType, epoch: int, seq: int, body: msgspec.Struct, floor: int = 0
    ) -> None:
        self._send(link, kind, epoch, seq, wire.encode_body(body), floor)

    def ping(self, link: int, epoch: int, now_ns: int) -> None:
        self._send(link, wire.MessageType.PING, epoch, 0, wire.encode_ping(now_ns), 0)

    def _send(self, link: int, kind: wire.MessageType, epoch: int, seq: int, body: bytes, floor: int) -> None:
        identity = self._identity
        for frame in wire.frames(kind, identity.node_id, identity.incarnation, epoch, seq, body, floor):
            if not self._fabric.link_send(link, frame):
                self.tally.unsent += 1
                return

    def greet(self, address: bytes, kind: wire.MessageType, epoch: int, body: msgspec.Struct) -> None:
        """One frame from the bootstrap endpoint."""
        identity = self._identity
        data = wire.encode_body(body)
        (frame,) = wire.frames(kind, identity.node_id, identity.incarnation, epoch, 0, data)
        self._fabric.bootstrap_send(address, frame)
