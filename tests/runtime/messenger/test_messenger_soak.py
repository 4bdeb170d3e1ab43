"""Both messengers through a bad network, for minutes of virtual time, with engines that fail and change
their minds.

The model check covers the machines; this covers what carries them out: frames, clocks, slots, plans,
listener calls.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from memory_fabric import Ether, MemoryFabric
from messenger_pair import manifest
from virtual_time import run_virtually

from tandem_runtime.kv import Chunk, KVLayout
from tandem_runtime.messenger.authentication import PeerKeys
from tandem_runtime.messenger.decode_messenger import DecodeMessenger
from tandem_runtime.messenger.ports import Identity, IncomingTransfer, PeerAddress, TransferTiming
from tandem_runtime.messenger.prefill_messenger import PrefillMessenger
from tandem_runtime.messenger.wire import Region

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUT = KVLayout(layers=2, pages=64, kv_heads=1, page_tokens=4, head_dim=2, dtype="float32")
KEYS = PeerKeys.of(b"k" * 32)


class PrefillEngine:
    def __init__(self, ether: Ether, chance: random.Random, node: int, shm: bool, honest: bool) -> None:
        self.chance = chance
        self.fabric = MemoryFabric(ether, node, shm=shm, honest=honest)
        self.pod = f"prefill-{node}"
        self.free = list(range(LAYOUT.pages))
        self.pages: dict[int, list[int]] = {}
        self.log: dict[int, list[str]] = defaultdict(list)
        self.passes = 0
        self.messenger = PrefillMessenger(
            fabric=self.fabric,
            identity=Identity(self.pod, node, 1, node, 1, "boot"),
            manifest=manifest(LAYOUT),
            keys=KEYS,
            layout=LAYOUT,
            ranks=1,
            regions=[Region(1, 0, LAYOUT.pool_nbytes)],
            listener=self,
            max_transfers=12,
            clock=asyncio.get_running_loop().time,
        )
        self.messenger.start()

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.pod, self.pod, "", self.fabric.bootstrap_address, 1)

    def dispatched(self, incoming: IncomingTransfer) -> None:
        self.log[incoming.key].append("dispatched")
        asyncio.get_running_loop().call_later(self.chance.uniform(0, 2), self._run, incoming)

    def _run(self, incoming: IncomingTransfer) -> None:
        if "released" in self.log[incoming.key]:
            return
        key, tokens = incoming.key, incoming.tokens
        count = LAYOUT.pages_for(len(tokens) - 1)
        if count > len(self.free) or self.chance.random() < 0.05:
            self.messenger.fail(key, "no pages", retryable=True)
            return
        pages = self.pages[key] = [self.free.pop() for _ in range(count)]
        self.fabric.pinned.update(dict.fromkeys(pages, key))
        hit = self.chance.randrange(0, (len(tokens) - 2) // 4 + 1) * 4
        self.messenger.admitted(key, pages, hit)
        self._step(incoming, hit)

    def _step(self, incoming: IncomingTransfer, start: int) -> None:
        goal = len(incoming.tokens) - 1
        if start == goal or "cancelled" in self.log[incoming.key]:
            return
        stop = min(goal, start + self.chance.randint(1, 9))
        base = self.passes * LAYOUT.layers
        self.passes += 1
        pages = self.pages.get(incoming.key)
        if pages is None:
            return
        chunk = Chunk(incoming.request_id, start, stop, tuple(pages), stop == goal)
        self.messenger.publish(base, [(incoming.key, chunk)])
        if self.chance.random() < 0.03:
            self.messenger.aborted(base)
            return
        self.messenger.computed(base)
        asyncio.get_running_loop().call_later(self.chance.uniform(0, 0.3), self._step, incoming, stop)

    def cancelled(self, key: int) -> None:
        self.log[key].append("cancelled")

    def released(self, key: int) -> None:
        self.log[key].append("released")
        for page in self.pages.pop(key, []):
            del self.fabric.pinned[page]
            self.free.append(page)


class DecodeEngine:
    def __init__(self, ether: Ether, chance: random.Random, node: int, shm: bool) -> None:
        self.chance = chance
        self.fabric = MemoryFabric(ether, node, shm=shm)
        self.free = list(range(LAYOUT.pages))
        self.pages: dict[int, tuple[int, list[int]]] = {}
        self.log: dict[int, list[str]] = defaultdict(list)
        self.cancelled: set[int] = set()
        self.messenger = DecodeMessenger(
            fabric=self.fabric,
            identity=Identity(f"decode-{node}", node, 1, node, 1, "boot"),
            manifest=manifest(LAYOUT),
            keys=KEYS,
            layout=LAYOUT,
            ranks=1,
            regions=[Region(1, 0, LAYOUT.pool_nbytes)],
            listener=self,
            clock=asyncio.get_running_loop().time,
        )
        self.messenger.start()

    def ask(self) -> None:
        tokens = [7] * self.chance.randint(2, 40)
        cached = self.chance.randrange(0, (len(tokens) - 2) // 4 + 1) * 4
        count = LAYOUT.pages_for(len(tokens) - 1) - cached // 4
        if count > len(self.free) or not self.messenger.can_dispatch():
            return
        pages = [self.free.pop() for _ in range(count)]
        ticket = self.messenger.dispatch("r", tokens, cached, pages)
        transfer = self.messenger._tickets[ticket].transfer  # the fabric's name for it
        self.fabric.pinned.update(dict.fromkeys(pages, transfer))
        self.pages[ticket] = transfer, pages
        if self.chance.random() < 0.2:
            asyncio.get_running_loop().call_later(self.chance.uniform(0, 3), self.cancel, ticket)

    def cancel(self, ticket: int) -> None:
        if ticket in self.pages and not self.log[ticket]:
            self.cancelled.add(ticket)
            self.messenger.cancel(ticket, "changed its mind")

    def ready(self, ticket: int, timing: TransferTiming) -> None:
        self.log[ticket].append("ready")
        transfer, pages = self.pages[ticket]
        wanted = {(layer, page) for layer in range(LAYOUT.layers) for page in pages}
        assert self.fabric.landed.get(transfer) == wanted

    def failed(self, ticket: int, reason: str, message: str, retryable: bool, node: str) -> None:
        self.log[ticket].append("failed")

    def released(self, ticket: int) -> None:
        self.log[ticket].append("released")
        transfer, pages = self.pages.pop(ticket)
        for page in pages:
            del self.fabric.pinned[page]
            self.free.append(page)
        self.fabric.landed.pop(transfer, None)

    def timed(self, ticket: int, timing: TransferTiming) -> None: ...
    def changed(self) -> None: ...


def stop(side: DecodeEngine | PrefillEngine, seconds: float) -> None:
    """As SIGSTOP, and SIGCONT later: neither its core nor its loop does anything."""
    loop = asyncio.get_running_loop()
    courier = side.messenger._courier
    side.fabric.deaf_until_s = loop.time() + seconds
    courier.stop()
    loop.call_later(seconds, courier.start)


class Soak:
    def __init__(self, seed: int, shm: bool, honest: bool = True) -> None:
        self.chance = random.Random(seed)
        self.ether = Ether(random.Random(seed + 1), loss=0.15, repeat=0.15, delay_s=0.02)
        self.prefills = [PrefillEngine(self.ether, self.chance, 100 + i, shm, honest) for i in range(2)]
        self.decodes = [DecodeEngine(self.ether, self.chance, 200 + i, shm) for i in range(2)]
        for decode in self.decodes:
            decode.messenger.set_peers([prefill.address for prefill in self.prefills])

    async def run(self) -> None:
        """Every few seconds somebody is stopped for up to twice the others' patience."""
        loop = asyncio.get_running_loop()
        end = loop.time() + 45
        while loop.time() < end:
            await asyncio.sleep(0.1)
            for decode in self.decodes:
                if not decode.fabric.deaf:
                    decode.ask()
            if self.chance.random() < 0.05:
                side = self.chance.choice([*self.decodes, *self.prefills])
                if not side.fabric.deaf:
                    stop(side, self.chance.uniform(0, 10))
        self.ether.loss = 0.0
        await self.until(lambda: not any(d.pages for d in self.decodes), "decode's pages are back")
        await self.until(lambda: not any(p.messenger.live() for p in self.prefills), "prefill's are")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.1)
        assert condition(), what

    def check(self) -> None:
        assert self.ether.wrongs == []
        for decode in self.decodes:
            assert sorted(decode.free) == list(range(LAYOUT.pages))
            for ticket, story in decode.log.items():
                if ticket in decode.cancelled:
                    assert story == ["released"], (ticket, story)
                else:
                    assert story in (["ready", "released"], ["failed", "released"]), (ticket, story)
        for prefill in self.prefills:
            assert sorted(prefill.free) == list(range(LAYOUT.pages))
            for key, story in prefill.log.items():
                assert [word for word in story if word != "cancelled"] == ["dispatched", "released"], key
                assert story[-1] == "released", (key, story)
        for side in (*self.decodes, *self.prefills):
            counters = side.messenger.snapshot()["counters"]
            assert isinstance(counters, dict)
            assert (counters["faults"], counters["malformed"]) == (0, 0)


def run(seed: int, shm: bool, honest: bool = True) -> Soak:
    soaks = []

    async def live() -> None:
        soaks.append(soak := Soak(seed, shm, honest))
        await soak.run()
        for side in (*soak.decodes, *soak.prefills):
            await side.messenger.close()

    run_virtually(live())
    return soaks[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shm", [False, True], ids=["net", "shm"])
def test_every_ticket_ends_once_and_every_page_comes_back(seed: int, shm: bool) -> None:
    soak = run(seed, shm)
    soak.check()
    stories = [tuple(story) for decode in soak.decodes for story in decode.log.values()]
    counts = {story: stories.count(story) for story in sorted(set(stories))}
    assert counts[("ready", "released")] > 50
    assert len(counts) == 3


def test_the_soak_sees_a_fence_that_does_not_hold() -> None:
    """A prefill that believes that closing its link ends the reading reuses pages that decode reads later."""
    wrongs = [wrong for seed in range(2) for wrong in run(seed, shm=True, honest=False).ether.wrongs]
    assert any("was read after its release" in wrong for wrong in wrongs)
