"""Decode is killed amid a transfer: its clients are told, prefill gets its pages back and goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from real_deployment import LONG_OUTPUT

if TYPE_CHECKING:
    from real_deployment import Deployment

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300, func_only=True)]
TOLD_S = 6.0


async def test_its_client_gets_a_502_and_prefill_frees_the_pages_and_serves_the_other_decode(
    deployment: Deployment,
) -> None:
    asked = asyncio.create_task(deployment.ask(deployment.long_prompt(), LONG_OUTPUT))
    prefill, decode = await deployment.in_transfer()
    async with deployment.load(at=deployment.other(decode)):
        pids = deployment.kill(decode, "lead")
        async with asyncio.timeout(TOLD_S):
            reply = await asked
        assert reply.status in (502, 503), reply  # 503: its server was quicker to say that its lead is gone
        assert await deployment.ended(decode, pids) == 1
    await deployment.quiet()
    assert decode.plan.name not in (await deployment.state(prefill))["peers"]
    await deployment.serves()

    await deployment.repair()
    restarted = await deployment.ask(prompt := deployment.long_prompt(), LONG_OUTPUT, at=decode)
    assert deployment.right(restarted, prompt)
