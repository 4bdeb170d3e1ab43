"""Keys to look at: each at most once at a time, and once more if something happened meanwhile.

Knows: the semantics of client-go's rate-limited queue. Does not know: what a key means.

    add ──► waiting ──get──► processing ──done──► (waiting again, if added meanwhile)
    add_after: a timer that adds; the earliest of a key's timers counts
    retry:     add_after with 0.5 s × 2ⁿ, at most 5 min; forgotten by `forget` after a success
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Key = TypeVar("Key")

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 300.0


class Closed(Exception):
    """The queue was closed."""


class WorkQueue(Generic[Key]):
    """Used by one event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[Key] = deque()
        self._since: dict[Key, float] = {}  # of what waits: when it was added
        self._processing: set[Key] = set()
        self._again: set[Key] = set()  # added while processing
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._something = asyncio.Event()
        self._closed = False

    def add(self, key: Key) -> None:
        if self._closed:
            return
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._processing:
            self._again.add(key)
        elif key not in self._since:
            self._since[key] = asyncio.get_running_loop().time()
            self._waiting.append(key)
            self._something.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """A key that waits already, or comes earlier, is left as it is."""
        loop = asyncio.get_running_loop()
        if self._closed or key in self._since:
            return
        timer = self._timers.get(key)
        if timer is not None:
            if float(timer.when()) <= loop.time() + delay_s:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self._due, key)

    def retry(self, key: Key, at_least_s: float = 0.0) -> float:
        """Adds after a delay that grows with the failures in a row; returns it, in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = max(at_least_s, min(FIRST_RETRY_S * float(1 << min(failures, 20)), LONGEST_RETRY_S))
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: Key) -> None:
        """A pass succeeded: the next failure is the first again."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """The next key; `done` must follow. Raises Closed."""
        while not self._waiting:
            if self._closed:
                raise Closed
            self._something.clear()
            await self._something.wait()
        key = self._waiting.popleft()
        del self._since[key]
        self._processing.add(key)
        return key

    def done(self, key: Key) -> None:
        self._processing.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        """Nothing is handed out any more: who comes next lists everything anyway."""
        self._closed = True
        self._waiting.clear()
        self._since.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._again.clear()
        self._something.set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_s(self) -> float:
        """How long the longest-waiting key has waited; 0 when none does."""
        if not self._waiting:
            return 0.0
        return float(asyncio.get_running_loop().time() - self._since[self._waiting[0]])

    def _due(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)
