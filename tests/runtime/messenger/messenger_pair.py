"""Both messengers over real fabrics in one process, with the smallest engine that keeps the contracts.

The prefill engine here computes nothing: the "KV" of a page is a byte pattern of (prompt token, layer,
page), written before the layer counter moves, as a forward pass would.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_runtime.fabric.fabric import Fabric
from tandem_runtime.kv import Chunk, KVLayout
from tandem_runtime.layer_counter import LayerCounter
from tandem_runtime.messenger.authentication import PeerKeys
from tandem_runtime.messenger.decode_messenger import DecodeMessenger
from tandem_runtime.messenger.manifest import LAYOUT, MUST_EQUAL
from tandem_runtime.messenger.ports import Identity, IncomingTransfer, PeerAddress, TransferTiming
from tandem_runtime.messenger.prefill_messenger import PrefillMessenger
from tandem_runtime.messenger.wire import Region
from tandem_runtime.process import boot_id, start_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from tandem_runtime.messenger.manifest import Manifest

PATIENCE_S = 20.0
_nodes = itertools.count(1)


def manifest(layout: KVLayout, **changes: object) -> Manifest:
    fields: dict[str, object] = dict.fromkeys(MUST_EQUAL, "same")
    fields |= {
        "layout": LAYOUT,
        "layers": layout.layers,
        "pages": layout.pages,
        "page_tokens": layout.page_tokens,
    }
    return fields | changes


def layout_of(*, layers: int, pages: int = 32) -> KVLayout:
    return KVLayout(layers=layers, pages=pages, kv_heads=2, page_tokens=4, head_dim=8, dtype="float32")


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


class Side:
    """One process' worth of fabric and memory."""

    def __init__(self, provider: str, layout: KVLayout, ranks: int, pod: str) -> None:
        node = next(_nodes) << 32 | secrets.randbits(32)
        self.layout = layout
        self.fabric = Fabric(
            provider=provider, bind_address="127.0.0.1", node_id=node, incarnation=1, name="test"
        )
        self.pools: list[mmap.mmap] = []
        self.regions: list[Region] = []
        for rank in range(ranks):
            fd = os.memfd_create("pool")
            os.ftruncate(fd, layout.pool_nbytes)
            key, base = self.fabric.register_fd(rank, fd, layout.pool_nbytes)
            self.pools.append(mmap.mmap(fd, layout.pool_nbytes))
            self.regions.append(Region(key, base, layout.pool_nbytes))
            os.close(fd)
        self.identity = Identity(pod, node, 1, os.getpid(), start_time(os.getpid()), boot_id())

    def page(self, rank: int, layer: int, page: int) -> bytes:
        at = self.layout.page_offset(layer, page)
        return self.pools[rank][at : at + self.layout.page_nbytes]

    def fill(self, rank: int, layer: int, page: int, pattern: bytes) -> None:
        at, nbytes = self.layout.page_offset(layer, page), self.layout.page_nbytes
        self.pools[rank][at : at + nbytes] = (pattern * (nbytes // len(pattern) + 1))[:nbytes]


def pattern(tag: int, rank: int, layer: int, index: int) -> bytes:
    return b"%08d/%d/%d/%d|" % (tag, rank, layer, index)


class DecodeEngine:
    """A DecodeListener that writes down what it is told."""

    def __init__(self, side: Side, ranks: int, keys: PeerKeys, mine: Manifest) -> None:
        self.side = side
        self.log: list[tuple[str, int]] = []
        self.timings: dict[int, TransferTiming] = {}
        self.failures: dict[int, tuple[str, str, bool]] = {}
        self.messenger = DecodeMessenger(
            fabric=side.fabric,
            identity=side.identity,
            manifest=mine,
            keys=keys,
            layout=side.layout,
            ranks=ranks,
            regions=side.regions,
            listener=self,
        )

    def ready(self, ticket: int, timing: TransferTiming) -> None:
        self.log.append(("ready", ticket))

    def failed(self, ticket: int, reason: str, message: str, retryable: bool, node: str) -> None:
        self.log.append(("failed", ticket))
        self.failures[ticket] = (reason, message, retryable)

    def released(self, ticket: int) -> None:
        self.log.append(("released", ticket))

    def timed(self, ticket: int, timing: TransferTiming) -> None:
        self.timings[ticket] = timing

    def changed(self) -> None: ...

    def story(self, ticket: int) -> list[str]:
        return [word for word, of in self.log if of == ticket]

    def assert_landed(self, tag: int, pages: list[int], layers: int, rank: int = 0, first: int = 0) -> None:
        for layer, (place, page) in itertools.product(range(layers), enumerate(pages)):
            wanted = pattern(tag, rank, layer, first + place)
            assert self.side.page(rank, layer, page).startswith(wanted), (tag, rank, layer, page)

    async def released_all(self, *tickets: int) -> None:
        await until(lambda: all("released" in self.story(t) for t in tickets), "released")


@dataclass
class Job:
    incoming: IncomingTransfer
    pages: list[int] = field(default_factory=list)


class PrefillEngine:
    """A PrefillListener with a counter of layers and pages to write from."""

    def __init__(
        self, side: Side, ranks: int, keys: PeerKeys, mine: Manifest, max_transfers: int = 8
    ) -> None:
        self.side = side
        self.ranks = ranks
        self.counter = LayerCounter()
        side.fabric.watch_counter(self.counter.memfd, self.counter.eventfd)
        self.jobs: dict[int, Job] = {}
        self.log: list[tuple[str, int]] = []
        self.free = list(range(side.layout.pages))
        self.auto = True
        self.chunk_tokens = 16
        self.hit_tokens = 0
        self.messenger = PrefillMessenger(
            fabric=side.fabric,
            identity=side.identity,
            manifest=mine,
            keys=keys,
            layout=side.layout,
            ranks=ranks,
            regions=side.regions,
            listener=self,
            max_transfers=max_transfers,
        )

    def dispatched(self, incoming: IncomingTransfer) -> None:
        self.log.append(("dispatched", incoming.key))
        self.jobs[incoming.key] = Job(incoming)
        if self.auto:
            self.run(incoming.key)

    def cancelled(self, key: int) -> None:
        self.log.append(("cancelled", key))

    def released(self, key: int) -> None:
        self.log.append(("released", key))
        self.free += self.jobs[key].pages

    def story(self, key: int) -> list[str]:
        return [word for word, of in self.log if of == key]

    def admit(self, key: int) -> None:
        job = self.jobs[key]
        count = self.side.layout.pages_for(len(job.incoming.tokens) - 1)
        job.pages, self.free = self.free[:count], self.free[count:]
        for index in range(self.hit_tokens // self.side.layout.page_tokens):
            for layer in range(self.side.layout.layers):
                self.compute(key, layer, index)
        self.messenger.admitted(key, job.pages, self.hit_tokens)

    def compute(self, key: int, layer: int, index: int) -> None:
        job = self.jobs[key]
        for rank in range(self.ranks):
            tag = job.incoming.tokens[0]
            self.side.fill(rank, layer, job.pages[index], pattern(tag, rank, layer, index))

    def chunks(self, key: int) -> list[Chunk]:
        job = self.jobs[key]
        goal = len(job.incoming.tokens) - 1
        starts = range(self.hit_tokens, goal, self.chunk_tokens)
        return [
            Chunk(
                job.incoming.request_id,
                s,
                min(s + self.chunk_tokens, goal),
                tuple(job.pages),
                s + self.chunk_tokens >= goal,
            )
            for s in starts
        ]

    def step(self, key: int, chunk: Chunk, layers: int | None = None) -> int:
        """Publishes a step of one chunk and computes its first `layers` layers. Returns its counter base."""
        layout = self.side.layout
        passes = -(-self.counter.value // layout.layers)
        base = passes * layout.layers
        self.counter.store(base)
        self.messenger.publish(base, [(key, chunk)])
        for layer in range(layout.layers if layers is None else layers):
            for index in chunk.completed(layout.page_tokens):
                self.compute(key, layer, index)
            self.counter.store(base + layer + 1)
        return base

    def run(self, key: int) -> None:
        self.admit(key)
        for chunk in self.chunks(key):
            self.messenger.computed(self.step(key, chunk))


class Pair:
    """One prefill and one decode, attached."""

    def __init__(
        self, provider: str, *, layers: int = 2, ranks: int = 1, pages: int = 32, **prefill: object
    ) -> None:
        self.layout = layout_of(layers=layers, pages=pages)
        keys = PeerKeys.of(b"k" * 32)
        self.prefill_side = Side(provider, self.layout, ranks, "prefill-0")
        self.decode_side = Side(provider, self.layout, ranks, "decode-0")
        self.prefill = PrefillEngine(self.prefill_side, ranks, keys, manifest(self.layout, **prefill))
        self.decode = DecodeEngine(self.decode_side, ranks, keys, manifest(self.layout))
        self.ranks = ranks

    @property
    def address(self) -> PeerAddress:
        return PeerAddress("uid-0", "prefill-0", "", self.prefill_side.fabric.bootstrap_address, 1)

    async def __aenter__(self) -> Pair:
        self.prefill.messenger.start()
        self.decode.messenger.start()
        self.decode.messenger.set_peers([self.address])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.decode.messenger.close()
        await self.prefill.messenger.close()
        faults = [side.messenger.snapshot()["counters"]["faults"] for side in (self.prefill, self.decode)]  # type: ignore[index]  # snapshot is JSON
        self.decode_side.fabric.close()
        self.prefill_side.fabric.close()
        assert faults == [0, 0]

    async def attached(self) -> None:
        await until(
            lambda: self.decode.messenger.has_peer and self.decode.messenger.can_dispatch(), "attached"
        )

    def dispatch(self, tag: int, tokens: int, pages: list[int], cached_tokens: int = 0) -> int:
        prompt = [tag, *range(1, tokens)]
        return self.decode.messenger.dispatch(f"r{tag}", prompt, cached_tokens, pages)

    def assert_landed(self, tag: int, pages: list[int], first: int = 0) -> None:
        for rank in range(self.ranks):
            self.decode.assert_landed(tag, pages, self.layout.layers, rank, first)
