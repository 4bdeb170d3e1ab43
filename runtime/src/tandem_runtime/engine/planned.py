"""What the scheduler answers: passes to compute, prompts to have computed elsewhere, what came of them.

Knows: shapes. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kv import Chunk
    from .request import FinishReason, Request, TokenLogprobs
    from .step import AddSlot, Row, Step


@dataclass(slots=True)
class Draft:
    """A pass while it is planned. `requests[i]` owns `rows[i]`; `budget` is in tokens."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    adds: list[AddSlot] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Planned:
    """One pass, and the requests that are admitted to compute here with it.

    On a prefill worker `chunks[i]` is what `step.rows[i]` computes, and an admitted request holds its source
    pages, `request.pages`, from now on; the first `request.num_cached` tokens of them are computed already.
    """

    step: Step
    chunks: list[Chunk]
    admitted: list[Request]


@dataclass(frozen=True, slots=True)
class Remote:
    """A prompt for a prefill worker: all of the request's tokens, prompt and output, but the last.

    Page `pages[i]` takes the tokens from `cached_tokens + i * page_tokens` on, `tokens_to_move` in all.
    """

    request: Request
    pages: list[int]
    cached_tokens: int
    tokens_to_move: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """New tokens of a request, or its end, or both. A stop token is among `tokens`.

    On a prefill worker `finish` is `stop` when the goal is reached.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestCounts:
    running: int
    waiting: int
    blocked: int
