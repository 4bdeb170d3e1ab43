"""What the C core tells its caller, one frozen dataclass for each kind.

Knows: links, transfers and slots by number. Does not know: peers, requests. Times are CLOCK_MONOTONIC in ns;
0 means never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class GrantedRegion(NamedTuple):
    """What one link's peer needs to write into one of our regions. The key dies with the link."""

    key: int
    base: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BootstrapFrame:
    """From anyone, not authenticated."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """`address` goes to the peer in HELLO or its answer, `regions`, by region number, in ATTACH."""

    link: int
    address: bytes
    regions: tuple[GrantedRegion, ...]


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """The link could not be opened or connected. It must still be closed."""

    link: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """No write of the peer lands through this link any more; see `FabricInfo` for what that proves on this
    provider.
    """

    link: int


@dataclass(frozen=True, slots=True)
class Frame:
    """An authenticated frame of the link's peer, without its MAC."""

    link: int
    frame: bytes
    time_ns: int


@dataclass(frozen=True, slots=True)
class CountReached:
    """The slot's count equals its expectation."""

    slot: int
    gen: int
    count: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class OutDrained:
    """Nothing more of the transfer will be posted, and what was posted has ended: completed, failed, or with
    `link_closed` unknown.

    `last_layer_ns` is when the last layer of its last plan item was seen done, `hidden_nbytes` what had
    crossed by then, behind the compute. `failed > 0` means the transfer stopped by itself.
    """

    transfer: int
    link: int
    link_closed: bool
    posted: int
    completed: int
    failed: int
    nbytes: int
    hidden_nbytes: int
    first_post_ns: int
    last_layer_ns: int
    last_completion_ns: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """The process watched for this link has ended; a stopped one has not."""

    link: int


@dataclass(frozen=True, slots=True)
class Fatal:
    """The fabric is unusable and must be closed."""

    code: int
    text: str


Event = (
    BootstrapFrame
    | LinkOpened
    | LinkFailed
    | LinkClosed
    | Frame
    | CountReached
    | OutDrained
    | ProcessGone
    | Fatal
)
