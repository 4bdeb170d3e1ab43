"""Show that the deployment is coming up: a redrawn line on a terminal, a line for each quarter elsewhere.

Knows: how to print. Does not know: what is waited for; it is given lines.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .supervisor import Worker


class Progress:
    """Writes to stderr, so that what is asked for is alone on stdout."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._terminal = self._stream.isatty()
        self._begin = time.monotonic()
        self._shown: dict[str, int] = {}

    def note(self, text: str) -> None:
        self._clear()
        print(f"[{time.monotonic() - self._begin:5.1f} s] {text}", file=self._stream, flush=True)

    def workers(self, workers: Iterable[Worker]) -> None:
        """One picture of all workers."""
        states = {worker.plan.name: _percent(worker) for worker in workers if not _ended(worker)}
        if self._terminal:
            line = "  ".join(f"{name} {_word(value)}" for name, value in states.items())
            self._clear()
            self._stream.write(line[:200])
            self._stream.flush()
            return
        for name, value in states.items():
            quarter = value // 25 * 25
            if self._shown.get(name) != quarter:
                self._shown[name] = quarter
                self.note(f"{name}: {_word(quarter)}")

    def _clear(self) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")


def _ended(worker: Worker) -> bool:
    return worker.process is not None and worker.process.returncode is not None


def _percent(worker: Worker) -> int:
    """-1 before the process listens, 0 to 99 while the model loads, 100 ready."""
    if worker.ready:
        return 100
    return min(99, int(worker.progress * 100)) if worker.addresses is not None else -1


def _word(percent: int) -> str:
    if percent < 0:
        return "starting"
    return "ready" if percent >= 100 else f"loading {percent} %"
