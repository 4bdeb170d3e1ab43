"""Processes that never outlive whoever started them, however that one dies.

    python -m tandem_runtime.process MODULE [ARGUMENT ...]

A child is started through this module, which calls `die_with_parent()` before MODULE and what it imports
(torch takes seconds) is even read: from then on the kernel kills it when the parent's starting
thread ends. Between fork and that call the parent may already be gone; so the parent puts its own pid into
the environment and the child compares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PARENT_PID = "TANDEM_PARENT_PID"
PR_SET_PDEATHSIG = 1
TERMINATION_LOG_NBYTES = 4096  # what the kubelet reads of it


def child_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment to start a child with: ours, `extra`, and our pid for `die_with_parent`."""
    return {**os.environ, **(extra or {}), PARENT_PID: str(os.getpid())}


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` in a child that dies with us."""
    return [sys.executable, "-m", "tandem_runtime.process", module, *arguments]


def die_with_parent() -> None:
    """Be killed when the parent dies. Does nothing when no parent of ours started this process."""
    parent = os.environ.get(PARENT_PID)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        sys.exit("the parent process is gone")


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat, clock ticks since boot: with the pid it names one process for ever. Raises
    ProcessLookupError.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    return int(stat.rpartition(")")[2].split()[19])


def boot_id() -> str:
    """Equal on two sides: they share a kernel, so also its monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def rss_nbytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


TERMINATION_LOG = Path("/dev/termination-log")


def last_words(error: object) -> None:
    """One line on standard error and, in a container, where the kubelet reads why it ended. Of a pod's
    processes the first to speak names the cause: what the others say is its echo.
    """
    print(f"error: {error}", file=sys.stderr)
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.stat().st_size == 0:
            TERMINATION_LOG.write_text(str(error)[:TERMINATION_LOG_NBYTES])


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
