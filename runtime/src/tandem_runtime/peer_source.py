"""Who exists: what every source of workers has in common, and which one this process has.

tandem up    a JSON file          `peer_file.py`
a cluster    EndpointSlices       `endpoint_slices.py`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .instance import Addresses


class PeerSource(Protocol):
    """`read` is cheap and never fails: while the source cannot be asked, its last answer stands."""

    @property
    def fault(self) -> str:
        """Why the source cannot be asked now; empty if it can."""
        ...

    def read(self) -> list[Addresses] | None:
        """Every worker of the deployment; None before the first answer of the source."""
        ...

    async def follow(self) -> None:
        """Keeps the answer current until cancelled."""
        ...


def peer_source(file: str | Path, selector: str) -> PeerSource:
    """By file if one is named, else by label selector from inside a pod. Raises ValueError."""
    if file:
        from .peer_file import PeerFileSource

        return PeerFileSource(Path(file))
    if selector:
        from .endpoint_slices import ClusterAccess, EndpointSliceSource

        return EndpointSliceSource(ClusterAccess.of_pod(), selector)
    raise ValueError("no source of peers: a file (--peers, TANDEM_PEERS) or TANDEM_PEER_SELECTOR is needed")
