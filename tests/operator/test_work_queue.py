"""The queue's promises, each broken by a plain list or set of tasks."""

from __future__ import annotations

import asyncio

import pytest

from tandem_operator.work_queue import LONGEST_RETRY_S, Closed, WorkQueue


async def test_a_key_that_waits_is_not_added_twice() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in ("a", "b", "a"):
        queue.add(key)
    assert [await queue.get(), await queue.get(), len(queue)] == ["a", "b", 0]


async def test_a_key_is_never_processed_twice_at_once_but_once_more_after() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert len(queue) == 1
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_many_workers_never_share_a_key() -> None:
    queue: WorkQueue[int] = WorkQueue()
    busy: set[int] = set()
    passes = 0

    async def worker() -> None:
        nonlocal passes
        while passes < 200:
            key = await queue.get()
            assert key not in busy
            busy.add(key)
            await asyncio.sleep(0)
            queue.add(key)  # something happened meanwhile
            await asyncio.sleep(0)
            busy.discard(key)
            passes += 1
            queue.done(key)

    for key in range(3):
        queue.add(key)
    workers = [asyncio.create_task(worker()) for _ in range(5)]
    await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
    for one in workers:
        one.cancel()
    results = await asyncio.gather(*workers, return_exceptions=True)
    assert not [one for one in results if isinstance(one, AssertionError)]


async def test_the_earliest_timer_of_a_key_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 60.0)
    queue.add_after("a", 0.01)
    queue.add_after("a", 30.0)
    assert await asyncio.wait_for(queue.get(), 5.0) == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_an_add_overtakes_a_timer_and_the_timer_adds_nothing_more() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 0.01)
    queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    await asyncio.sleep(0.03)
    assert len(queue) == 0


async def test_retries_come_ever_later_until_a_success() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert [queue.retry("a") for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    for _ in range(30):
        last = queue.retry("a")
    assert last == LONGEST_RETRY_S
    queue.forget("a")
    assert queue.retry("a") == 0.5
    assert queue.retry("a", at_least_s=7.0) == 7.0


async def test_a_closed_queue_wakes_its_workers_and_hands_out_nothing() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add_after("b", 0.0)
    queue.close()
    queue.add("a")
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        await queue.get()


async def test_the_age_is_that_of_the_longest_waiting_key() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.oldest_s == 0.0
    queue.add("a")
    await asyncio.sleep(0.02)
    queue.add("b")
    assert queue.oldest_s >= 0.02
