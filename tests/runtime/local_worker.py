"""Whole workers inside the test's process: the real lead, ranks, fabric and messenger, with threads for
processes.

What is left out is the HTTP server (a test speaks `ipc.py` to the lead as the server would) and the process
borders; both have tests of their own. A rank is a thread that runs the rank process's own `load` and `serve`
over the same unix socket. Over shm the prefill workers live in a second process (`worker_host.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import secrets
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tandem_crds.model import load_manifest
from tandem_crds.role_config import Role, RoleConfig, build_role_config
from tandem_runtime.cli.inspect import model_facts, resolve
from tandem_runtime.engine import rank as rank_process
from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.instance import Addresses, Instance, PeerFile
from tandem_runtime.ipc import Output, Submit
from tandem_runtime.process import child_environment
from tandem_runtime.server.lead import Lead as LeadClient
from tandem_runtime.worker.lead import Lead

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

START_S = 60.0
WAIT_S = 30.0


def role_config(model_dir: Path, role: Role, provider: str = "net", **limits: int) -> RoleConfig:
    """`limits`: max_batched_tokens, max_sequences, max_model_len, pages."""
    manifest = {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": "test"},
        "spec": {
            "model": {"uri": f"file://{model_dir}"},
            "accelerator": {"type": "CPU"},
            "prefill": {"replicas": 1, "engine": {"kvCacheMemory": "8Mi"}},
            "decode": {"replicas": 1, "engine": {"kvCacheMemory": "8Mi"}},
        },
    }
    uri = f"file://{model_dir}"
    facts, path = model_facts(uri, {}), resolve(uri, {})
    config = build_role_config(load_manifest(json.dumps(manifest), "test"), facts, role, str(path))
    pages = limits.pop("pages", config.kv.pages)
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update=limits),
            "kv": config.kv.model_copy(update={"pages": pages}),
            "fabric": config.fabric.model_copy(update={"providers": [provider]}),
        }
    )


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def last(self) -> Output:
        return self.outputs[-1]


class LocalWorker:
    """One worker: `lead`, and for decode and mixed a connected `client`."""

    def __init__(self, config: RoleConfig, directory: Path, peers: Path, name: str) -> None:
        directory.mkdir()
        self.config = config
        self.name = name
        self._directory = directory
        instance = Instance(
            pod=name,
            uid=str(uuid.uuid4()),
            peer_key_dir=str(peers.parent / "keys"),
            peers=str(peers),
            address_file=str(directory / "addresses.json"),
            run_dir=str(directory),
        )
        self.lead = Lead(config, instance)
        self.client: LeadClient
        self._task: asyncio.Task[None] | None = None
        self._threads = [
            threading.Thread(target=self._rank, args=(index,), daemon=True)
            for index in range(config.tensor_parallel)
        ]

    async def start(self) -> None:
        self._task = asyncio.create_task(self.lead.run())
        for thread in self._threads:
            thread.start()
        if self.config.role is Role.PREFILL:
            while not self.lead.ready:
                await self._alive()
        else:
            self.client = await asyncio.wait_for(
                LeadClient.connect(str(self._directory / "lead.sock")), START_S
            )

    async def addresses(self) -> Addresses:
        path = self._directory / "addresses.json"
        while not path.exists():
            await self._alive()
        return msgspec.json.decode(path.read_bytes(), type=Addresses)

    async def generate(
        self, prompt: list[int], params: SamplingParams | None = None, **changes: Any
    ) -> Answer:
        """One request until its last output; `changes` to greedy parameters that ignore end-of-text."""
        params = params or SamplingParams(
            **{"max_tokens": 48, "temperature": 0.0, "ignore_eos": True, **changes}
        )
        answer = Answer()
        with self.client.call([Submit(uuid.uuid4().hex, prompt, params)]) as call:
            async for _, output in call.outputs():
                answer.tokens += output.tokens
                answer.outputs.append(output)
        return answer

    def state(self) -> dict[str, Any]:
        return msgspec.json.decode(msgspec.json.encode(self.lead.state()))

    async def until(self, condition: Any, what: str, within_s: float = WAIT_S) -> None:
        await until(self, condition, what, within_s)

    def check(self) -> None:
        """Asserts that the worker's books agree with each other."""
        self.lead._scheduler.check()

    async def stop(self) -> None:
        if self._task is not None:
            if self.config.role is not Role.PREFILL and hasattr(self, "client"):
                self.client.close()
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            for thread in self._threads:
                thread.join(START_S)

    async def _alive(self) -> None:
        assert self._task is not None
        if self._task.done():
            self._task.result()
        await asyncio.sleep(0.01)

    def _rank(self, index: int) -> None:
        link = rank_process.connect(self._directory / "rank.sock")
        try:
            runner = rank_process.load(self.config, index, self._directory / "store", link)
            with contextlib.suppress(rank_process.LeadGone):
                rank_process.serve(runner, link)
        finally:
            link.close()


