"""A client closes its connection: what was done for it stops, on both sides."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from real_deployment import LONG, LONG_OUTPUT, SHORT
from tiny_checkpoints import random_prompt

if TYPE_CHECKING:
    from real_deployment import Deployment

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("everlasting", ["net"], indirect=True, scope="session"),
]
LAYERS = 4


async def test_while_its_prompt_is_prefilled_prefill_stops_and_both_return_their_pages(
    deployment: Deployment,
) -> None:
    async with deployment.load():
        asked = asyncio.create_task(deployment.ask(deployment.long_prompt(), LONG_OUTPUT))
        prefill, decode = await deployment.in_transfer()
        steps = (await deployment.state(prefill))["steps"]
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        await deployment.gone(decode)
    await deployment.quiet()
    assert (await deployment.state(prefill))["steps"] - steps < LONG // 16 // 2, "prefill went on"
    await deployment.serves()


async def test_while_it_streams_decode_stops(deployment: Deployment) -> None:
    response = await deployment.stream(random_prompt(SHORT), 2000)
    for _ in range(3):
        assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
    (decode,) = [
        w for w in deployment.workers("decode") if (await deployment.state(w))["requests"]["running"]
    ]
    response.close()
    await deployment.gone(decode)
    assert (await deployment.state(decode))["steps"] < 2000
    await deployment.quiet()
    await deployment.serves()
