"""Bring a deployment up for one measurement, as `tandem up` would, and take it down.

Knows: manifests, workers, their processes and what CPU these have used. Does not know: what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tandem_crds.model import load_manifest
from tandem_runtime import process
from tandem_runtime.cli.inspect import model_facts, resolve
from tandem_runtime.up.deployment import plan_workers
from tandem_runtime.up.supervisor import Supervisor

from .figures import samples

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tandem_runtime.up.supervisor import Worker

NAME = "benchmark"
START_S = 240.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Configuration:
    """Two workers that serve the benchmark's model: one prefill and one decode, or two mixed ones."""

    name: str
    mixed: bool
    max_batched_tokens: int | None = None  # of the workers that prefill; None: the product's default
    providers: tuple[str, ...] = ("net", "tcp")
    kv_cache_memory: str = "256Mi"

    def manifest(self, model: Path) -> dict[str, Any]:
        prefilling: dict[str, Any] = {"kvCacheMemory": self.kv_cache_memory}
        if self.max_batched_tokens is not None:
            prefilling["maxBatchedTokens"] = self.max_batched_tokens
        decoding = prefilling if self.mixed else {"kvCacheMemory": self.kv_cache_memory}
        return {
            "apiVersion": "tandem.dev/v1alpha1",
            "kind": "DisaggregatedModel",
            "metadata": {"name": NAME},
            "spec": {
                "model": {"uri": f"file://{model}"},
                "accelerator": {"type": "CPU"},
                "prefill": {"replicas": 1, "engine": prefilling},
                "decode": {"replicas": 1, "engine": decoding},
            },
        }


class Deployment:
    """A running one."""

    def __init__(self, supervisor: Supervisor, session: aiohttp.ClientSession) -> None:
        self._supervisor = supervisor
        self._session = session

    @property
    def url(self) -> str:
        return self._supervisor.url

    @property
    def workers(self) -> list[str]:
        return [_short(worker) for worker in self._supervisor.workers]

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Each worker's metrics, by its name."""
        found = {}
        for worker in self._supervisor.workers:
            assert worker.addresses is not None
            async with self._session.get(f"http://{worker.addresses.worker}/metrics") as answer:
                found[_short(worker)] = samples(await answer.text())
        return found

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that each process has used, by `worker process`; this one's under `client`."""
        used = {"client": cpu_s(os.getpid())}
        if self._supervisor.router is not None:
            used["router"] = cpu_s(self._supervisor.router.pid)
        for worker in self._supervisor.workers:
            assert worker.process is not None
            used[f"{_short(worker)} main"] = cpu_s(worker.process.pid)
            for name, pid in children(worker.process.pid).items():
                used[f"{_short(worker)} {name}"] = cpu_s(pid)
        return used


@contextlib.asynccontextmanager
async def deployed(
    configuration: Configuration, model: Path, cpus: Sequence[frozenset[int] | None]
) -> AsyncIterator[Deployment]:
    """`cpus` are the workers' cores, prefill's first. Raises DeploymentError, TimeoutError."""
    manifest = load_manifest(json.dumps(configuration.manifest(model)), configuration.name)
    uri = manifest.spec.model.uri
    facts, path = model_facts(uri, {}), resolve(uri, {})
    plans = plan_workers(
        manifest, facts, path, mixed=configuration.mixed, providers=list(configuration.providers)
    )
    plans = [replace(plan, cpus=cores) for plan, cores in zip(plans, cpus, strict=True)]
    async with contextlib.AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-")))
        supervisor = Supervisor(plans, run_dir, run_dir / "logs", port=_free_port())
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        await _until_serving(supervisor)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Deployment(supervisor, session)


async def _until_serving(supervisor: Supervisor) -> None:
    failed = asyncio.create_task(supervisor.failed())
    serving = asyncio.create_task(supervisor.serving())
    try:
        done, _ = await asyncio.wait((failed, serving), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if failed in done:
            raise failed.result()
        if serving not in done:
            raise TimeoutError(f"the deployment does not serve after {START_S:.0f} s")
    finally:
        failed.cancel()
        serving.cancel()


def children(pid: int) -> dict[str, int]:
    """The processes that a pod's main process started: lead, rank, server."""
    wrapper = process.__name__
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if wrapper in words:
            found[words[words.index(wrapper) + 1].rpartition(".")[2]] = int(child)
    return found


def cpu_s(pid: int) -> float:
    """User and system time of all threads, in steps of a tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def machine_busy_s() -> float:
    """CPU seconds that all cores together were busy since boot, time stolen by the host included."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _short(worker: Worker) -> str:
    return worker.plan.name.removeprefix(f"{NAME}-")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
