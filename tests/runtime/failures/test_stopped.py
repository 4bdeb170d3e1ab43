"""A whole pod stands still for longer than its peers' patience, amid a transfer, and then goes on.

Where it then writes or reads on must not have been given to anybody else: pages are reused only with proof.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from real_deployment import LONG, LONG_OUTPUT
from real_processes import until

if TYPE_CHECKING:
    from real_deployment import Deployment

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300, func_only=True)]
SOURCE_PAGES = LONG // 16  # of all tokens but the last


async def test_a_stopped_prefill_loses_its_request_and_its_late_writes_land_nowhere(
    deployment: Deployment,
) -> None:
    prompt, others = deployment.long_prompt(), [deployment.long_prompt() for _ in range(2)]
    async with deployment.load():
        asked = asyncio.create_task(deployment.ask(prompt, LONG_OUTPUT))
        prefill, decode = await deployment.in_transfer()
        other = deployment.other(prefill)
        with deployment.stopped(prefill):
            reply = await asked
            # The first pages to be used again are those of the attempt that failed.
            crowd = [asyncio.create_task(deployment.ask(p, LONG_OUTPUT, at=decode)) for p in others]
            await deployment.in_transfer([other])
        answers = await asyncio.gather(*crowd)
        await until(deployment.all_paired, "the stopped one is attached again")
    await deployment.quiet()
    assert deployment.right(reply, prompt)
    assert reply.timing["prefill_node"] == other.plan.name
    for long, answer in zip(others, answers, strict=True):
        assert deployment.right(answer, long)
    await deployment.serves()


async def test_a_stopped_decode_keeps_only_what_it_could_still_read_and_recovers(
    deployment: Deployment,
) -> None:
    prompt = deployment.long_prompt()
    asked = asyncio.create_task(deployment.ask(prompt, LONG_OUTPUT))
    prefill, decode = await deployment.in_transfer()
    with deployment.stopped(decode):
        async with deployment.load(at=deployment.other(decode)):

            async def closed() -> bool:
                peer = (await deployment.state(prefill))["peers"].get(decode.plan.name)
                return peer is None or peer["link"] == "down"

            await until(closed, "prefill closes the link to a silent decode", 15)
        # Over shm it is decode that reads, once it goes on; until then nobody else may have the pages.
        held = SOURCE_PAGES if deployment.provider == "shm" else 0

        async def holds() -> bool:
            return (await deployment.state(prefill))["pages"]["pinned"] == held

        await until(holds, f"prefill holds {held} pages")
        assert (await deployment.state(prefill))["counters"]["quarantined"] == bool(held)
    reply = await asked
    assert deployment.right(reply, prompt)
    await until(deployment.all_paired, "the stopped one is attached again")
    await deployment.quiet()
    await deployment.serves()
