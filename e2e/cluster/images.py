"""Images without a registry: archives that containerd imports.

Knows: the OCI archive format with one uncompressed layer, Debian's bootstrap, the cache. Does not know: pods.

    pause   what holds a pod's namespaces: a static C program
    base    Debian with python3 and libfabric, what a pod of Tandem needs beside its Python environment
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from .commands import ClusterError, run, say
from .layout import cache
from .node import PAUSE_IMAGE

BASE_IMAGE = "localhost/tandem-e2e/base:1"
_SUITE = "bookworm"
_PACKAGES = ("python3", "libfabric1", "ca-certificates")
_UNNEEDED = (
    *("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/i18n"),
    *("var/cache/apt", "var/lib/apt/lists", "var/log"),
)
_PAUSE = """
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int s) { exit(0); }
static void reap(int s) { while (waitpid(-1, 0, WNOHANG) > 0); }
int main(void) {
  struct sigaction children = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
  signal(SIGINT, end);
  signal(SIGTERM, end);
  sigaction(SIGCHLD, &children, 0);
  for (;;) pause();
}
"""


def ensure() -> list[Path]:
    """The archives that every node starts with. Raises ClusterError."""
    recipe = json.dumps([_SUITE, _PACKAGES, _UNNEEDED, _PAUSE])
    made = cache() / f"images-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            part = made.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            _make_pause(part / "pause.tar")
            say("making the pods' base image with debootstrap, once")
            make_base(part / "base", part / "base.tar")
            part.rename(made)
            say(f"base image: {(made / 'base.tar').stat().st_size >> 20} MB")
    return [made / "pause.tar", made / "base.tar"]


def base_tree() -> Path:
    """The base image's root file system, for building images on it."""
    return ensure()[1].with_name("base")


def _make_pause(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as tree:
        source = Path(tree, "pause.c")
        source.write_text(_PAUSE)
        run("cc", "-Os", "-static", "-s", "-o", Path(tree, "pause"), source)
        source.unlink()
        write_archive(Path(tree), archive, PAUSE_IMAGE, ["/pause"])


def make_base(tree: Path, archive: Path) -> None:
    run(
        *("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, tree, _mirror()),
        timeout=900,
    )
    for unneeded in _UNNEEDED:
        shutil.rmtree(tree / unneeded, ignore_errors=True)
        (tree / unneeded).mkdir(parents=True)
    write_archive(tree, archive, BASE_IMAGE, [])


def _mirror() -> str:
    """This machine's own Debian mirror: what apt can reach, debootstrap can."""
    for file in sorted(Path("/etc/apt").glob("sources.list.d/*.sources")):
        for line in file.read_text().splitlines():
            if line.startswith("URIs:"):
                return line.split()[1]
    for file in (Path("/etc/apt/sources.list"), *Path("/etc/apt").glob("sources.list.d/*.list")):
        for line in file.read_text().splitlines() if file.exists() else ():
            if line.startswith("deb "):
                return next(word for word in line.split() if "://" in word)
    return "http://deb.debian.org/debian"


def write_archive(tree: Path, archive: Path, name: str, entrypoint: list[str]) -> None:
    """An OCI image archive of `tree`, owners and modes as they are. Raises ClusterError."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as directory:
        blobs = Path(directory, "blobs", "sha256")
        blobs.mkdir(parents=True)

        def blob(document: dict[str, object]) -> dict[str, object]:
            data = json.dumps(document).encode()
            digest = hashlib.sha256(data).hexdigest()
            (blobs / digest).write_bytes(data)
            return {"digest": f"sha256:{digest}", "size": len(data)}

        layer = Path(directory, "layer.tar")
        packed = subprocess.run(
            ["tar", "--numeric-owner", "--xattrs", "--sort=name", "-C", tree, "-cf", layer, "."], check=False
        )
        if packed.returncode:
            raise ClusterError(f"tar of {tree} failed")
        with layer.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        size = layer.stat().st_size
        layer.rename(blobs / digest)
        config = blob(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {
                    "Entrypoint": entrypoint,
                    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                    "WorkingDir": "/",
                },
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            }
        )
        oci = "application/vnd.oci.image"
        manifest = blob(
            {
                "schemaVersion": 2,
                "mediaType": f"{oci}.manifest.v1+json",
                "config": {"mediaType": f"{oci}.config.v1+json", **config},
                "layers": [{"mediaType": f"{oci}.layer.v1.tar", "digest": f"sha256:{digest}", "size": size}],
            }
        )
        named = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        }
        entry = {"mediaType": f"{oci}.manifest.v1+json", **manifest, "annotations": named}
        Path(directory, "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        Path(directory, "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
        with tarfile.open(archive, "w") as tar:
            for member in ("oci-layout", "index.json", "blobs"):
                tar.add(Path(directory, member), arcname=member)
