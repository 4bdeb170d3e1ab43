"""The Python face of the C core: endpoints, counted paged writes, frames.

Knows: the core's calls, their units and their errors. Does not know: messages, requests, page tables.

One `Fabric` is one NIC group with its own progress thread. All calls come from one thread, return at once
(only opening, registering and closing wait for the progress thread) and may run in an event loop: watch
`event_fd` for reading, then take `events()`. Python never runs per page: a plan hands whole lists of page ids
over once per step.
"""

from __future__ import annotations

import errno
import mmap
import struct
from typing import TYPE_CHECKING, Any

from . import _core
from .events import (
    BootstrapFrame,
    CountReached,
    Event,
    Fatal,
    Frame,
    GrantedRegion,
    LinkClosed,
    LinkFailed,
    LinkOpened,
    OutDrained,
    ProcessGone,
)
from .info import FabricInfo, FabricStats, read_info, read_stats, text
from .transfers import Geometry, PlanItem, Segment, c_geometry, c_plan_items, c_segments

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BOOTSTRAP_FRAME_NBYTES_MAX",
    "FRAME_NBYTES_MAX",
    "SLOTS",
    "Fabric",
    "FabricError",
    "FabricInfo",
    "FabricStats",
    "Geometry",
    "PlanItem",
    "Segment",
    "core_config",
]

ffi, lib = _core.ffi, _core.lib

FRAME_NBYTES_MAX: int = lib.TDM_FRAME_MAX - lib.TDM_MAC_NBYTES  # of a link's frame, without its MAC
BOOTSTRAP_FRAME_NBYTES_MAX: int = lib.TDM_FRAME_MAX
SLOTS: int = lib.TDM_SLOTS

_GRANT = struct.Struct("=QQQ")  # tdm_remote_region

_ADVICE = {
    errno.ENOTCONN: "connect the link, and give it the peer's regions before transfers",
    errno.ENOENT: "there is no such link, transfer or armed counter",
    errno.EEXIST: "this number is taken; numbers are never reused",
    errno.EBUSY: "the slot is armed; disarm it first",
    errno.ERANGE: "a page, segment or offset lies outside its region",
    errno.ENXIO: "register the region, or watch the layer counter, first",
    errno.EMSGSIZE: f"a frame has 1 to {FRAME_NBYTES_MAX} bytes",
    errno.ENOMEM: "out of memory, or above the limit for locked memory (ulimit -l)",
}


class FabricError(Exception):
    """A call of the fabric was refused. `code` is the positive errno or libfabric code; 0: there is none."""

    def __init__(self, provider: str, call: str, reason: str, code: int = 0) -> None:
        super().__init__(f"fabric {provider}: {call}: {reason}")
        self.provider = provider
        self.call = call
        self.code = code


