"""The two messengers over real libfabric, both ends in this process."""

from __future__ import annotations

import pytest
from messenger_pair import Pair, until


@pytest.fixture(params=["net"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_pages_land_and_both_sides_let_go(provider: str) -> None:
    async with Pair(provider, ranks=2) as pair:
        await pair.attached()
        ticket = pair.dispatch(7, 30, [3, 5, 9, 1, 2, 4, 6, 8])
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["ready", "released"]
        pair.assert_landed(7, [3, 5, 9, 1, 2, 4, 6, 8])
        await until(lambda: pair.prefill.messenger.live() == 0, "source pages back")
        assert pair.prefill.story(1) == ["dispatched", "released"]
        assert sorted(pair.prefill.free) == list(range(32))
        assert pair.prefill.messenger.snapshot()["counters"]["writes"] == 2 * 2 * 8
        await until(lambda: ticket in pair.decode.timings, "SENT")
        timing = pair.decode.timings[ticket]
        assert timing.exposed_s is not None
        assert timing.nbytes == 2 * 2 * 8 * pair.layout.page_nbytes
