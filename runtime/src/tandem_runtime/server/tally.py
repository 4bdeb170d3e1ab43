"""What one HTTP request came to, as its client saw it: the lead's metrics are made of these."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tandem_runtime.ipc import Report

CLIENT_GONE = 499  # nginx's; no client ever sees it


@dataclass(slots=True)
class Tally:
    """`finish` is the first choice's to end; "error" and "abort" (the client left) win over it."""

    endpoint: str
    status: int = 200
    finish: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    _begin_s: float = field(default_factory=time.monotonic)
    _last_s: dict[int, float] = field(default_factory=dict)

    def tokens(self, choice: int, count: int) -> None:
        """`count` tokens of one choice are on their way to the client."""
        now_s = time.monotonic()
        self.output_tokens += count
        if self.ttft_s is None:
            self.ttft_s = now_s - self._begin_s
        if choice in self._last_s:
            self.itl_s.append(now_s - self._last_s[choice])
        self._last_s[choice] = now_s

    def report(self) -> Report:
        return Report(
            endpoint=self.endpoint,
            status=self.status,
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
            e2e_s=time.monotonic() - self._begin_s,
        )
