"""Who exists, from a JSON file that its writer replaces atomically: what EndpointSlices are in a cluster."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from .instance import Addresses, PeerFile

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("tandem.peers")


class PeerFileSource:
    """Every worker of the deployment. The file is read again when it has changed."""

    fault = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._workers: list[Addresses] | None = None

    def read(self) -> list[Addresses] | None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self._workers = msgspec.json.decode(self._path.read_bytes(), type=PeerFile).workers
                self._stamp = stamp
        except FileNotFoundError:
            pass  # not written yet, or its writer is gone
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("peers %s: %s; the last list stands", self._path, error)
        return self._workers

    async def follow(self) -> None:
        await asyncio.Event().wait()  # `read` looks for itself
