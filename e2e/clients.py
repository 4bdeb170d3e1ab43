"""Clients of the API that never retry: what they see is what the product did.

Knows: streaming completions, token ids. Does not know: the cluster.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea, there lived",
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "A list of planets of the solar system, from the sun outwards:",
)
TOKENS = 24
TIMEOUT_S = 60.0


class WrongAnswer(Exception):
    """Not what was asked for: a status, an error event, a stream without its end."""


async def complete(session: aiohttp.ClientSession, url: str, model: str, prompt: str) -> list[int]:
    """The token ids of one greedy, streamed completion. Raises WrongAnswer and aiohttp.ClientError."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise WrongAnswer(f"HTTP {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return ids
            if not text.startswith("data: "):
                continue
            event: dict[str, Any] = json.loads(text.removeprefix("data: "))
            if "error" in event:
                raise WrongAnswer(f"after {len(ids)} tokens: {event['error']}")
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
    raise WrongAnswer(f"the stream ended without [DONE], after {len(ids)} tokens")


async def reference(url: str, model: str) -> dict[str, list[int]]:
    async with _session() as session:
        return {prompt: await complete(session, url, model, prompt) for prompt in PROMPTS}


def answers(url: str, model: str) -> dict[str, list[int]]:
    """The ids of every prompt's completion, asked one after another."""
    return asyncio.run(reference(url, model))


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        connector=aiohttp.TCPConnector(force_close=True, limit=0),
    )


@dataclass
class Load:
    """`with Load(url, model, expected) as load:` asks all the time, in a thread. Every answer must be whole
    and equal to the expected ids; `wrong` says what was not.
    """

    url: str
    model: str
    expected: Mapping[str, list[int]]
    clients: int = 2
    pause_s: float = 0.05
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(timeout=TIMEOUT_S + 10)

    def more(self, count: int, timeout: float = 60.0) -> None:
        """Waits for that many more answers. Raises TimeoutError."""
        wanted, end = self.answered + count, time.monotonic() + timeout
        while self.answered < wanted and not self.wrong:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.answered} of {wanted} answers after {timeout:.0f} s")
            time.sleep(0.05)

    async def _run(self) -> None:
        async with _session() as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self.clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        prompts = list(self.expected)
        for prompt in itertools.islice(itertools.cycle(prompts), number, None):
            if self._stop.is_set():
                return
            began = time.monotonic()
            try:
                ids = await complete(session, self.url, self.model, prompt)
                if ids != self.expected[prompt]:
                    self.wrong.append(f"{prompt!r}: {ids} instead of {self.expected[prompt]}")
            except (WrongAnswer, aiohttp.ClientError, TimeoutError, ValueError) as error:
                took = time.monotonic() - began
                self.wrong.append(
                    f"{time.strftime('%T')} {prompt!r} {took:.1f} s: {type(error).__name__}: {error}"
                )
            self.answered += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(self.pause_s)
