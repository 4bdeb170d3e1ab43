"""Workers are killed amid a transfer: whole, or one process of the pod, which is the same to everybody else.

The tests go from what leaves most alive to what leaves least: a worker that is killed costs the next test its
restart.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from real_deployment import LONG_OUTPUT, SHORT, SHORT_OUTPUT
from tiny_checkpoints import random_prompt

if TYPE_CHECKING:
    from real_deployment import Deployment

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300, func_only=True)]
NOTICED_S = 6.0


async def test_decode_dies_its_client_is_told_and_prefill_frees_the_pages_and_serves_the_other(
    deployment: Deployment,
) -> None:
    asked = asyncio.create_task(deployment.ask(deployment.long_prompt(), LONG_OUTPUT))
    prefill, decode = await deployment.in_transfer()
    async with deployment.load(at=deployment.other(decode)):
        pids = deployment.kill(decode, "lead")
        async with asyncio.timeout(NOTICED_S):
            reply = await asked
        assert reply.status in (502, 503), reply  # 503: its server was quicker to say that its lead is gone
        assert await deployment.ended(decode, pids) == 1
    await deployment.quiet()
    assert decode.plan.name not in (await deployment.state(prefill))["peers"]
    await deployment.serves()


@pytest.mark.parametrize("everlasting", ["net"], indirect=True, scope="session")
async def test_a_rank_or_a_server_takes_its_pod_along_and_a_restarted_pod_pairs_again(
    deployment: Deployment,
) -> None:
    prompt = deployment.long_prompt()
    asked = asyncio.create_task(deployment.ask(prompt, LONG_OUTPUT))
    prefill, serving = await deployment.in_transfer()
    decode = deployment.other(serving)
    former = {prefill.uid, decode.uid}
    async with deployment.load(at=serving):
        without_rank = deployment.kill(prefill, "rank")
        without_server = deployment.kill(decode, "server")
        assert deployment.right(await asked, prompt)
        assert await deployment.ended(prefill, without_rank) == 1
        assert await deployment.ended(decode, without_server) == 1
    await deployment.quiet()
    await deployment.serves()

    await deployment.repair()
    assert not former & {prefill.uid, decode.uid}
    nodes = set()
    for seed in range(6):
        reply = await deployment.ask(short := random_prompt(SHORT, seed), SHORT_OUTPUT, at=decode)
        assert deployment.right(reply, short)
        nodes.add(reply.timing["prefill_node"])
    assert prefill.plan.name in nodes


async def test_prefill_dies_its_request_moves_to_the_other_and_without_another_fails(
    deployment: Deployment,
) -> None:
    prompt = deployment.long_prompt()
    async with deployment.load():
        asked = asyncio.create_task(deployment.ask(prompt, LONG_OUTPUT))
        prefill, _ = await deployment.in_transfer()
        other = deployment.other(prefill)
        pids = deployment.kill(prefill, "lead")
        async with asyncio.timeout(NOTICED_S):
            await deployment.in_transfer([other])
        reply = await asked
    assert deployment.right(reply, prompt)
    assert reply.timing["prefill_node"] == other.plan.name
    assert await deployment.ended(prefill, pids) == 1
    await deployment.quiet()

    asked = asyncio.create_task(deployment.ask(deployment.long_prompt(), LONG_OUTPUT))
    await deployment.in_transfer()
    pids = deployment.kill(other, "lead")
    async with asyncio.timeout(NOTICED_S):
        reply = await asked
    assert reply.status == 503
    assert await deployment.ended(other, pids) == 1
    await deployment.quiet()
