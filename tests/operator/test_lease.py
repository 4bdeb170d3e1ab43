"""Two processes never work at once: not when the API server refuses, hangs, or forgets to answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from memory_kube import MemoryKube

from tandem_operator.kube import Unavailable
from tandem_operator.lease import (
    CALL_S,
    DURATION_S,
    LEASE_NAME,
    RENEW_DEADLINE_S,
    TICK_S,
    Held,
    Identity,
    Lease,
)
from tandem_operator.objects import LEASE

if TYPE_CHECKING:
    from tandem_operator.objects import Obj

SCALE = 0.02  # 15 s become 0.3 s


class Cut(MemoryKube):
    """Seen through a connection that can be cut (refused or hung)."""

    def __init__(self, server: MemoryKube) -> None:
        super().__init__()
        self.objects = server.objects
        self._serial = server._serial
        self.state = ""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("get", "create", "replace"):
            return found

        async def call(*arguments: Any) -> Obj:
            if self.state == "refused":
                raise Unavailable("connection refused")
            if self.state == "hung":
                await asyncio.sleep(3600)
            answer: Obj = await found(*arguments)
            return answer

        return call


def lease(kube: MemoryKube, replica: str, installation: str = "system/tandem") -> Lease:
    return Lease(kube, "default", Identity(installation, replica), scale=SCALE)


def holder(kube: MemoryKube) -> str:
    found = kube.named(LEASE, LEASE_NAME)
    return str(found["spec"]["holderIdentity"]) if found else ""


async def until(condition: Any) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.002)


async def forever() -> None:
    await asyncio.sleep(3600)


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_work_has_ended_before_another_may_take_over() -> None:
    assert RENEW_DEADLINE_S + CALL_S + TICK_S < DURATION_S


async def test_of_several_racers_one_works_at_a_time() -> None:
    kube = MemoryKube()
    at_work = most = 0

    async def work() -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.05)
        at_work -= 1

    await asyncio.gather(*(lease(kube, f"r{number}").run(work) for number in range(5)))
    assert most == 1
    assert holder(kube) == ""


async def test_a_lease_given_back_is_taken_at_once() -> None:
    kube = MemoryKube()
    first = asyncio.create_task(lease(kube, "a").run(forever))
    await until(lambda: holder(kube) == "system/tandem/a")
    second = asyncio.create_task(lease(kube, "b").run(forever))
    await asyncio.sleep(0.02)
    started = asyncio.get_running_loop().time()
    await stop(first)
    await until(lambda: holder(kube) == "system/tandem/b")
    assert asyncio.get_running_loop().time() - started < DURATION_S * SCALE
    await stop(second)


@pytest.mark.parametrize("state", ["refused", "hung"])
async def test_a_leader_cut_off_has_stopped_working_before_the_next_begins(state: str) -> None:
    server = MemoryKube()
    cut = Cut(server)
    log: list[str] = []

    async def work(name: str) -> None:
        log.append(f"{name} begins")
        try:
            await forever()
        finally:
            log.append(f"{name} ended")

    first = asyncio.create_task(lease(cut, "a").run(lambda: work("a")))
    await until(lambda: "a begins" in log)
    second = asyncio.create_task(lease(server, "b").run(lambda: work("b")))
    await asyncio.sleep(0.05)
    cut.state = state
    await until(lambda: "b begins" in log)
    assert log == ["a begins", "a ended", "b begins"]
    await first
    await stop(second)


async def test_a_short_outage_costs_nothing() -> None:
    server = MemoryKube()
    cut = Cut(server)
    one = lease(cut, "a")
    task = asyncio.create_task(one.run(forever))
    await until(lambda: one.held)
    cut.state = "refused"
    await asyncio.sleep(RENEW_DEADLINE_S * SCALE / 3)
    cut.state = ""
    await asyncio.sleep(RENEW_DEADLINE_S * SCALE)
    assert one.held
    assert not task.done()
    await stop(task)


async def test_a_holder_that_died_is_succeeded_by_our_clock_whatever_its_times_say() -> None:
    kube = MemoryKube()
    kube.put(
        {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": LEASE_NAME, "namespace": "default"},
            "spec": {
                "holderIdentity": "system/tandem/dead",
                "leaseDurationSeconds": 15,
                "renewTime": "2099-01-01T00:00:00.000000Z",
                "leaseTransitions": 3,
            },
        }
    )
    task = asyncio.create_task(lease(kube, "a").run(forever))
    await until(lambda: holder(kube) == "system/tandem/a")
    found = kube.named(LEASE, LEASE_NAME)
    assert found is not None
    assert found["spec"]["leaseTransitions"] == 4
    await stop(task)


async def test_a_second_installation_over_one_namespace_is_refused_by_name() -> None:
    kube = MemoryKube()
    first = asyncio.create_task(lease(kube, "a").run(forever))
    await until(lambda: holder(kube) != "")
    with pytest.raises(Held, match="namespace default is operated by system/tandem/a"):
        await asyncio.wait_for(lease(kube, "b", "other/tandem").run(forever), 5.0)
    assert holder(kube) == "system/tandem/a"
    await stop(first)


async def test_a_lease_taken_by_force_stops_the_work() -> None:
    kube = MemoryKube()
    one = lease(kube, "a")
    task = asyncio.create_task(one.run(forever))
    await until(lambda: one.held)
    found = kube.named(LEASE, LEASE_NAME)
    assert found is not None
    kube.put({**found, "spec": {**found["spec"], "holderIdentity": "system/tandem/thief"}})
    await asyncio.wait_for(task, 5.0)
    assert holder(kube) == "system/tandem/thief"


async def test_what_work_raises_comes_out_and_the_lease_is_given_back() -> None:
    kube = MemoryKube()

    async def fails() -> None:
        raise RuntimeError("the watch ended")

    with pytest.raises(RuntimeError, match="the watch ended"):
        await lease(kube, "a").run(fails)
    assert holder(kube) == ""
