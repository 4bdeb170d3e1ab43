"""Paged writes through the fabric between two processes: ours beside a memcpy, medians of interleaved
rounds.

python benchmarks/fabric.py [--rounds N] [--providers net,shm]

A round runs memcpy and every provider at every page size, one after the other, so that a busy neighbour
hurts all alike. One measurement moves `MOVED_NBYTES` in pages and ends when the receiver's core has counted
the last immediate; both processes share CLOCK_MONOTONIC. Then: the latency of one small write, from its
post to its count, both stamped in C, with the receiver polling and with the receiver asleep; and the CPU
share of an idle progress thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy

from tandem_runtime.fabric.events import CountReached, Event, LinkOpened, OutDrained
from tandem_runtime.fabric.fabric import Fabric, Geometry, PlanItem, Segment

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

POOL_NBYTES = 256 << 20
MOVED_NBYTES = 256 << 20
PAGE_NBYTES = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
SMALL_NBYTES = 64
SMALL_ROUNDS = 300
PAUSE_S = 0.001  # between small writes to a receiver that sleeps
PATIENCE_S = 60.0
GEN_BITS_SHIFT = 14


class Side:
    """One process's fabric with a pool, connected to the other's."""

    def __init__(self, provider: str, number: int, spin_us: int) -> None:
        self.fabric = Fabric(
            provider=provider, bind_address="127.0.0.1", node_id=number, incarnation=1, spin_us=spin_us
        )
        fd = os.memfd_create("pool")
        os.ftruncate(fd, POOL_NBYTES)
        self.fabric.register_fd(0, fd, POOL_NBYTES)
        os.close(fd)
        numpy.frombuffer(self.fabric.region_memory(0), numpy.uint8)[:] = number  # fault every page in
        self._pending: list[Event] = []

    def wait(self, kind: type) -> Any:
        """The next event of that kind."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for index, event in enumerate(self._pending):
                if isinstance(event, kind):
                    return self._pending.pop(index)
            select.select([self.fabric.event_fd], [], [], 1.0)
            self._pending += self.fabric.events()
        raise TimeoutError(f"no {kind.__name__} within {PATIENCE_S} s")

    def connect(self, peer: Connection, initiator: bool) -> None:
        self.fabric.link_open(1)
        opened = self.wait(LinkOpened)
        peer.send((opened.address, [tuple(region) for region in opened.regions]))
        address, regions = peer.recv()
        self.fabric.link_connect(1, address, bytes(32), initiator)
        self.fabric.link_regions(1, regions)


def receive(provider: str, spin_us: int, peer: Connection) -> None:
    """The receiving process: arms counters as told and reports when they were reached; its last word is its
    idle CPU share.
    """
    side = Side(provider, 2, spin_us)
    side.connect(peer, initiator=False)
    for gen in range(1, 1 << 16):
        command = peer.recv()
        if command is None:
            break
        side.fabric.counter_arm(0, gen, command)
        peer.send(gen)
        peer.send(side.wait(CountReached).time_ns)
        side.fabric.counter_disarm(0, gen)
    peer.send(idle_share(side.fabric))
    side.fabric.close()


def idle_share(fabric: Fabric) -> float:
    """The progress thread's share of one core while nothing happens."""
    before, began = fabric.stats().thread_cpu_ns, time.monotonic_ns()
    time.sleep(3.0)
    return (fabric.stats().thread_cpu_ns - before) / (time.monotonic_ns() - began)


