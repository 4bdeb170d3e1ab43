"""Who may use the API: bearer tokens from a file, read again when it changes."""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("tandem.router")


class ApiKeysError(Exception):
    """The file cannot be read, or there is no key in it: one line that says which."""


class ApiKeys:
    """One key per line; blank lines are nothing. Once loaded, a file that went bad changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._keys = _read(path)

    def allow(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header carries one of the keys; its time says nothing about which."""
        self._refresh()
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        token = given.strip().encode()
        matches = [hmac.compare_digest(key, token) for key in self._keys]
        return any(matches)

    def _refresh(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._keys = _read(self._path)
        except ApiKeysError as error:
            log.warning("%s; the keys known so far stay valid", error)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise ApiKeysError(f"API keys {path}: {error.strerror}") from error
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read(path: Path) -> list[bytes]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ApiKeysError(f"API keys {path}: {error.strerror}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ApiKeysError(f"API keys {path}: there is no key in it; put one on each line")
    return keys
