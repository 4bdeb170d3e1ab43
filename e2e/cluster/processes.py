"""The daemons on the host: started away from the terminal, known by pid and start time, ended by both.

Knows: files `processes/NAME` ("pid start-time"). Does not know: what the daemons are. A pid that another
process has taken since is never signalled.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from .commands import ClusterError, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .layout import Layout


def spawn(layout: Layout, name: str, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
    """It outlives this process, and nobody waits for it: so no `Popen`, which wants to be waited for."""
    words = [str(word) for word in command]
    log = os.open(layout.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        pid = os.posix_spawnp(
            words[0],
            words,
            {**os.environ, **(env or {})},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(log)
    (layout.processes / name).write_text(f"{pid} {start_time(pid)}")


def start_time(pid: int) -> str:
    """In clock ticks since boot; empty if the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def pid_of(layout: Layout, name: str) -> int | None:
    """Of a running daemon."""
    try:
        pid, started = (layout.processes / name).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if start_time(int(pid)) == started else None


def names(layout: Layout) -> list[str]:
    return sorted(file.name for file in layout.processes.iterdir()) if layout.processes.is_dir() else []


def must_run(layout: Layout, name: str) -> None:
    """Raises ClusterError with the end of the log if it has ended."""
    if pid_of(layout, name) is None:
        log = layout.logs / f"{name}.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:]) if log.exists() else "no log"
        raise ClusterError(f"{name} has ended; the end of {log}:\n{tail}")


def end(layout: Layout, name: str, number: int = signal.SIGKILL) -> None:
    pid = pid_of(layout, name)
    if pid is not None:
        os.kill(pid, number)
        wait = Wait(15, f"the end of {name}", pause=0.02)
        while pid_of(layout, name) is not None:
            wait.again()
    (layout.processes / name).unlink(missing_ok=True)


def pause(layout: Layout, name: str, stopped: bool) -> None:
    """Stop or continue, as a network does that goes mute."""
    must_run(layout, name)
    pid = pid_of(layout, name)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
