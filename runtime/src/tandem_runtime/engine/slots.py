"""The ranks' slots: which are open, and which of the closed ones the ranks do not know about yet.

Knows: slot numbers. Does not know: requests.

A closed slot may be opened again in the same step: ranks apply a step's drops before its adds.
"""

from __future__ import annotations

import heapq


class Slots:
    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))  # a heap: low numbers first, so that the ranks' tables stay dense
        self._drops: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def open(self) -> int:
        return heapq.heappop(self._free)

    def close(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        self._drops.append(slot)

    def take_drops(self) -> list[int]:
        """Slots closed since the last step, for the next one."""
        drops, self._drops = self._drops, []
        return drops

    def check(self, in_use: list[int]) -> None:
        assert sorted(self._free + in_use) == list(range(self.count)), "a slot is lost, or open twice"
