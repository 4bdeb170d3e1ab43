"""One end of a fabric for the tests: here (`Side`) or in a process of its own (`RemoteSide`), driven by the
same calls.

A remote side does only what it is told, so a test can stop it, kill it, or leave its Python idle. Waiting
is always for an event or a condition, with a deadline; nothing sleeps to let something happen.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import select
import time
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from tandem_runtime.fabric.events import (
    CountReached,
    Event,
    LinkClosed,
    LinkFailed,
    LinkOpened,
    OutDrained,
)
from tandem_runtime.fabric.fabric import Fabric, Geometry, PlanItem, Segment
from tandem_runtime.layer_counter import LayerCounter
from tandem_runtime.messenger import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from tandem_runtime.fabric.fabric import FabricInfo

PATIENCE_S = 30.0
POOL_NBYTES = 4 << 20
KEY = bytes(range(32))
FROM_INITIATOR, FROM_RESPONDER = b"\x01", b"\x02"

T = TypeVar("T")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.001)  # between looks


class Side:
    """A fabric with one region, a layer counter, and a list of events not yet asked for."""

    def __init__(
        self, provider: str, number: int = 1, pool_nbytes: int = POOL_NBYTES, **options: Any
    ) -> None:
        self.fabric = Fabric(
            provider=provider, bind_address="127.0.0.1", node_id=number, incarnation=number, **options
        )
        self.pool_nbytes = pool_nbytes
        fd = os.memfd_create("pool")
        os.ftruncate(fd, 2 * pool_nbytes)  # the second half is never registered
        self.fabric.register_fd(0, fd, pool_nbytes)
        self.beyond = memoryview(mmap.mmap(fd, 2 * pool_nbytes))[pool_nbytes:]
        os.close(fd)
        self.memory = self.fabric.region_memory(0)
        self.layers = LayerCounter()
        self.fabric.watch_counter(self.layers.memfd, self.layers.eventfd)
        self.events: list[Event] = []
        self._transfers = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.fabric.close()

    # --- events -------------------------------------------------------------------------------------------

    def take(self) -> list[Event]:
        """All events that have come."""
        taken, self.events = self.events + self.fabric.events(), []
        return taken

    def wait(self, kind: type[T], count: int = 1) -> list[T]:
        """The next `count` events of `kind`; others stay for later."""
        found: list[T] = []
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for event in self.take():
                if isinstance(event, kind) and len(found) < count:
                    found.append(event)
                else:
                    self.events.append(event)
            if len(found) == count:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(found)} of {count} {kind.__name__}; {self.events}; {self.fabric.stats()}"
                )
            select.select([self.fabric.event_fd], [], [], 0.1)

    def wait_one(self, kind: type[T]) -> T:
        return self.wait(kind)[0]

    def wait_failed(self) -> LinkFailed:
        return self.wait_one(LinkFailed)

    def wait_closed(self, link: int) -> None:
        assert self.wait_one(LinkClosed).link == link

    def wait_drained(self, transfer: int) -> OutDrained:
        """The end of that transfer; other events stay for later."""
        others = []
        while (event := self.wait_one(OutDrained)).transfer != transfer:
            others.append(event)
        self.events += others
        return event

    # --- links --------------------------------------------------------------------------------------------

    def open(self, link: int) -> tuple[bytes, list[tuple[int, int, int]]]:
        self.fabric.link_open(link)
        opened = self.wait_one(LinkOpened)
        assert opened.link == link
        return opened.address, [tuple(region) for region in opened.regions]

    def connect(
        self,
        link: int,
        address: bytes,
        regions: Sequence[tuple[int, int, int]],
        initiator: bool,
        key: bytes = KEY,
    ) -> None:
        self.fabric.link_connect(link, address, key, initiator)
        self.fabric.link_regions(link, regions)

    # --- memory -------------------------------------------------------------------------------------------

    def fill(self, byte: int) -> None:
        self.memory[:] = bytes([byte]) * self.pool_nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.memory[offset : offset + nbytes])

    def write(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data

    def blocks(self, block_nbytes: int, first: int = 0, end: int | None = None) -> dict[int, int]:
        """How many blocks begin with which byte."""
        counted: dict[int, int] = {}
        for offset in range(first, self.pool_nbytes if end is None else end, block_nbytes):
            counted[self.memory[offset]] = counted.get(self.memory[offset], 0) + 1
        return counted

    def layers_touched(self, layers: int) -> list[bool]:
        """Of each layer: was anything written?"""
        nbytes = self.pool_nbytes // layers
        return [any(self.read(layer * nbytes, nbytes)) for layer in range(layers)]

    def beyond_is_zero(self) -> bool:
        return not any(self.beyond)

    # --- transfers ----------------------------------------------------------------------------------------

    def begin(
        self, link: int, transfer: int, page_nbytes: int, layers: int = 1, slot: int = 0, gen: int = 1
    ) -> None:
        """A transfer between pools of the same shape: `layers` layers of equal pages."""
        layer_nbytes = self.pool_nbytes // layers
        self.fabric.out_begin(
            transfer,
            link,
            wire.immediate(wire.IMM_PAGE, wire.transfer_id(slot, gen)),
            Geometry(page_nbytes, layer_nbytes, page_nbytes, layer_nbytes, layers),
            [Segment(0, 0, 0, 0, page_nbytes)],
        )

    def post(self, transfer: int, pages: Sequence[int], last: bool = True) -> None:
        self.fabric.out_post(PlanItem(transfer, pages, pages, last))

    def publish(self, base: int, items: Sequence[tuple[int, Sequence[int], bool]]) -> None:
        self.fabric.plan_publish(
            base, [PlanItem(transfer, pages, pages, last) for transfer, pages, last in items]
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """A method of the fabric."""
        return getattr(self.fabric, name)(*arguments)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(self, ...)`, where this side lives."""
        return function(self, *arguments)

    def store_layers(self, value: int) -> None:
        self.layers.store(value)

    def thread_sleeps(self) -> None:
        """Returns once the progress thread has nothing more to do: it has slept twice anew, or sleeps on."""
        before = self.fabric.stats().sleeps
        used_ns = -1

        def has_slept() -> bool:
            nonlocal used_ns
            before_ns, stats = used_ns, self.fabric.stats()
            used_ns = stats.thread_cpu_ns
            time.sleep(0.02)  # far longer than it spins
            return stats.sleeps > before + 1 or used_ns == before_ns

        until(has_slept, "the progress thread never slept")


