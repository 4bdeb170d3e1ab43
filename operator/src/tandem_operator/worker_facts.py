"""What pods say about themselves over HTTP: a worker's `/state`, a router's `/metrics`.

Knows: URLs, JSON, deadlines. Does not know: what the answers are good for, when to ask (`memory.py`).

A pod that cannot be asked is an answer too: `WorkerState.error`. Nothing here fails a pass.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .observed import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEADLINE_S = 2.0
AT_ONCE = 32
ANSWER_MAX_NBYTES = 1 << 20
STATE_VERSION = 1
WORKER_PORT, ROUTER_PORT = 8001, 8000
ARRIVALS = "tandem_router_arrivals_total"


class WorkerFacts:
    """`close` when done."""

    def __init__(
        self,
        failed: Callable[[str], None] = lambda endpoint: None,
        *,
        worker_port: int = WORKER_PORT,
        router_port: int = ROUTER_PORT,
    ) -> None:
        """`failed` hears of every question that was not answered: `state` or `metrics`."""
        self._failed, self._worker_port, self._router_port = failed, worker_port, router_port
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def states(self, addresses: Mapping[str, str]) -> dict[str, WorkerState]:
        """`addresses`: pod UID -> IP."""
        answers = await asyncio.gather(*map(self._state, addresses.values()))
        return dict(zip(addresses, answers, strict=True))

    async def arrivals(self, addresses: Mapping[str, str]) -> dict[str, float]:
        """Of the routers that answered: how many requests have arrived since each began."""
        counts = await asyncio.gather(*map(self._count, addresses.values()))
        return {uid: count for uid, count in zip(addresses, counts, strict=True) if count is not None}

    async def _state(self, address: str) -> WorkerState:
        try:
            return worker_state(await self._get(address, self._worker_port, "/state"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._failed("state")
            return WorkerState(error=f"{type(error).__name__}: {error}".rstrip(": "))

    async def _count(self, address: str) -> float | None:
        try:
            text = await self._get(address, self._router_port, "/metrics")
            samples = (
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == ARRIVALS
            )
            return sum(samples)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self._failed("metrics")
            return None

    async def _get(self, address: str, port: int, path: str) -> str:
        host = f"[{address}]" if ":" in address else address
        if self._session is None:
            # Pods are asked directly, whatever HTTP_PROXY says.
            self._session = aiohttp.ClientSession(trust_env=False)
        url = f"http://{host}:{port}{path}"
        async with self._limit, asyncio.timeout(DEADLINE_S), self._session.get(url) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")
            body = await answer.content.read(ANSWER_MAX_NBYTES)
            return body.decode(errors="replace")


def worker_state(text: str) -> WorkerState:
    """Of a `/state` document; what it lacks, or has of another type, is None. Raises ValueError."""
    document: Any = json.loads(text)
    if not isinstance(document, dict) or document.get("version") != STATE_VERSION:
        raise ValueError(f"/state is not of version {STATE_VERSION}")
    progress, paired, provider = (document.get(key) for key in ("load_progress", "paired", "provider"))
    requests, incompatible = document.get("requests"), document.get("incompatible")
    counts = requests if isinstance(requests, dict) else {}
    under_way = [counts[key] for key in ("running", "waiting", "blocked") if _is_count(counts.get(key))]
    return WorkerState(
        loaded_percent=int(min(max(progress, 0), 1) * 100) if isinstance(progress, int | float) else None,
        # Only decode pairs; a prefill is found by it.
        paired=paired if isinstance(paired, bool) and document.get("role") == "decode" else None,
        provider=provider if isinstance(provider, str) and provider else None,
        running=sum(under_way) if under_way else None,
        incompatible={str(pod): str(why) for pod, why in incompatible.items()}
        if isinstance(incompatible, dict)
        else {},
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
