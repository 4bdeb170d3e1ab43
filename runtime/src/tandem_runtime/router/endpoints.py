"""Who exists: the workers that answer the API. Read from a file; EndpointSlices fit the same protocol."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..instance import Addresses, PeerFile

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("tandem.router")


class EndpointSource(Protocol):
    """`read` is cheap and never fails: while the source cannot be asked, its last answer stands."""

    def read(self) -> list[Addresses] | None:
        """Every worker that answers the API; None before the first answer of the source."""
        ...


class PeerFileSource:
    """A JSON `PeerFile` that its writer replaces atomically; read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._servers: list[Addresses] | None = None

    def read(self) -> list[Addresses] | None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                peers = msgspec.json.decode(self._path.read_bytes(), type=PeerFile)
                self._servers = [worker for worker in peers.workers if worker.server]
                self._stamp = stamp
        except FileNotFoundError:
            pass  # not written yet, or its writer is gone
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("peers %s: %s; the last list stands", self._path, error)
        return self._servers
