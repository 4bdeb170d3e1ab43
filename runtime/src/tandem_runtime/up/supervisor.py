"""Run a deployment's workers and router as local processes, and say when it serves and when it fails.

Knows: processes, their directories, addresses and logs. Does not know: models, requests.

A worker is one pod main process (`tandem_runtime.worker`), which has its own children; none of them outlives
this process, however it ends. What a kubelet, a Service and an EndpointSlice do in a cluster is done here by
`_watch`, `_write_peers` and one JSON file.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import secrets
import signal
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from ..instance import Addresses, Instance, PeerFile
from ..process import child_environment, command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tandem_crds.role_config import Role

    from .deployment import WorkerPlan

POLL_S = 0.1
STOP_S = 8.0
LAST_LOG_LINES = 15
EXIT_CONFIGURATION = 2


class OnDeath(enum.Enum):
    """What a child's death means: the end (for users), or a report (failure tests, where a kubelet would
    restart it).
    """

    EXIT = "exit"
    REPORT = "report"


class DeploymentError(RuntimeError):
    """The deployment cannot run or has ended; `status` is the command's exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class Worker:
    plan: WorkerPlan
    directory: Path
    log_path: Path
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    process: asyncio.subprocess.Process | None = None
    addresses: Addresses | None = None
    progress: float = 0.0
    ready: bool = False


class Supervisor:
    """`run_dir` must be private to this user and short: unix sockets live below it."""

    def __init__(
        self,
        plans: list[WorkerPlan],
        run_dir: Path,
        log_dir: Path,
        *,
        port: int,
        host: str = "127.0.0.1",
        on_death: OnDeath = OnDeath.EXIT,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_dir = run_dir
        self.log_dir = log_dir
        self.host = host
        self.port = port
        self.on_death = on_death
        self.on_change = on_change
        self.workers = [
            Worker(plan, run_dir / f"w{index}", log_dir / f"{plan.name}.log")
            for index, plan in enumerate(plans)
        ]
        self.router: asyncio.subprocess.Process | None = None
        self.deaths: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ranks = sum(plan.config.tensor_parallel for plan in plans)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Starts every process; returns before they are ready."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        keys = self.run_dir / "keys"
        keys.mkdir(mode=0o700)
        (keys / "current").touch(mode=0o600)
        (keys / "current").write_bytes(secrets.token_bytes(32))
        self._write_peers()
        await self._start_router()
        for worker in self.workers:
            await self.start_worker(worker)

    async def start_worker(self, worker: Worker) -> None:
        """Starts (or starts anew, under a new UID, as a new pod would) one worker."""
        worker.directory.mkdir(mode=0o700, exist_ok=True)
        worker.uid, worker.addresses, worker.ready, worker.progress = str(uuid.uuid4()), None, False, 0.0
        address_file = worker.directory / "addresses.json"
        address_file.unlink(missing_ok=True)
        config_path = worker.directory / "role.json"
        config_path.write_text(worker.plan.config.model_dump_json(indent=2))
        instance = Instance(
            pod=worker.plan.name,
            uid=worker.uid,
            host=self.host,
            peer_key_dir=str(self.run_dir / "keys"),
            peers=str(self.run_dir / "peers.json"),
            address_file=str(address_file),
            run_dir=str(worker.directory),
            threads_per_rank=self._threads_per_rank(worker.plan),
        )
        worker.process = await self._spawn(
            [
                *_confined(worker.plan),
                *command("tandem_runtime.worker", "--config", str(config_path)),
            ],
            worker.log_path,
            instance.environment(),
        )
        self._tasks.append(asyncio.create_task(self._watch(worker.plan.name, worker.process)))
        self._tasks.append(asyncio.create_task(self._follow(worker, worker.process, address_file)))

    async def serving(self) -> None:
        """Returns once the router has a ready, paired decode worker and every worker is ready."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while not (
                all(worker.ready for worker in self.workers) and await _ok(session, f"{self.url}/serving")
            ):
                await asyncio.sleep(POLL_S)

    async def failed(self) -> DeploymentError:
        """Returns when a process has ended and `on_death` says that this is the end."""
        while True:
            name, status = await self.deaths.get()
            if self.on_death is OnDeath.EXIT:
                return self._explain(name, status)

    async def stop(self) -> None:
        """Ends every process: politely, then for good."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        processes = [worker.process for worker in self.workers if worker.process is not None]
        if self.router is not None:
            processes.append(self.router)
        alive = [process for process in processes if process.returncode is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(process.wait() for process in alive)), STOP_S)
        for process in alive:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _explain(self, name: str, status: int) -> DeploymentError:
        path = self.log_dir / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if status == EXIT_CONFIGURATION:
            errors = [line for line in lines if line.startswith("error: ")]
            if errors:
                return DeploymentError(f"{name}: {errors[-1].removeprefix('error: ')}", EXIT_CONFIGURATION)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        tail = "\n".join(f"  | {line}" for line in lines[-LAST_LOG_LINES:])
        return DeploymentError(f"{name} {how}; its last log lines (--log-dir keeps them all):\n{tail}")

    async def _start_router(self) -> None:
        self.router = await self._spawn(
            command(
                "tandem_runtime.router",
                *("--host", self.host, "--port", str(self.port)),
                *("--peers", str(self.run_dir / "peers.json")),
            ),
            self.log_dir / "router.log",
            {},
        )
        self._tasks.append(asyncio.create_task(self._watch("router", self.router)))

    async def _spawn(
        self, arguments: list[str], log_path: Path, environment: dict[str, str]
    ) -> asyncio.subprocess.Process:
        with log_path.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *arguments,
                env=child_environment(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A terminal's Ctrl-C goes to this process alone; it stops the others in order.
                start_new_session=True,
            )

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self.deaths.put_nowait((name, status))
        for worker in self.workers:
            if worker.process is process:
                worker.ready, worker.addresses = False, None
                self._write_peers()
        self.on_change()

    async def _follow(self, worker: Worker, process: asyncio.subprocess.Process, address_file: Path) -> None:
        """Publishes a new worker's addresses and follows it until it is ready."""
        while not address_file.exists():
            if process.returncode is not None:
                return
            await asyncio.sleep(POLL_S)
        if process.returncode is not None:
            return  # strictly before publishing: `_watch` withdraws addresses once
        worker.addresses = msgspec.json.decode(address_file.read_bytes(), type=Addresses)
        self._write_peers()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while process.returncode is None and not worker.ready:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"http://{worker.addresses.worker}/state") as answer:
                        state = await answer.json()
                    if process.returncode is None:
                        worker.progress, worker.ready = state["load_progress"], state["ready"]
                        self.on_change()
                await asyncio.sleep(POLL_S)

    def _write_peers(self) -> None:
        peers = PeerFile(
            workers=[worker.addresses for worker in self.workers if worker.addresses is not None]
        )
        path = self.run_dir / "peers.json"
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(peers))
        temporary.replace(path)

    def _threads_per_rank(self, plan: WorkerPlan) -> int:
        """A share of the worker's own cores, or of all cores among all ranks."""
        if plan.cpus is not None:
            return max(1, len(plan.cpus) // plan.config.tensor_parallel)
        return max(1, len(os.sched_getaffinity(0)) // self._ranks)

    def roles(self) -> dict[str, Role]:
        return {worker.plan.name: worker.plan.config.role for worker in self.workers}


def _confined(plan: WorkerPlan) -> list[str]:
    """The command in front of the worker's that confines it and all its children; it becomes the worker."""
    if plan.cpus is None:
        return []
    return ["taskset", "--cpu-list", ",".join(map(str, sorted(plan.cpus)))]


async def _ok(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
