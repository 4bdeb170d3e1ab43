"""Ask, and note when each token of the answer came.

Knows: the public API as a client sees it, one clock. Does not know: what answers.

A token's time is when its event was read from the socket here, so the router's hop and this process's own
delay are in every figure, for every configuration alike.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arrivals import Arrival

EVENT = b"data: "
DONE = b"data: [DONE]"


class RequestFailed(RuntimeError):
    """An answer was an error: the figures would be of something else."""


@dataclass(slots=True)
class Answer:
    """One answer as its client saw it; seconds on one clock for all."""

    due_s: float  # when the request was to be sent
    token_times_s: list[float] = field(default_factory=list)
    timing: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.due_s


class Client:
    """Many requests at a time, without a limit on connections."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._session = session

    async def stream(self, arrival: Arrival, answer: Answer) -> Answer:
        """Fills `answer` as the tokens come. Raises RequestFailed."""
        body = {
            "model": self._model,
            "prompt": arrival.prompt,
            "max_tokens": arrival.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "return_timing": True,
        }
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                raise RequestFailed(f"HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(EVENT) or line.startswith(DONE):
                    continue
                now_s = time.monotonic()
                chunk = json.loads(line[len(EVENT) :])
                if "error" in chunk:
                    raise RequestFailed(chunk["error"]["message"])
                answer.timing = chunk.get("timing") or answer.timing
                for choice in chunk["choices"]:
                    answer.token_times_s += [now_s] * len(choice["token_ids"])
        return answer

    async def play(self, arrivals: Sequence[Arrival], opened_s: float) -> list[Answer]:
        """Sends each request at its time, whatever has become of the others, and waits for all answers.

        Raises an ExceptionGroup of RequestFailed.
        """

        async def one(arrival: Arrival) -> Answer:
            due_s = opened_s + arrival.at_s
            await asyncio.sleep(due_s - time.monotonic())
            return await self.stream(arrival, Answer(due_s))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(arrival)) for arrival in arrivals]
        return [task.result() for task in tasks]


def session() -> aiohttp.ClientSession:
    """Each request on a connection of its own, as different clients would have."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        read_bufsize=1 << 20,
    )
