"""What a router is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Workers come from `peers`, a `PeerFile`, or from the EndpointSlices with labels `selector`. `api_keys`
    is a file with one key per line, without which all may ask.
    """

    peers: Path | None = None
    selector: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    api_keys: Path | None = None
    max_body_nbytes: int = 16 << 20
    poll_s: float = 1.0  # between questions to a worker that serves
    poll_unready_s: float = 0.25  # and to one that does not yet: a start should not wait for the slow tick
    poll_timeout_s: float = 2.0
    connect_timeout_s: float = 2.0
    drain_s: float = 30.0  # for open streams after SIGTERM
