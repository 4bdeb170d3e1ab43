"""Ask the running deployment one question and tell where its time went.

Knows: the public API, with `return_timing`. Does not know: the workers' insides; what it prints comes out of
the answer itself, the clock of this client, and the workers' public `/state`.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TIMEOUT_S = 300.0
MAX_TOKENS = 64


@dataclass(slots=True)
class Answer:
    """One streamed answer as its client saw it. Times in seconds from the moment the request was sent."""

    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    timing: dict[str, float | int | str | None] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] if self.token_times_s else float("nan")

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


class AskError(RuntimeError):
    """The deployment answered with an error, whose message this is, or did not answer."""


async def served_names(url: str) -> list[str]:
    """Of the models that `url` serves. Raises AskError."""
    async with _session() as session, _answering(url), session.get(f"{url}/v1/models") as response:
        if response.status != 200:
            raise AskError(f"HTTP {response.status}: {await response.text()}")
        return [entry["id"] for entry in (await response.json())["data"]]


async def ask(url: str, model: str, question: str) -> Answer:
    """Streams a chat answer. Raises AskError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_completion_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_timing": True,
    }
    answer = Answer()
    begin = time.monotonic()
    async with (
        _session() as session,
        _answering(url),
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            raise AskError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            data = line.decode().strip()
            if not data.startswith("data: ") or data == "data: [DONE]":
                continue
            chunk = json.loads(data.removeprefix("data: "))
            if "error" in chunk:
                raise AskError(chunk["error"]["message"])
            answer.usage = chunk.get("usage") or answer.usage
            answer.timing = chunk.get("timing") or answer.timing
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    answer.text += choice["delta"]["content"]
                    answer.token_times_s.append(time.monotonic() - begin)
    return answer


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


@contextlib.asynccontextmanager
async def _answering(url: str) -> AsyncIterator[None]:
    try:
        yield
    except aiohttp.InvalidURL:
        raise AskError(f"{url!r} is no URL, as http://127.0.0.1:8000 is") from None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise AskError(f"{url} does not answer as a router does: {error or type(error).__name__}") from None


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timing_table(answer: Answer) -> list[tuple[str, str]]:
    """Rows of what a reader wants to know about the answer: label and value."""
    timing = answer.timing
    itl_s = answer.itl_s
    rows = [
        ("prompt tokens", f"{answer.usage.get('prompt_tokens', 0)}"),
        ("output tokens", f"{answer.usage.get('completion_tokens', 0)}"),
    ]
    if timing.get("prefill_node"):
        nbytes, transfer_s = int(timing.get("kv_nbytes") or 0), float(timing.get("transfer_s") or 0)
        rate = f" at {nbytes / transfer_s / 1e9:.3g} GB/s" if transfer_s else ""
        hidden = timing.get("hidden_nbytes")
        behind = ""
        if hidden is not None and nbytes:
            behind = f", {float(hidden) / nbytes:.0%} while prefill still ran"
        rows += [
            ("prefilled by", f"{timing['prefill_node']}"),
            ("decoded by", f"{timing.get('decode_node')}"),
            ("prefill", milliseconds(timing.get("prefill_s"))),
            ("KV moved", f"{nbytes / 1e6:.2f} MB{rate}{behind}"),
            ("exposed transfer", f"{milliseconds(timing.get('exposed_s'))} after the last layer"),
        ]
    else:
        rows += [
            ("served by", f"{timing.get('decode_node')}"),
            ("prefill", milliseconds(timing.get("prefill_s"))),
        ]
    mean_s = sum(itl_s) / len(itl_s) if itl_s else float("nan")
    rows += [
        ("TTFT", milliseconds(answer.ttft_s)),
        ("ITL mean / p99", f"{milliseconds(mean_s)} / {milliseconds(percentile(itl_s, 0.99))}"),
    ]
    return rows


def milliseconds(value: object) -> str:
    return f"{float(value) * 1e3:.1f} ms" if isinstance(value, int | float) else "unknown"