class Pair:
    """A sender here and a receiver in another process."""

    def __init__(self, provider: str, spin_us: int = 50) -> None:
        context = multiprocessing.get_context("spawn")
        self._peer, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(provider, spin_us, theirs))
        self._process.start()
        self._side = Side(provider, 1, spin_us)
        self._side.connect(self._peer, initiator=True)
        self._transfers = 0

    def write(self, page_nbytes: int, pages: int) -> tuple[int, OutDrained]:
        """Moves pages; returns when the last was counted and what the sender saw."""
        fabric = self._side.fabric
        self._peer.send(pages)
        gen = self._peer.recv()
        self._transfers += 1
        stride = POOL_NBYTES if pages == 1 else page_nbytes
        fabric.out_begin(
            self._transfers,
            1,
            gen << GEN_BITS_SHIFT,
            Geometry(stride, POOL_NBYTES, stride, POOL_NBYTES, 1),
            [Segment(0, 0, 0, 0, page_nbytes)],
        )
        fabric.out_post(PlanItem(self._transfers, range(pages), range(pages), True))
        return self._peer.recv(), self._side.wait(OutDrained)

    def gigabytes_per_s(self, page_nbytes: int) -> float:
        counted_ns, drained = self.write(page_nbytes, MOVED_NBYTES // page_nbytes)
        return MOVED_NBYTES / (counted_ns - drained.first_post_ns)

    def latency_us(self) -> float:
        counted_ns, drained = self.write(SMALL_NBYTES, 1)
        return (counted_ns - drained.first_post_ns) / 1e3

    def close(self) -> tuple[float, float]:
        """Idle CPU shares of the two progress threads."""
        self._peer.send(None)
        shares = idle_share(self._side.fabric), self._peer.recv()
        self._side.fabric.close()
        self._process.join()
        return shares


class Copy:
    """One thread's memcpy between two pools of the same size: what no copy can beat."""

    def __init__(self) -> None:
        self._source = numpy.ones(POOL_NBYTES, numpy.uint8)
        self._target = numpy.zeros(POOL_NBYTES, numpy.uint8)

    def gigabytes_per_s(self, page_nbytes: int) -> float:
        began = time.monotonic_ns()
        for offset in range(0, MOVED_NBYTES, page_nbytes):
            self._target[offset : offset + page_nbytes] = self._source[offset : offset + page_nbytes]
        return MOVED_NBYTES / (time.monotonic_ns() - began)


def print_row(name: str, values: list[float], digits: int) -> None:
    low, middle, high = min(values), statistics.median(values), max(values)
    print(f"{name:<34}{low:>10.{digits}f}{middle:>10.{digits}f}{high:>10.{digits}f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--providers", default="net,shm")
    arguments = parser.parse_args()
    providers = arguments.providers.split(",")

    movers: dict[str, Copy | Pair] = {"memcpy": Copy()}
    movers |= {provider: Pair(provider) for provider in providers}
    speeds: dict[tuple[str, int], list[float]] = {}
    for name, mover in movers.items():
        mover.gigabytes_per_s(PAGE_NBYTES[-1])  # connect, fault in
        del name
    for _ in range(arguments.rounds):
        for page_nbytes in PAGE_NBYTES:
            for name, mover in movers.items():
                speeds.setdefault((name, page_nbytes), []).append(mover.gigabytes_per_s(page_nbytes))

    print(f"{'paged writes, GB/s':<34}{'min':>10}{'median':>10}{'max':>10}")
    for page_nbytes in PAGE_NBYTES:
        for name in movers:
            print_row(f"{name}, {page_nbytes >> 10} KiB pages", speeds[name, page_nbytes], 2)

    print(f"\n{'small write + immediate, us':<34}{'min':>10}{'median':>10}{'max':>10}")
    idle = {}
    for provider in providers:
        pair = movers[provider]
        assert isinstance(pair, Pair)
        asleep = []
        for _ in range(SMALL_ROUNDS):
            time.sleep(PAUSE_S)
            asleep.append(pair.latency_us())
        idle[provider] = pair.close()
        polling_pair = Pair(provider, spin_us=5000)
        polling = [polling_pair.latency_us() for _ in range(SMALL_ROUNDS)]
        polling_pair.close()
        print_row(f"{provider}, receiver polls", polling, 1)
        print_row(f"{provider}, receiver asleep", asleep, 1)

    print(f"\n{'idle progress thread, % of a core':<34}{'sender':>10}{'receiver':>10}")
    for provider, (sender, receiver) in idle.items():
        print(f"{provider:<34}{100 * sender:>10.2f}{100 * receiver:>10.2f}")


if __name__ == "__main__":
    main()
