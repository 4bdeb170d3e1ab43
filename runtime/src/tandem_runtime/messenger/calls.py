"""Calls of the listener, held back until the messenger's state is whole.

A machine's step may have several actions, and one event may cause several steps; a listener that called
back in the middle of them would meet a messenger half way. So its calls wait for the end of the outermost
turn, and are then made from the loop, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Calls:
    """`with calls:` is a turn; turns nest."""

    __slots__ = ("_depth", "_guard", "_waiting")

    def __init__(self, guard: Callable[[Callable[[], None]], None]) -> None:
        self._guard = guard  # runs a call, whatever it raises
        self._waiting: deque[Callable[[], None]] = deque()
        self._depth = 0

    def add(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)

    def make(self) -> None:
        while self._waiting:
            self._guard(self._waiting.popleft())

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._waiting:
            asyncio.get_running_loop().call_soon(self.make)