class RemoteSide:
    """A `Side` in another process, with the same face: `remote.wait_one(LinkClosed)` runs there.

    Processes are used again once their side is closed, unless a test has stopped or killed them.
    """

    _idle: ClassVar[list[tuple[Connection, SpawnProcess]]] = []

    def __init__(
        self, provider: str, number: int = 2, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.pool_nbytes = options.get("pool_nbytes", POOL_NBYTES)
        self._reusable = environment is None
        if self._reusable and self._idle:
            self._pipe, self._process = self._idle.pop()
        else:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, environment or {}), daemon=True)
            self._process.start()
            theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._pipe.send(("open", provider, number, options))
        self.fabric = _RemoteFabric(self, *self._answer())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reusable:
            self._pipe.send(("close",))
            self._answer()
            self._idle.append((self._pipe, self._process))
        else:
            self._process.kill()
            self._process.join()
            self._pipe.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in dir(Side):
            raise AttributeError(name)

        def run_there(*arguments: Any, **options: Any) -> Any:
            self.start(name, *arguments, **options)
            return self._answer()

        return run_there

    def start(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call `name` there without waiting; `finish` brings its result."""
        self._pipe.send(("call", name, arguments, options))

    def finish(self) -> Any:
        return self._answer()

    def signal(self, number: int) -> None:
        self._reusable = False
        os.kill(self.pid, number)

    def join_process(self) -> None:
        """It was killed: wait until it is reaped."""
        self._process.join()

    def _answer(self) -> Any:
        if not self._pipe.poll(2 * PATIENCE_S):
            raise TimeoutError(f"process {self.pid} does not answer")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise AssertionError(f"in process {self.pid}: {value}")
        return value


class _RemoteFabric:
    def __init__(self, remote: RemoteSide, info: FabricInfo, bootstrap_address: bytes) -> None:
        self._remote = remote
        self.info = info
        self.bootstrap_address = bootstrap_address

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._remote.call(name, *arguments)


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    side: Side | None = None
    while True:
        try:
            kind, *rest = pipe.recv()
        except EOFError:
            return
        try:
            if kind == "open":
                provider, number, options = rest
                side = Side(provider, number, **options)
                result: Any = (side.fabric.info, side.fabric.bootstrap_address)
            else:
                assert side is not None
                if kind == "close":
                    result = side.fabric.close()
                else:
                    name, arguments, options = rest
                    result = getattr(side, name)(*arguments, **options)
            pipe.send(("result", result))
        except Exception as error:  # a fault boundary: the test's process reports it
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def peer(provider: str, number: int, **options: Any) -> Any:
    """The other end of a test's own `Side`.

    libfabric 1.17's shm keeps pointers into the endpoints of its own process and uses them after those are
    closed; two fabrics that talk to each other never share a process in production, and must not here.
    """
    return RemoteSide(provider, number, **options) if provider == "shm" else Side(provider, number, **options)


def join(initiator: Any, responder: Any, link: int = 1, key: bytes = KEY) -> None:
    """Open and connect link number `link` on both sides."""
    left_address, left_regions = initiator.open(link)
    right_address, right_regions = responder.open(link)
    initiator.connect(link, right_address, right_regions, True, key)
    responder.connect(link, left_address, left_regions, False, key)


def seal(direction: bytes, frame: bytes, key: bytes = KEY) -> bytes:
    """What the core makes of a frame, made by hashlib."""
    return frame + hashlib.blake2s(direction + frame, key=key, digest_size=16).digest()


def frame(seq: int = 1, body: bytes = b"body") -> bytes:
    """A well-formed frame of one of the messages that C does not look into."""
    (only,) = wire.frames(wire.MessageType.GOODBYE, 7, 7, 1, seq, body)
    return only


def ping(seq: int = 1) -> bytes:
    (only,) = wire.frames(wire.MessageType.PING, 7, 7, 3, seq, wire.encode_ping(time.monotonic_ns()))
    return only


def write_and_count(sender: Any, receiver: Any, link: int, slot: int, transfer: int) -> None:
    """One small counted write: when it has been counted, the receiver's progress thread has made a turn
    since.
    """
    receiver.fabric.counter_arm(slot, 1, 1)
    sender.begin(link, transfer, 64, 1, slot)
    sender.post(transfer, [0])
    receiver.wait_one(CountReached)
    sender.wait_drained(transfer)
