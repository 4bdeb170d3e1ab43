"""What a fabric is, and what it has done so far: facts and counters copied out of the C core.

Knows: the fields of `tdm_info` and `tdm_stats`. Does not know: how to open a fabric.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _core

ffi, lib = _core.ffi, _core.lib


@dataclass(frozen=True, slots=True)
class FabricInfo:
    """What was opened. `close_fences_target`, `close_fences_source`: whether LinkClosed proves that the peer
    writes no more, and that our memory is read no more.
    """

    provider: str
    fabric: str
    domain: str
    version: str
    has_wait_fd: bool
    virtual_address: bool
    provider_keys: bool
    delivery_complete: bool
    immediate_nbytes: int
    one_endpoint: bool
    close_fences_target: bool
    close_fences_source: bool
    max_message: int
    max_write: int
    tx_window: int


@dataclass(frozen=True, slots=True)
class FabricStats:
    """Counters since the fabric was opened; the last four are levels or times. See csrc/tandem_fabric.h."""

    writes_posted: int
    writes_completed: int
    writes_failed: int
    bytes_posted: int
    immediates: int
    immediates_stale: int
    immediates_unknown: int
    frames_sent: int
    frames_received: int
    frames_rejected: int
    pings_answered: int
    cq_errors: int
    eagain: int
    links_open: int
    transfers_open: int
    plans_pending: int
    sleeps: int
    wakeups: int
    thread_cpu_ns: int


def read_info(core: Any) -> FabricInfo:
    """`core` is a C tdm_core."""
    raw = ffi.new("tdm_info *")
    lib.tdm_get_info(core, raw)
    return FabricInfo(
        provider=text(raw.provider),
        fabric=text(raw.fabric),
        domain=text(raw.domain),
        version=text(raw.version),
        has_wait_fd=bool(raw.has_wait_fd),
        virtual_address=bool(raw.virtual_address),
        provider_keys=bool(raw.provider_keys),
        delivery_complete=bool(raw.delivery_complete),
        immediate_nbytes=raw.immediate_nbytes,
        one_endpoint=bool(raw.one_endpoint),
        close_fences_target=bool(raw.close_fences_target),
        close_fences_source=bool(raw.close_fences_source),
        max_message=raw.max_message,
        max_write=raw.max_write,
        tx_window=raw.tx_window,
    )


def read_stats(core: Any) -> FabricStats:
    """`core` is a C tdm_core."""
    raw = ffi.new("tdm_stats *")
    lib.tdm_get_stats(core, raw)
    return FabricStats(**{name: getattr(raw, name) for name in FabricStats.__dataclass_fields__})


def text(c_string: Any) -> str:
    """A C string; the core writes ASCII, libfabric's own messages too."""
    return bytes(ffi.string(c_string)).decode("utf-8", "replace")
