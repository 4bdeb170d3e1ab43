"""The binaries, built from the Go module in tools/ and kept by the hash of what they are built from.

Knows: the build and its cache. Does not know: how a binary is used.

From nothing on 2 cores: about 12 s of download, 5 to 8 minutes of compiling, 670 MB kept. The Go build cache
(3.4 GB) and module cache (0.9 GB) are not needed afterwards.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .commands import ClusterError, run, say
from .layout import cache

if TYPE_CHECKING:
    from collections.abc import Iterable

MODULE = Path(__file__).with_name("tools")
KUBERNETES = "v1.36.3"  # as in go.mod
_PACKAGES = ("./cmd/coredns", "tool")


def directory() -> Path:
    """Of the binaries, whether built or not."""
    content = hashlib.sha256()
    for file in ("go.mod", "go.sum", "cmd/coredns/main.go"):
        content.update((MODULE / file).read_bytes())
    return cache() / f"tools-{content.hexdigest()[:12]}"


def ensure() -> Path:
    """The directory of the built binaries. Raises ClusterError."""
    built = directory()
    if built.is_dir():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_dir():
            _build(built)
    return built


def _build(built: Path) -> None:
    if shutil.which("go") is None:
        raise ClusterError(
            "Go is not installed, and Kubernetes is built from its modules: install Go 1.21 or later "
            "(it fetches the version that go.mod names)"
        )
    part = built.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    say("building etcd, Kubernetes, kwok, helm and CoreDNS from Go modules, once")
    _go("mod", "download")
    total = len(_go("list", "-deps", *_PACKAGES).split())
    flags = [
        *("-X", f"k8s.io/component-base/version.gitVersion={KUBERNETES}"),
        *("-X", f"k8s.io/component-base/version.gitMajor={KUBERNETES[1:].split('.')[0]}"),
        *("-X", f"k8s.io/component-base/version.gitMinor={KUBERNETES.split('.')[1]}"),
        *("-X", f"k8s.io/client-go/pkg/version.gitVersion={KUBERNETES}"),
    ]
    command = ["go", "build", "-v", "-trimpath", "-ldflags", f"-s -w {' '.join(flags)}"]
    with subprocess.Popen(
        [*command, "-o", f"{part}/", *_PACKAGES],
        cwd=MODULE,
        env=_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as build:
        assert build.stderr is not None
        output = _follow(build.stderr, total)
    if build.returncode:
        raise ClusterError("go build failed:\n" + "\n".join(output[-8:]))
    (part / "server").rename(part / "etcd")  # etcd's main package is named so
    part.rename(built)
    say(f"built: {sum(file.stat().st_size for file in built.iterdir()) >> 20} MB in {built}")


def _follow(lines: Iterable[str], total: int) -> list[str]:
    """Shows how many packages are compiled: one line that is written over, or one every 20 s."""
    seen: list[str] = []
    interactive, told = sys.stderr.isatty(), time.monotonic()
    for line in lines:
        seen.append(line.rstrip())
        text = f"compiled {len(seen)} of about {total} packages"
        if interactive:
            print(f"\r          {text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() > told + 20:
            told = time.monotonic()
            say(text)
    if interactive:
        print(file=sys.stderr)
    return seen


def _go(*words: str) -> str:
    return run("go", "-C", MODULE, *words, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
