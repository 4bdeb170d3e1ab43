"""Pods asked over real HTTP, well-behaved and not."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tandem_operator import worker_facts
from tandem_operator.worker_facts import WorkerFacts, worker_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STATE = {
    "version": 1,
    "load_progress": 0.499,
    "role": "decode",
    "paired": True,
    "provider": "net",
    "requests": {"running": 2, "waiting": 1, "blocked": 3, "outstanding": 9},
    "incompatible": {"p-1": "page_tokens 16 here, 32 there"},
}


class Pod:
    """Serves both ports' paths at one port of loopback."""

    def __init__(self) -> None:
        self.answer: Any = STATE
        self.metrics = "tandem_router_arrivals_total 42.0\n"
        self.port = 0

    async def state(self, _: web.Request) -> web.Response:
        if self.answer == "hang":
            await asyncio.sleep(3600)
        if isinstance(self.answer, str):
            return web.Response(text=self.answer)
        return web.json_response(self.answer)

    async def numbers(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    one = Pod()
    app = web.Application()
    app.add_routes([web.get("/state", one.state), web.get("/metrics", one.numbers)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.port = runner.addresses[0][1]
    yield one
    await runner.cleanup()


@pytest.fixture
async def facts(pod: Pod) -> AsyncIterator[WorkerFacts]:
    failed: list[str] = []
    one = WorkerFacts(failed.append, worker_port=pod.port, router_port=pod.port)
    one.failures = failed  # type: ignore[attr-defined]
    yield one
    await one.close()


async def test_a_worker_says_how_it_is(facts: WorkerFacts) -> None:
    (state,) = (await facts.states({"u": "127.0.0.1"})).values()
    assert (state.loaded_percent, state.paired, state.provider, state.running) == (49, True, "net", 6)
    assert state.incompatible == {"p-1": "page_tokens 16 here, 32 there"}
    assert state.error == ""


async def test_a_router_counts_its_arrivals(facts: WorkerFacts) -> None:
    assert await facts.arrivals({"u": "127.0.0.1"}) == {"u": 42.0}


async def test_whoever_does_not_answer_delays_nobody_and_fails_nothing(
    facts: WorkerFacts, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_facts, "DEADLINE_S", 0.2)
    pod.answer = "hang"
    states = await facts.states({"hung": "127.0.0.1", "nobody": "127.0.0.2"})
    assert all(state.error for state in states.values())
    assert facts.failures == ["state", "state"]  # type: ignore[attr-defined]
    pod.metrics = "}{"
    assert await facts.arrivals({"u": "127.0.0.1"}) == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', "not json"])
def test_a_state_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"version 1|Expecting value"):
        worker_state(text)


def test_fields_of_another_type_are_not_told() -> None:
    wrong = dict.fromkeys(("load_progress", "paired", "requests", "incompatible"), "x") | {
        "provider": 3,
        "version": 1,
    }
    state = worker_state(json.dumps(wrong))
    assert state == worker_state('{"version": 1}')
    assert state.running is None


def test_a_proxy_is_never_asked(monkeypatch: pytest.MonkeyPatch, pod: Pod) -> None:
    async def ask() -> str:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        one = WorkerFacts(worker_port=1)
        try:
            (state,) = (await one.states({"u": "127.0.0.1"})).values()
            assert one._session is not None
            assert not one._session.trust_env
            return state.error
        finally:
            await one.close()

    assert "127.0.0.1', 1" in asyncio.run(ask()) or "127.0.0.1:1" in asyncio.run(ask())
