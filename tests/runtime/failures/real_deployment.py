"""Real processes that a test may kill, stop and restart: pods under `tandem up`'s supervisor, and a router.

The supervisor only reports deaths, so what survives has to go on by itself. Everything is observed as users
and routers observe it: answers over HTTP, `/state`, exit statuses. The answers that must come are
transformers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from real_processes import children, module_of, running, send, until
from tiny_checkpoints import greedy, oracle, random_prompt

from tandem_crds.model import load_manifest
from tandem_runtime.cli.inspect import model_facts, resolve
from tandem_runtime.up.deployment import plan_workers
from tandem_runtime.up.supervisor import OnDeath, Supervisor, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

NAME = "tiny"
START_S = 180.0
LONG, LONG_OUTPUT = 2000, 8  # tokens; 125 steps of prefill
SHORT, SHORT_OUTPUT = 16, 6  # one page to move, and never a prefix hit
MANY = 8  # different short prompts


class Oracle:
    """What transformers answers. Computed once for each prompt."""

    def __init__(self, model_dir: Path) -> None:
        self._model = oracle(model_dir)
        self._answers: dict[tuple[int, ...], list[int]] = {}
        for seed in range(MANY):  # before anything is timed: it takes longer than our answer
            self(random_prompt(SHORT, seed), SHORT_OUTPUT)

    def __call__(self, prompt: list[int], tokens: int) -> list[int]:
        known = self._answers.get(tuple(prompt), [])
        if len(known) < tokens:
            known = self._answers[tuple(prompt)] = greedy(self._model, prompt, tokens)
        return known[:tokens]


@dataclass
class Reply:
    status: int
    tokens: list[int]
    body: dict[str, Any]
    seconds: float

    @property
    def timing(self) -> dict[str, Any]:
        timing: dict[str, Any] = self.body["timing"]
        return timing


@dataclass
class Load:
    """Short requests, one after another, all the time; every one must be answered, and rightly."""

    asked: int = 0
    wrong: list[str] = field(default_factory=list)


class Deployment:
    def __init__(
        self, supervisor: Supervisor, session: aiohttp.ClientSession, expected: Oracle, provider: str
    ) -> None:
        self.supervisor = supervisor
        self.expected = expected
        self.provider = provider
        self._session = session
        self._long_prompts = itertools.count()

    # --- processes ------------------------------------------------------------------------------------

    def workers(self, role: str) -> list[Worker]:
        """Those that run."""
        return [
            w
            for w in self.supervisor.workers
            if w.plan.config.role == role and w.process and w.process.returncode is None
        ]

    def worker(self, name: str) -> Worker:
        return next(w for w in self.supervisor.workers if w.plan.name == name)

    def other(self, worker: Worker) -> Worker:
        """The other worker of the same role."""
        (other,) = [w for w in self.workers(worker.plan.config.role) if w is not worker]
        return other

    def pids(self, worker: Worker) -> dict[str, int]:
        """The pod's processes by name: `main`, `lead`, `rank`, `server`."""
        assert worker.process is not None
        main = worker.process.pid
        return {"main": main, **{module_of(pid): pid for pid in children(main)}}

    def kill(self, worker: Worker, part: str) -> list[int]:
        """Kills one of the pod's processes; returns all of them."""
        pids = self.pids(worker)
        send([pids[part]], signal.SIGKILL)
        return list(pids.values())

    async def ended(self, worker: Worker, pids: list[int]) -> int:
        """The pod's exit status, once none of its processes is left."""
        assert worker.process is not None
        status = await asyncio.wait_for(worker.process.wait(), 15)
        await until(lambda: not any(map(running, pids)), f"no process of {worker.plan.name} is left", 5)
        return status

    @contextlib.contextmanager
    def stopped(self, worker: Worker) -> Iterator[None]:
        """The whole pod stands still, as on a machine that is suspended."""
        pids = list(self.pids(worker).values())
        send(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            send(pids, signal.SIGCONT)

    async def repair(self) -> None:
        """Starts anew whatever has ended; returns when all serve, are paired and hold nothing."""
        for worker in self.supervisor.workers:
            if worker.process is None or worker.process.returncode is not None:
                await self.supervisor.start_worker(worker)
        await asyncio.wait_for(self.supervisor.serving(), START_S)
        await until(self.all_paired, "every decode is attached to every prefill")
        await self.quiet()

    # --- what it says of itself -----------------------------------------------------------------------

    async def state(self, worker: Worker) -> dict[str, Any]:
        assert worker.addresses is not None, f"{worker.plan.name} has ended"
        async with self._session.get(f"http://{worker.addresses.worker}/state") as answer:
            state: dict[str, Any] = await answer.json()
            return state

    async def all_paired(self) -> bool:
        states = [await self.state(worker) for worker in self.workers("decode")]
        links = [peer["link"] for state in states for peer in state["peers"].values()]
        return links == ["up"] * (len(states) * len(self.workers("prefill")))

    async def quiet(self) -> None:
        """Nothing is held anywhere: no page, no transfer."""
        for worker in (*self.workers("prefill"), *self.workers("decode")):
            await until(lambda w=worker: self._holds_nothing(w), f"{worker.plan.name} holds nothing", 20)

    async def _holds_nothing(self, worker: Worker) -> bool:
        state = await self.state(worker)
        pages = state["pages"]
        outstanding = any(state["requests"].values())
        whole = pages["free"] + pages["cached"] == pages["total"]
        return pages["pinned"] == 0 and whole and not state["transfers"] and not outstanding

    async def in_transfer(self, prefills: list[Worker] | None = None) -> tuple[Worker, Worker]:
        """The prefill and the decode in whose long transfer we are: some writes are done, most are not."""
        asked = prefills or self.workers("prefill")
        before = {w: (await self.state(w))["counters"]["writes"] for w in asked}
        found: list[Worker] = []

        async def under_way() -> bool:
            for worker, writes in before.items():
                state = await self.state(worker)
                if state["transfers"].get("sending") and state["counters"]["writes"] > writes + 40:
                    found.append(worker)
                    return True
            return False

        await until(under_way, "a transfer is under way")
        for worker in self.workers("decode"):
            if (await self.state(worker))["peers"][found[0].plan.name]["transfers"]:
                return found[0], worker
        raise AssertionError("the transfer was over before it was found")

    async def gone(self, decode: Worker) -> None:
        """No long request is left at `decode` (short ones may come and go)."""

        async def holds_little() -> bool:
            pages = (await self.state(decode))["pages"]
            return pages["total"] - pages["free"] - pages["cached"] < 4

        await until(holds_little, f"{decode.plan.name} has dropped what its client left", 5)

    # --- requests -------------------------------------------------------------------------------------

    def long_prompt(self) -> list[int]:
        """Nobody has seen it before."""
        return random_prompt(LONG, next(self._long_prompts))

    async def ask(self, prompt: list[int], tokens: int, at: Worker | None = None, **more: Any) -> Reply:
        """Through the router, or straight at one decode worker."""
        url = self.supervisor.url
        if at is not None:
            assert at.addresses is not None
            url = f"http://{at.addresses.server}"
        begin = time.monotonic()
        async with self._session.post(
            f"{url}/v1/completions", json=greedy_body(prompt, tokens, **more)
        ) as answer:
            body = json.loads(await answer.read())
        tokens_or_none = body["choices"][0]["token_ids"] if answer.status == 200 else []
        return Reply(answer.status, tokens_or_none, body, time.monotonic() - begin)

    async def stream(self, prompt: list[int], tokens: int) -> aiohttp.ClientResponse:
        body = greedy_body(prompt, tokens, stream=True)
        return await self._session.post(f"{self.supervisor.url}/v1/completions", json=body)

    def right(self, reply: Reply, prompt: list[int]) -> bool:
        return reply.status == 200 and reply.tokens == self.expected(prompt, len(reply.tokens)) != []

    async def serves(self, requests: int = 4) -> None:
        """The next requests are answered, and rightly."""
        prompts = [random_prompt(SHORT, seed) for seed in range(requests)]
        replies = await asyncio.gather(*(self.ask(prompt, SHORT_OUTPUT) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert self.right(reply, prompt), reply

    @contextlib.asynccontextmanager
    async def load(self, at: Worker | None = None) -> AsyncIterator[Load]:
        """Keeps asking while the body runs; fails the test unless each answer was right."""
        load = Load()
        over = asyncio.Event()

        async def go() -> None:
            for seed in itertools.cycle(range(MANY)):
                if over.is_set():
                    return
                prompt = random_prompt(SHORT, seed)
                reply = await self.ask(prompt, SHORT_OUTPUT, at)
                load.asked += 1
                if not self.right(reply, prompt):
                    load.wrong.append(f"{reply}")

        task = asyncio.create_task(go())
        try:
            yield load
        finally:
            over.set()
            await task
        assert not load.wrong
        assert load.asked


def greedy_body(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, "return_timing": True, **more}


@contextlib.asynccontextmanager
async def deployed(
    document: dict[str, Any], directory: Path, expected: Oracle, provider: str
) -> AsyncIterator[Deployment]:
    """The manifest's workers and a router, serving."""
    model = load_manifest(json.dumps(document), "test")
    uri = model.spec.model.uri
    facts, path = model_facts(uri, {}), resolve(uri, {})
    plans = plan_workers(model, facts, path, mixed=False, providers=[provider])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run_dir = directory / "run"
    run_dir.mkdir(mode=0o700)
    supervisor = Supervisor(plans, run_dir, directory / "logs", port=port, on_death=OnDeath.REPORT)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        deployment = Deployment(supervisor, session, expected, provider)
        try:
            await supervisor.start()
            await deployment.repair()
            yield deployment
        finally:
            await supervisor.stop()
