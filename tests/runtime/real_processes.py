"""What tests of real processes share: a tiny model's manifest, the tree below a process, waiting."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

POLL_S = 0.02


def manifest(
    model_dir: Path,
    *,
    name: str = "tiny",
    prefill: int = 1,
    decode: int = 1,
    chunk: int = 512,
    memory: str = "16Mi",
) -> dict[str, Any]:
    """`chunk`: the most tokens of a prompt that prefill computes in one step."""
    return {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": f"file://{model_dir}"},
            "accelerator": {"type": "CPU"},
            "fabric": {"profile": "tcp"},
            "prefill": {"replicas": prefill, "engine": {"maxBatchedTokens": chunk, "kvCacheMemory": memory}},
            "decode": {"replicas": decode, "engine": {"kvCacheMemory": memory}},
        },
    }


def write_manifest(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def children(pid: int) -> list[int]:
    """Empty when the process is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def module_of(pid: int) -> str:
    """The last part of the module that runs there, by `python -m tandem_runtime.process MODULE ...`."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("tandem_runtime.process") + 1].rpartition(".")[2]


def running(pid: int) -> bool:
    """A zombie has ended: only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, within_s: float = 30.0) -> None:
    """Fails the test when `condition` does not come true."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        if holds:
            return
        if loop.time() > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what}")
        await asyncio.sleep(POLL_S)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)
