"""The messenger's borders: what it needs of the fabric, what it tells the engine's side, and the plain data
that crosses.

`FabricPort` is the part of `fabric.fabric.Fabric` that is used here; the tests put an adversarial one in
its place. The listeners are called on the event loop, never from inside a call of theirs into the
messenger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fabric.events import Event
    from ..fabric.fabric import FabricInfo, FabricStats, Geometry, PlanItem, Segment


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is. `incarnation` is greater at each start of the same `node_id`."""

    pod: str
    node_id: int
    incarnation: int
    pid: int
    start_time: int  # field 22 of /proc/PID/stat
    boot_id: str


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A prefill worker as discovery knows it."""

    uid: str
    pod: str
    zone: str
    control_address: bytes
    incarnation: int


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """Where one transfer's time went. What only prefill knows is None until its SENT has come.

    `exposed_s` is the time from the end of prefill's last layer to the last write counted here; None also
    when the two sides share no clock. `hidden_nbytes` of `nbytes` had crossed when that layer ended.
    """

    node: str  # prefill's pod
    nbytes: int
    total_s: float  # DISPATCH to the last write counted
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    exposed_s: float | None = None
    hidden_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class IncomingTransfer:
    """A prompt to prefill. Tokens before `cached_tokens` are on decode already and do not cross."""

    key: int
    request_id: str
    tokens: list[int]
    cached_tokens: int
    priority: int
    node: str  # decode's pod


class DecodeListener(Protocol):
    """Every ticket ends in exactly one `ready` or `failed`, unless its owner cancelled it, and always in
    exactly one `released`, last.
    """

    def ready(self, ticket: int, timing: TransferTiming) -> None: ...
    def failed(self, ticket: int, reason: str, message: str, retryable: bool, node: str) -> None: ...
    def released(self, ticket: int) -> None:
        """No write can land in the ticket's pages any more."""

    def timed(self, ticket: int, timing: TransferTiming) -> None:
        """Prefill's part of the timing. After `ready`, often after `released`, perhaps never: readiness
        waits for no message.
        """

    def changed(self) -> None:
        """Peers or credits have changed: what waits may go now."""


class PrefillListener(Protocol):
    """Every `dispatched` key ends in exactly one `released`; `cancelled` may come between."""

    def dispatched(self, incoming: IncomingTransfer) -> None: ...
    def cancelled(self, key: int) -> None:
        """Nobody wants it any more: computing further is waste. The source pages are still held."""

    def released(self, key: int) -> None:
        """Nobody reads the source pages any more."""


class FabricPort(Protocol):
    """The part of the fabric that the messenger uses; `fabric/csrc/tandem_fabric.h` is its contract."""

    info: FabricInfo
    event_fd: int
    bootstrap_address: bytes

    def events(self) -> list[Event]: ...
    def stats(self) -> FabricStats: ...
    def bootstrap_send(self, address: bytes, frame: bytes) -> None: ...
    def link_open(self, link: int) -> None: ...
    def link_connect(self, link: int, address: bytes, key: bytes, initiator: bool) -> None: ...
    def link_regions(self, link: int, regions: Sequence[tuple[int, int, int]]) -> None: ...
    def link_send(self, link: int, frame: bytes) -> bool: ...
    def link_set_pong(self, link: int, body: bytes) -> None: ...
    def link_close(self, link: int) -> None: ...
    def link_health(self, link: int) -> tuple[int, int]: ...
    def counter_arm(self, slot: int, gen: int, expected: int) -> None: ...
    def counter_expect(self, slot: int, gen: int, expected: int) -> None: ...
    def counter_disarm(self, slot: int, gen: int) -> None: ...
    def counter_read(self, slot: int, gen: int) -> int: ...
    def out_begin(
        self, transfer: int, link: int, immediate: int, geometry: Geometry, segments: Sequence[Segment]
    ) -> None: ...
    def out_post(self, item: PlanItem) -> None: ...
    def plan_publish(self, base: int, items: Sequence[PlanItem]) -> None: ...
    def plan_abort(self, base: int) -> None: ...
    def out_stop(self, transfer: int) -> None: ...
    def watch_process(self, link: int, pid: int, start_time: int) -> bool: ...
