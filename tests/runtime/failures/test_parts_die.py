"""A pod is one thing: when one of its processes dies the pod ends, and a new one there is a new peer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from real_deployment import LONG_OUTPUT, SHORT, SHORT_OUTPUT
from tiny_checkpoints import random_prompt

if TYPE_CHECKING:
    from real_deployment import Deployment

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("everlasting", ["net"], indirect=True, scope="session"),
]


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
