"""The run directory of a killed run goes with the next one; a living run's stays."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tandem_runtime.process import start_time
from tandem_runtime.up.run_directory import OWNER, PREFIX, sweep

if TYPE_CHECKING:
    from pathlib import Path


def left_by(parent: Path, name: str, pid: int, started: int) -> Path:
    path = parent / f"{PREFIX}{name}"
    (path / "keys").mkdir(parents=True)
    (path / OWNER).write_text(f"{pid} {started}")
    return path


def test_what_a_killed_run_left_is_removed_and_a_living_ones_stays(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_time(child.pid)
    child.kill()
    child.communicate()
    dead = left_by(tmp_path, "dead", child.pid, started)
    reused = left_by(tmp_path, "reused", os.getpid(), start_time(os.getpid()) - 1)
    living = left_by(tmp_path, "living", os.getpid(), start_time(os.getpid()))
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()
    sweep(tmp_path)
    assert not dead.exists()
    assert not reused.exists()
    assert living.exists()
    assert young.exists(), "its owner has not written its name yet"
