"""The private directory of one run: sockets, the peer key, logs. What killed runs have left, the next one
removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..process import start_time

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "tandem-up-"
OWNER = "owner"  # holds "PID START_TIME", which together name one process for ever


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A new directory that only this user can enter, removed at the end."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        path = Path(name)
        (path / OWNER).write_text(f"{os.getpid()} {start_time(os.getpid())}")
        yield path


def sweep(parent: Path) -> None:
    """Removes the directories below `parent` whose owner is gone; other users' are left alone."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            pid, started = map(int, (path / OWNER).read_text().split())
            try:
                alive = start_time(pid) == started
            except ProcessLookupError:
                alive = False
            if not alive and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
