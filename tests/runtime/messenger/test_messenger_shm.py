"""Over shm, with prefill in a process of its own: the provider where it is the target that reads the source.

A stopped decode would read late; a stopped prefill is given up by decode, and must learn from decode's next
HELLO that its source pages are free again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from messenger_pair import PATIENCE_S, DecodeEngine, PrefillEngine, Side, layout_of, manifest, until

from tandem_runtime.messenger.authentication import PeerKeys
from tandem_runtime.messenger.ports import PeerAddress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

LAYERS = 4
PAGES = [3, 5, 9, 1, 2, 4, 6, 8]


def prefill_process(pipe: Connection, key: bytes) -> None:
    asyncio.run(_serve(pipe, key))


async def _serve(pipe: Connection, key: bytes) -> None:
    layout = layout_of(layers=LAYERS)
    side = Side("shm", layout, 1, "prefill-0")
    engine = PrefillEngine(side, 1, PeerKeys.of(key), manifest(layout))
    engine.messenger.start()
    done = asyncio.Event()

    def command() -> None:
        match pipe.recv():
            case ("auto", value):
                engine.auto = value
                pipe.send(None)
            case ("half",):  # the first chunk's pages, in half of the layers
                engine.admit(1)
                engine.step(1, engine.chunks(1)[0], layers=LAYERS // 2)
                pipe.send(None)
            case ("state",):
                jobs, free = len(engine.jobs), len(engine.free)
                pipe.send((jobs, free, engine.messenger.live(), engine.messenger.snapshot()))
            case ("end",):
                done.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), command)
    pipe.send(side.fabric.bootstrap_address)
    await done.wait()
    await engine.messenger.close()
    side.fabric.close()


class RemotePrefill:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=prefill_process, args=(theirs, b"k" * 32))
        self.process.start()
        theirs.close()
        assert self._pipe.poll(PATIENCE_S)
        self.address = PeerAddress("uid-0", "prefill-0", "", self._pipe.recv(), 1)

    def ask(self, *command: object) -> Any:
        self._pipe.send(command)
        assert self._pipe.poll(PATIENCE_S), command
        return self._pipe.recv()

    @property
    def jobs(self) -> int:
        jobs: int = self.ask("state")[0]
        return jobs

    @property
    def live(self) -> int:
        live: int = self.ask("state")[2]
        return live

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(("end",))
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@pytest.fixture
def prefill() -> Iterator[RemotePrefill]:
    remote = RemotePrefill()
    yield remote
    remote.end()


class Decode:
    def __init__(self, prefill: RemotePrefill) -> None:
        layout = layout_of(layers=LAYERS)
        self.side = Side("shm", layout, 1, "decode-0")
        self.engine = DecodeEngine(self.side, 1, PeerKeys.of(b"k" * 32), manifest(layout))
        self.messenger = self.engine.messenger
        self._address = prefill.address

    async def __aenter__(self) -> Decode:
        self.messenger.start()
        self.messenger.set_peers([self._address])
        await self.attached()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.messenger.close()
        self.side.fabric.close()

    async def attached(self) -> None:
        await until(self.messenger.can_dispatch, "attached")

    def dispatch(self) -> int:
        return self.messenger.dispatch("r", [7, *range(29)], 0, PAGES)


async def test_pages_land(prefill: RemotePrefill) -> None:
    async with Decode(prefill) as decode:
        ticket = decode.dispatch()
        await decode.engine.released_all(ticket)
        assert decode.engine.story(ticket) == ["ready", "released"]
        decode.engine.assert_landed(7, PAGES, LAYERS)
        await until(lambda: prefill.live == 0, "source pages back")


async def test_a_stopped_prefill_is_given_up_and_learns_that_its_pages_are_free(
    prefill: RemotePrefill,
) -> None:
    async with Decode(prefill) as decode:
        prefill.ask("auto", False)
        ticket = decode.dispatch()
        await until(lambda: prefill.jobs == 1, "dispatched")
        prefill.ask("half")
        prefill.signal(signal.SIGSTOP)
        try:
            await decode.engine.released_all(ticket)
            assert decode.engine.story(ticket) == ["failed", "released"]
            assert not decode.messenger.has_peer
        finally:
            prefill.signal(signal.SIGCONT)
        await decode.attached()
        await until(lambda: prefill.live == 0, "source pages back")
        prefill.ask("auto", True)
        again = decode.dispatch()
        await decode.engine.released_all(again)
        assert decode.engine.story(again) == ["ready", "released"]
        decode.engine.assert_landed(7, PAGES, LAYERS)


async def test_a_killed_prefill_is_noticed_at_once(prefill: RemotePrefill) -> None:
    async with Decode(prefill) as decode:
        prefill.ask("auto", False)
        ticket = decode.dispatch()
        await until(lambda: prefill.jobs == 1, "dispatched")
        began = asyncio.get_running_loop().time()
        prefill.signal(signal.SIGKILL)
        await decode.engine.released_all(ticket)
        assert decode.engine.story(ticket) == ["failed", "released"]
        assert decode.engine.failures[ticket][2]
        assert asyncio.get_running_loop().time() - began < 4, "sooner than silence would tell"
