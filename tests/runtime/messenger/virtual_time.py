"""An event loop whose clock jumps: nothing waits for real, so minutes of timeouts pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine


class _Jumping(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        assert ready or timeout is not None, "nothing will ever happen again"
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(coroutine: Coroutine[object, object, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()
