"""Lengths are refused at the border, to the token, by real workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiny_checkpoints import random_prompt

if TYPE_CHECKING:
    from real_deployment import Deployment

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("everlasting", ["net"], indirect=True, scope="session"),
]


async def test_a_prompt_that_leaves_no_room_for_one_token_is_a_400_and_one_shorter_is_served(
    deployment: Deployment,
) -> None:
    limit = deployment.workers("decode")[0].plan.config.engine.max_model_len
    refused = await deployment.ask(random_prompt(limit), 1)
    assert (refused.status, refused.body["error"]["param"]) == (400, "prompt")
    assert str(limit) in refused.body["error"]["message"]
    longest = random_prompt(limit - 1)
    assert deployment.right(await deployment.ask(longest, 1), longest)


async def test_a_prompt_larger_than_the_page_pool_is_a_400(deployment: Deployment) -> None:
    kv = deployment.workers("decode")[0].plan.config.kv
    refused = await deployment.ask(random_prompt(kv.pages * kv.page_tokens + 1), 1)
    assert (refused.status, refused.body["error"]["param"]) == (400, "prompt")
    await deployment.quiet()
