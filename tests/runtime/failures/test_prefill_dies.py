"""Prefill is killed amid a transfer: its requests move to another prefill, or fail soon."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from real_deployment import LONG_OUTPUT

if TYPE_CHECKING:
    from real_deployment import Deployment

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300, func_only=True)]
MOVED_S = 6.0


async def test_its_request_moves_to_the_other_prefill_and_then_without_one_fails_at_once(
    deployment: Deployment,
) -> None:
    prompt = deployment.long_prompt()
    async with deployment.load():
        asked = asyncio.create_task(deployment.ask(prompt, LONG_OUTPUT))
        prefill, _ = await deployment.in_transfer()
        other = deployment.other(prefill)
        pids = deployment.kill(prefill, "lead")
        async with asyncio.timeout(MOVED_S):
            await deployment.in_transfer([other])
        reply = await asked
    assert deployment.right(reply, prompt)
    assert reply.timing["prefill_node"] == other.plan.name
    assert await deployment.ended(prefill, pids) == 1
    await deployment.quiet()

    asked = asyncio.create_task(deployment.ask(deployment.long_prompt(), LONG_OUTPUT))
    await deployment.in_transfer()
    pids = deployment.kill(other, "lead")
    async with asyncio.timeout(MOVED_S):
        reply = await asked
    assert reply.status == 503
    assert await deployment.ended(other, pids) == 1
    await deployment.quiet()

    await deployment.repair()
    await deployment.serves()
