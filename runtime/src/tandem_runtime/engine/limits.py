"""Where a request may not begin and where it must end.

Knows: sizes of the model and of this worker. Does not know: what else is running.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_crds.role_config import Role

from .request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_batched_tokens` bounds one pass, `max_sequences` the ranks' slots, `max_model_len` prompt +
    output.
    """

    role: Role
    page_tokens: int
    pages: int
    layers: int
    max_batched_tokens: int
    max_sequences: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("layers", "max_batched_tokens", "max_sequences", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"scheduler: {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def pool_tokens(self) -> int:
        return self.pages * self.page_tokens


def refusal(config: SchedulerConfig, prompt: list[int], params: SamplingParams) -> str | None:
    """Why this request cannot be served here, or None. The edge says the same before any queue.

    Prefill workers sample nothing: of `params` they need nothing.
    """
    shortest, max_tokens = (2, 0) if config.role is Role.PREFILL else (1, params.max_tokens)
    if len(prompt) < shortest:
        return f"the prompt has {len(prompt)} tokens; it needs at least {shortest}"
    if max_tokens < 1 and config.role is not Role.PREFILL:
        return f"max_tokens is {max_tokens}; it must be at least 1"
    if len(prompt) + max_tokens > config.max_model_len:
        return (
            f"the prompt has {len(prompt)} tokens and {max_tokens} more are asked for; "
            f"prompt and output together may have {config.max_model_len}"
        )
    if len(prompt) > config.pool_tokens:
        return f"the prompt has {len(prompt)} tokens; this worker's KV cache holds {config.pool_tokens}"
    named: tuple[tuple[str, Iterable[int]], ...] = (
        ("prompt", prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    )
    for where, ids in named:
        for token in ids:
            if not 0 <= token < config.vocab_size:
                return f"{where}: token id {token} is outside the vocabulary of {config.vocab_size}"
    return None


def finish_reason(config: SchedulerConfig, request: Request) -> FinishReason | None:
    """Whether the token sampled last is the end of the request."""
    params, token = request.params, request.output[-1]
    if len(request.output) >= params.min_tokens:
        if token in params.stop_token_ids:
            return FinishReason.STOP
        if token in config.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
    # The newest token's KV needs a place only if another is to follow: hence one more than the pool holds.
    longest = min(config.max_model_len, config.pool_tokens + 1)
    if len(request.output) >= params.max_tokens or request.num_tokens >= longest:
        return FinishReason.LENGTH
    return None
