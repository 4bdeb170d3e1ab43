"""Which workers could answer a request now, and which of them should.

    PeerSource ──────who exists──► Workers ──one poller each──► GET /state ──► usable, load
                                      ▲
    proxy ──choose / lost─────────────┘

Knows: endpoints, what workers say of themselves, this router's open requests. Does not know: clients.

A worker is usable only by its last answer: one that did not answer the last poll is not, nor is one that has
failed a request since. Requests that it has open already go on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ..instance import Addresses
    from ..peer_source import PeerSource
    from .config import RouterConfig

log = logging.getLogger("tandem.router")

STATE_VERSION = 1
SOURCE_PERIOD_S = 0.25


class RequestState(msgspec.Struct, frozen=True):
    outstanding: int = 0


class WorkerState(msgspec.Struct, frozen=True):
    """What the router needs of `GET /state`."""

    version: int
    role: str
    ready: bool
    paired: bool
    draining: bool
    requests: RequestState = RequestState()

    @property
    def usable(self) -> bool:
        return self.version == STATE_VERSION and self.ready and self.paired and not self.draining


@dataclass(slots=True, eq=False)
class Worker:
    """`outstanding` counts this router's open requests; `elsewhere` all others, as of the last poll."""

    addresses: Addresses
    usable: bool = False
    outstanding: int = 0
    elsewhere: int = 0
    last_chosen: int = 0
    poller: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def load(self) -> int:
        return self.outstanding + self.elsewhere


class Workers:
    def __init__(self, source: PeerSource, config: RouterConfig) -> None:
        self._source = source
        self._config = config
        self._workers: dict[tuple[str, str, str], Worker] = {}  # by UID and addresses
        self._choices = itertools.count(1)
        self.listed = False  # whether the source has answered once

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    @property
    def serving(self) -> bool:
        return any(worker.usable for worker in self._workers.values())

    def choose(self, refused: Collection[Worker]) -> Worker | None:
        """The usable worker with the least load, except `refused`; of equals, the one idle for longest.

        One that is about to end is given a request only where it is the last: it still answers, and says in
        its state when it no longer does.
        """
        candidates = [worker for worker in self._workers.values() if worker.usable and worker not in refused]
        if not candidates:
            return None
        worker = min(candidates, key=lambda one: (one.addresses.draining, one.load, one.last_chosen))
        worker.last_chosen = next(self._choices)
        return worker

    def lost(self, worker: Worker) -> None:
        """It refused a connection or broke one."""
        worker.usable = False

    async def watch(self) -> None:
        """Follow the source and poll whoever it names, until cancelled."""
        following = asyncio.create_task(self._source.follow())
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                timeout=aiohttp.ClientTimeout(total=self._config.poll_timeout_s),
            ) as session:
                while True:
                    if following.done():
                        following.result()  # what ends the source ends the router
                    self._follow(session)
                    await asyncio.sleep(SOURCE_PERIOD_S)
        finally:
            pollers = [worker.poller for worker in self._workers.values() if worker.poller is not None]
            for task in (following, *pollers):
                task.cancel()
            await asyncio.gather(following, *pollers, return_exceptions=True)

    def _follow(self, session: aiohttp.ClientSession) -> None:
        listed = self._source.read()
        if listed is None:
            return
        self.listed = True
        serving = {(one.uid, one.worker, one.server): one for one in listed if one.server}
        for key in self._workers.keys() - serving.keys():
            worker = self._workers.pop(key)
            worker.usable = False
            if worker.poller is not None:
                worker.poller.cancel()
            log.info("worker %s at %s is gone", worker.addresses.pod, worker.addresses.server)
        for key, addresses in serving.items():
            known = self._workers.get(key)
            if known is not None:
                known.addresses = addresses
                continue
            worker = self._workers[key] = Worker(addresses)
            worker.poller = asyncio.create_task(self._poll(worker, session))
            log.info("worker %s at %s is listed", addresses.pod, addresses.server)

    async def _poll(self, worker: Worker, session: aiohttp.ClientSession) -> None:
        while True:
            was_usable = worker.usable
            try:
                state = await self._ask(worker, session)
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                worker.usable = False
                why = f"{type(error).__name__}: {error}"
            else:
                worker.usable = state.usable
                why = str(state)
            if worker.usable is not was_usable:
                log.info("worker %s is usable: %s (%s)", worker.addresses.pod, worker.usable, why)
            await asyncio.sleep(self._config.poll_s if worker.usable else self._config.poll_unready_s)

    async def _ask(self, worker: Worker, session: aiohttp.ClientSession) -> WorkerState:
        ours = worker.outstanding
        async with session.get(f"http://{worker.addresses.worker}/state") as response:
            response.raise_for_status()
            state = msgspec.json.decode(await response.read(), type=WorkerState)
        worker.elsewhere = max(0, state.requests.outstanding - ours)
        return state