class HostedWorker:
    """A `LocalWorker` in the session's second process."""

    _host: subprocess.Popen[str] | None = None

    def __init__(self, config: RoleConfig, directory: Path, peers: Path, name: str) -> None:
        self.config = config
        self.name = name
        self._directory = directory
        self._peers = peers

    async def start(self) -> None:
        self._do(
            "start",
            config=self.config.model_dump(mode="json"),
            directory=str(self._directory),
            peers=str(self._peers),
        )

    async def addresses(self) -> Addresses:
        while not (path := self._directory / "addresses.json").exists():
            await asyncio.sleep(0.01)
        return msgspec.json.decode(path.read_bytes(), type=Addresses)

    def state(self) -> dict[str, Any]:
        return self._do("state")

    async def until(self, condition: Any, what: str, within_s: float = WAIT_S) -> None:
        await until(self, condition, what, within_s)

    def check(self) -> None:
        self._do("check")

    async def stop(self) -> None:
        self._do("stop")

    def _do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Blocks: the second process answers at once, except for a start."""
        if HostedWorker._host is None:
            HostedWorker._host = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker_host.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=child_environment(),
            )
            atexit.register(HostedWorker._host.kill)
        host = HostedWorker._host
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(json.dumps({"do": what, "name": self.name, **arguments}) + "\n")
        host.stdin.flush()
        line = host.stdout.readline()
        assert line, f"the second process ended at {what!r} of {self.name}"
        answer: dict[str, Any] = json.loads(line)
        return answer


async def until(
    worker: LocalWorker | HostedWorker, condition: Any, what: str, within_s: float = WAIT_S
) -> None:
    """Waits for `condition()`; fails the test with the worker's state when it does not come."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"{worker.name}: {what} did not come true: {json.dumps(worker.state())}")
        await asyncio.sleep(0.01)


@dataclass
class Deployment:
    workers: dict[str, LocalWorker | HostedWorker]

    def role(self, role: Role) -> list[Any]:
        return [worker for worker in self.workers.values() if worker.config.role is role]

    @property
    def decode(self) -> LocalWorker:
        """The (first) worker that answers."""
        return (self.role(Role.DECODE) or self.role(Role.MIXED))[0]

    @property
    def prefill(self) -> LocalWorker:
        return self.role(Role.PREFILL)[0]

    async def quiet(self) -> None:
        """Waits until nothing is held anywhere, and checks every worker's books."""
        for worker in self.workers.values():
            await worker.until(lambda w=worker: _unused(w.state()), "every page unused")
            worker.check()


def _unused(state: dict[str, Any]) -> bool:
    pages = state["pages"]
    return bool(pages["pinned"] == 0 and pages["free"] + pages["cached"] == pages["total"])


def _kind(config: RoleConfig) -> type[LocalWorker] | type[HostedWorker]:
    hosted = config.role is Role.PREFILL and config.fabric.providers == ["shm"]
    return HostedWorker if hosted else LocalWorker


@contextlib.asynccontextmanager
async def deployed(configs: dict[str, RoleConfig], directory: Path) -> AsyncIterator[Deployment]:
    """Started, paired workers by name."""
    keys = directory / "keys"
    keys.mkdir()
    (keys / "current").write_bytes(secrets.token_bytes(32))
    peers = directory / "peers.json"
    peers.write_bytes(msgspec.json.encode(PeerFile(workers=[])))
    deployment = Deployment(
        {
            name: _kind(config)(config, directory / f"w{index}", peers, name)
            for index, (name, config) in enumerate(configs.items())
        }
    )
    try:
        for worker in deployment.workers.values():
            await worker.start()
        addresses = [await worker.addresses() for worker in deployment.role(Role.PREFILL)]
        temporary = peers.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(PeerFile(workers=addresses)))
        temporary.replace(peers)
        for worker in deployment.role(Role.DECODE):
            await worker.until(lambda w=worker: w.state()["paired"], "paired")
        yield deployment
    finally:
        for worker in reversed(deployment.workers.values()):
            await worker.stop()