class Fabric:
    """One NIC group. Raises FabricError when it cannot be opened, and from every call that is refused.

    `bind_address` is a numeric IP for net, tcp and verbs; shm and efa have no use for it. Each link takes a
    port of `port_range` (inclusive; `(0, 0)`: any). `cpus` pins the progress thread.
    """

    def __init__(
        self,
        *,
        provider: str,
        bind_address: str | None,
        domain: str | None = None,
        port_range: tuple[int, int] = (0, 0),
        node_id: int,
        incarnation: int,
        spin_us: int = 50,
        cpus: Sequence[int] = (),
        name: str = "tandem",
        one_endpoint: bool = False,
    ) -> None:
        self._provider = provider
        self._regions: dict[int, mmap.mmap] = {}
        config, keep = core_config(provider, bind_address, domain, port_range, one_endpoint)
        config.node_id = node_id
        config.incarnation = incarnation
        config.spin_us = spin_us
        config.name = keep(ffi.new("char[]", name.encode()[:15]))
        if cpus:
            config.cpus = keep(ffi.new("int[]", list(cpus)))
            config.n_cpus = len(cpus)
        error = ffi.new("char[512]")
        self._core = lib.tdm_open(config, error, 512)
        if self._core == ffi.NULL:
            raise FabricError(provider, "open", text(error).removeprefix(f"{provider}: "))
        self.info = read_info(self._core)
        self.event_fd: int = lib.tdm_event_fd(self._core)
        self.bootstrap_address = self._read_bootstrap_address()
        self._event = ffi.new("tdm_event *")
        self._data = ffi.new("uint8_t[]", lib.TDM_FRAME_MAX)

    def close(self) -> None:
        """Close every link and the domain. Nothing of a peer lands and nothing is sent after it returns."""
        if self._core != ffi.NULL:
            lib.tdm_close(self._core)
            self._core = ffi.NULL

    # --- memory -----------------------------------------------------------------------------------

    def register_fd(self, region: int, fd: int, nbytes: int) -> tuple[int, int]:
        """Map and register `nbytes` of a memfd. Returns the region's own key and base.

        Register before opening links. What peers write with are the keys of `LinkOpened.regions`, which die
        with their link. The descriptor may be closed afterwards.
        """
        key, base = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self._check("register_fd", lib.tdm_register_fd(self._handle, region, fd, nbytes, key, base))
        self._regions[region] = mmap.mmap(fd, nbytes)
        return key[0], base[0]

    def region_memory(self, region: int) -> memoryview:
        """The region's bytes, shared with whoever holds the memfd."""
        return memoryview(self._regions[region])

    # --- links ------------------------------------------------------------------------------------

    def bootstrap_send(self, address: bytes, frame: bytes) -> None:
        """Best effort, unauthenticated."""
        self._check(
            "bootstrap_send",
            lib.tdm_bootstrap_send(self._handle, address, len(address), frame, len(frame)),
        )

    def link_open(self, link: int) -> None:
        """Answered by LinkOpened or LinkFailed."""
        self._check("link_open", lib.tdm_link_open(self._handle, link))

    def link_connect(self, link: int, address: bytes, key: bytes, initiator: bool) -> None:
        """Name the peer and the 32-byte session key that seals frames. `initiator` is the side that sent
        HELLO.
        """
        if len(key) != lib.TDM_KEY_NBYTES:
            raise ValueError(f"a session key has {lib.TDM_KEY_NBYTES} bytes, not {len(key)}")
        self._check(
            "link_connect", lib.tdm_link_connect(self._handle, link, address, len(address), key, initiator)
        )

    def link_regions(self, link: int, regions: Sequence[tuple[int, int, int]]) -> None:
        """The peer's regions as `(key, base, nbytes)`, index = its region number."""
        array = ffi.new("tdm_remote_region[]", [tuple(region) for region in regions])
        self._check("link_regions", lib.tdm_link_regions(self._handle, link, array, len(regions)))

    def link_send(self, link: int, frame: bytes) -> bool:
        """Queue one frame; the core seals it. False when the link's queue is full."""
        code = lib.tdm_link_send(self._handle, link, frame, len(frame))
        if code == -errno.ENOBUFS:
            return False
        self._check("link_send", code)
        return True

    def link_set_pong(self, link: int, body: bytes) -> None:
        """What answers this link's PINGs from now on, with its age."""
        self._check("link_set_pong", lib.tdm_link_set_pong(self._handle, link, body, len(body)))

    def link_close(self, link: int) -> None:
        """Post nothing more on the link, and close it. Answered by OutDrained for each of its transfers, then
        LinkClosed.
        """
        self._check("link_close", lib.tdm_link_close(self._handle, link))

    def link_health(self, link: int) -> tuple[int, int]:
        """`(when the peer was last heard, round trip of the last PING)` in ns; 0: never."""
        heard, rtt = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self._check("link_health", lib.tdm_link_health(self._handle, link, heard, rtt))
        return heard[0], rtt[0]

    # --- incoming transfers -----------------------------------------------------------------------

    def counter_arm(self, slot: int, gen: int, expected: int) -> None:
        """Count immediates of `(slot, gen)` from now on. Answered by CountReached; at once when `expected` is
        0.
        """
        self._check("counter_arm", lib.tdm_counter_arm(self._handle, slot, gen, expected))

    def counter_expect(self, slot: int, gen: int, expected: int) -> None:
        """Change the expectation; CountReached comes (again) when the count equals it."""
        self._check("counter_expect", lib.tdm_counter_expect(self._handle, slot, gen, expected))

    def counter_read(self, slot: int, gen: int) -> int:
        count: int = lib.tdm_counter_read(self._handle, slot, gen)
        return count

    def counter_disarm(self, slot: int, gen: int) -> None:
        self._check("counter_disarm", lib.tdm_counter_disarm(self._handle, slot, gen))

    # --- outgoing transfers -----------------------------------------------------------------------

    def out_begin(
        self, transfer: int, link: int, immediate: int, geometry: Geometry, segments: Sequence[Segment]
    ) -> None:
        """Declare a transfer. It ends with exactly one OutDrained."""
        self._check(
            "out_begin",
            lib.tdm_out_begin(
                self._handle,
                transfer,
                link,
                immediate,
                c_geometry(geometry),
                c_segments(segments),
                len(segments),
            ),
        )

    def out_post(self, item: PlanItem) -> None:
        """Write pages that are valid in every layer already."""
        items, _keep = c_plan_items([item])
        self._check("out_post", lib.tdm_out_post(self._handle, items))

    def plan_publish(self, base: int, items: Sequence[PlanItem]) -> None:
        """Before a step: write layer `l` of the items when the layer counter reaches `base + l + 1`."""
        c_items, _keep = c_plan_items(items)
        self._check("plan_publish", lib.tdm_plan_publish(self._handle, base, c_items, len(items)))

    def plan_abort(self, base: int) -> None:
        """Nothing more of that plan is posted once this returns."""
        self._check("plan_abort", lib.tdm_plan_abort(self._handle, base))

    def out_stop(self, transfer: int) -> None:
        """Nothing more of the transfer is posted once this returns; OutDrained follows."""
        self._check("out_stop", lib.tdm_out_stop(self._handle, transfer))

    def out_write(
        self,
        transfer: int,
        immediate: int,
        source_region: int,
        source_offset: int,
        target_region: int,
        target_offset: int,
        nbytes: int,
    ) -> None:
        """One write outside the pages, counted with the transfer. Call it before the item that is marked
        last.
        """
        self._check(
            "out_write",
            lib.tdm_out_write(
                self._handle,
                transfer,
                immediate,
                source_region,
                source_offset,
                target_region,
                target_offset,
                nbytes,
            ),
        )

    # --- what the progress thread watches ---------------------------------------------------------

    def watch_counter(self, memfd: int, eventfd: int) -> None:
        """The layer counter that plans wait for. `eventfd` -1: its writer signals nothing, so it is polled
        while a plan is pending.
        """
        self._check("watch_counter", lib.tdm_watch_counter(self._handle, memfd, eventfd))

    def watch_process(self, link: int, pid: int, start_time: int) -> bool:
        """Answered by ProcessGone. False: gone already, or the pid belongs to another process now."""
        code = lib.tdm_watch_process(self._handle, link, pid, start_time)
        if code == -errno.ESRCH:
            return False
        self._check("watch_process", code)
        return True

    # --- reports ----------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """All events since the last call, oldest first."""
        events: list[Event] = []
        while lib.tdm_next_event(self._handle, self._event, self._data, lib.TDM_FRAME_MAX):
            events.append(self._convert(self._event, bytes(ffi.buffer(self._data, self._event.data_nbytes))))
        return events

    def stats(self) -> FabricStats:
        return read_stats(self._handle)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _handle(self) -> Any:  # an opaque C pointer
        if self._core == ffi.NULL:
            raise FabricError(self._provider, "call", "the fabric is closed")
        return self._core

    def _check(self, call: str, code: int) -> None:
        if code >= 0:
            return
        reason = text(lib.tdm_strerror(code))
        advice = _ADVICE.get(-code)
        raise FabricError(self._provider, call, f"{reason}; {advice}" if advice else reason, -code)

    def _read_bootstrap_address(self) -> bytes:
        address, nbytes = ffi.new("uint8_t[]", lib.TDM_ADDRESS_MAX), ffi.new("size_t *", lib.TDM_ADDRESS_MAX)
        self._check("bootstrap_address", lib.tdm_bootstrap_address(self._core, address, nbytes))
        return bytes(ffi.buffer(address, nbytes[0]))

    def _convert(self, event: Any, data: bytes) -> Event:
        """`event` is a C tdm_event."""
        match event.type:
            case lib.TDM_EV_BOOTSTRAP:
                return BootstrapFrame(data)
            case lib.TDM_EV_LINK_OPEN:
                address, regions = data[: event.count], data[event.count :]
                return LinkOpened(
                    event.link, address, tuple(map(GrantedRegion._make, _GRANT.iter_unpack(regions)))
                )
            case lib.TDM_EV_LINK_FAILED:
                return LinkFailed(event.link, event.code, data.decode("utf-8", "replace"))
            case lib.TDM_EV_LINK_CLOSED:
                return LinkClosed(event.link)
            case lib.TDM_EV_FRAME:
                return Frame(event.link, data, event.time_ns)
            case lib.TDM_EV_COUNT:
                return CountReached(event.slot, event.gen, event.count, event.time_ns)
            case lib.TDM_EV_OUT_DRAINED:
                return OutDrained(
                    transfer=event.transfer,
                    link=event.link,
                    link_closed=bool(event.link_closed),
                    posted=event.posted,
                    completed=event.completed,
                    failed=event.failed,
                    nbytes=event.nbytes,
                    hidden_nbytes=event.hidden_nbytes,
                    first_post_ns=event.first_post_ns,
                    last_layer_ns=event.last_layer_ns,
                    last_completion_ns=event.last_completion_ns,
                    time_ns=event.time_ns,
                )
            case lib.TDM_EV_PROCESS_GONE:
                return ProcessGone(event.link)
            case lib.TDM_EV_FATAL:
                return Fatal(event.code, data.decode("utf-8", "replace"))
        raise AssertionError(f"event type {event.type}")


def core_config(
    provider: str,
    bind_address: str | None,
    domain: str | None,
    port_range: tuple[int, int],
    one_endpoint: bool = False,
) -> tuple[Any, Any]:
    """A C `tdm_config *`, and `keep`, which ties a C object's life to it."""
    low, high = port_range
    if not 0 <= low <= high <= 0xFFFF or (low == 0) != (high == 0):
        raise FabricError(
            provider, "open", f"port range {low}-{high}: give two ports, low before high, or 0-0 for any"
        )
    config = ffi.new("tdm_config *")
    kept: list[Any] = [config]

    def keep(value: Any) -> Any:
        kept.append(value)
        return value

    config.provider = keep(ffi.new("char[]", provider.encode()))
    config.bind_address = keep(ffi.new("char[]", bind_address.encode())) if bind_address else ffi.NULL
    config.domain = keep(ffi.new("char[]", domain.encode())) if domain else ffi.NULL
    config.port_low, config.port_high = low, high
    config.one_endpoint = one_endpoint
    return config, keep
