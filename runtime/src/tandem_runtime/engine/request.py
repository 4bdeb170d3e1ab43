"""One request as the engine sees it: token ids in, token ids out.

Knows: counters and sampling parameters. Does not know: text, HTTP, transfers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when generation ends. Validated at the edge (`server`); trusted inside.

    Stop *strings* are the server's business (it sees text): it ends the request by `Abort`.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None is off; k means the sampled token's logprob and the k most likely
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of one sampled token, and `(token id, logprob)` of the most likely ones, most likely first."""

    logprob: float
    top: list[tuple[int, float]]


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Status(enum.Enum):
    WAITING = enum.auto()  # no pages (or preempted: produced tokens are kept)
    BLOCKED = enum.auto()  # decode role: pages are held by a ticket until the remote KV has landed
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """`num_computed` tokens of KV exist; a step moves it towards `goal`. That is the only notion of phase."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival_s: float  # time.monotonic()
    prefill_only: bool = False
    priority: int = 0  # lower goes first
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0  # tokens found in the prefix index at (the latest) admission
    pages: list[int] = field(default_factory=list)
    slot: int = -1  # the ranks' slot; -1 while the ranks do not know this request
    status: Status = Status.WAITING
    preemptions: int = 0
    order: int = 0  # of arrival; set by the scheduler, as all below
    remote: bool = False  # to be computed by a prefill worker, but for its last token
    admitted_s: float | None = None  # when it first got pages, time.monotonic()
    overtaken: int = 0  # by younger requests, since it was last admitted
    num_pages_sent: int = 0  # of `pages`, that the ranks know
    page_names: list[bytes] = field(default_factory=list)  # of the first full pages, see `prefix`

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def goal(self) -> int:
        """Prefill never computes the last prompt token, so it can never sample."""
        return len(self.prompt) - 1 if self.prefill_only else self.num_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions `[start, stop)` of prompt + output."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        return self.prompt[start:n] + self.output[max(0, start - n) : stop - n]
