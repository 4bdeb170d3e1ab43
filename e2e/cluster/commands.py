"""Running commands, and saying how far a long piece of work is."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_START = time.monotonic()


class ClusterError(Exception):
    """The cluster cannot be made, or a command failed. Says what to do."""


def say(text: str) -> None:
    print(f"{time.monotonic() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


def run(
    *command: str | Path, input: str | None = None, env: Mapping[str, str] | None = None, timeout: float = 600
) -> str:
    """The command's standard output. Raises ClusterError with the end of its standard error."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, input=input, env=env, timeout=timeout, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]} is not installed") from error
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise ClusterError(f"{' '.join(words[:6])} …: exit {done.returncode}\n{tail}")
    return done.stdout


def succeeds(*command: str | Path) -> bool:
    return subprocess.run([str(word) for word in command], capture_output=True, check=False).returncode == 0


class Wait:
    """`while wait.again(reason)`: sleeps a little; raises ClusterError with the last reason at the end."""

    def __init__(self, seconds: float, what: str, pause: float = 0.1) -> None:
        self._end, self._what, self._pause = time.monotonic() + seconds, what, pause
        self._seconds = seconds

    def again(self, reason: object = "") -> bool:
        if time.monotonic() > self._end:
            raise ClusterError(f"{self._what}: not within {self._seconds:.0f} s: {reason}")
        time.sleep(self._pause)
        return True
