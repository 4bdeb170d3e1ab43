"""Fetch a model of a hub before the worker starts: an init container's command.

Knows: when a directory is whole, how far a download is. Does not know: the hub (`hub.py`).

A directory that is whole says so by a file, and is left alone: a pod that starts again, or a second pod with
the same cache volume, needs no network. Pods that share a volume take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.model_config import CheckpointError
from .hub import download, missing_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = ".tandem-whole"
PROGRESS_S = 10.0

log = logging.getLogger("tandem_runtime.models.fetch")


def fetch(uri: str, commit: str, into: Path) -> None:
    """`into` holds the whole model. Raises CheckpointError."""
    if (into / WHOLE).is_file():
        log.info("%s is in %s already", uri, into)
        return
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        with (into.parent / f".{into.name}.lock").open("w") as lock:
            _turn(lock.fileno(), into)
            if (into / WHOLE).is_file():
                log.info("%s was fetched by another pod", uri)
                return
            began, total = time.monotonic(), missing_nbytes(uri, commit, into)
            log.info("fetching %s at %s: %.2f GB into %s", uri, commit, total / 1e9, into)
            with _progress(into, total):
                download(uri, commit, into)
            (into / WHOLE).write_text(f"{uri} {commit}\n")
    except OSError as error:
        raise CheckpointError(f"{into}: {error.strerror or error}") from error
    took = time.monotonic() - began
    log.info("fetched %.2f GB in %.0f s (%.0f MB/s)", total / 1e9, took, total / 1e6 / max(took, 1e-3))


def _turn(lock: int, into: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("another pod fetches into %s: waiting for it", into)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        # Some network file systems have no locks. Two downloads of the same files cost time, nothing else.
        log.warning("%s: locks are not supported here (%s)", into.parent, error.strerror)


@contextlib.contextmanager
def _progress(into: Path, total: int) -> Iterator[None]:
    """A line every few seconds, by the sizes on disk."""
    done, before = threading.Event(), _disk_nbytes(into)

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            got = min(total, max(0, _disk_nbytes(into) - before))
            log.info("fetched %.2f of %.2f GB (%.0f%%)", got / 1e9, total / 1e9, 100 * got / max(total, 1))

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _disk_nbytes(directory: Path) -> int:
    """As the disk has it: a client may reserve a file's whole length at once."""
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_blocks * 512
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tandem_runtime.models.fetch", description=__doc__)
    parser.add_argument("uri", help="hf://ORG/NAME")
    parser.add_argument("--revision", required=True, metavar="COMMIT", help="as `tandem inspect` resolved it")
    parser.add_argument("--into", required=True, type=Path, metavar="DIR")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        fetch(arguments.uri, arguments.revision, arguments.into)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
