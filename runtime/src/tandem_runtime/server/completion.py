"""/v1/completions: text or token ids to prompts, deltas to OpenAI's completion objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from .answer import Completion, CompletionChoice, CompletionLogprobs
from .chat import LEAST_LOGPROB
from .validate import check_fields, check_length, plan

if TYPE_CHECKING:
    from tandem_runtime.ipc import Limits, Timing

    from .answer import Usage
    from .generate import Delta, Token
    from .protocol import CompletionRequest
    from .tokenizer import Tokenizer
    from .validate import Plan


async def plan_completion(
    request: CompletionRequest, request_id: str, served_name: str, tokenizer: Tokenizer, limits: Limits
) -> Plan:
    """Raises BadRequest, UnknownModel."""
    check_fields(request, served_name)
    prompts = []
    for prompt in _prompts(request.prompt):
        if isinstance(prompt, str):
            check_length(prompt, tokenizer, limits, param="prompt")
            prompt = await tokenizer.encode(prompt, add_special_tokens=True)
        prompts.append(prompt)
    return plan(request, request_id, prompts, request.logprobs, limits, param="prompt")


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    tokens = [item for item in prompt if isinstance(item, int)]
    if tokens or not prompt:
        return [tokens]
    return [item for item in prompt if not isinstance(item, int)]


class CompletionAnswer:
    """Words one request's deltas: a chunk has the shape of a whole answer."""

    def __init__(self, request: CompletionRequest, plan: Plan, created: int, tokenizer: Tokenizer) -> None:
        self.stream = bool(request.stream)
        self._request = request
        self._plan = plan
        self._created = created
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def chunks(self, delta: Delta) -> list[Completion]:
        with_tokens = delta.tokens and (self._request.logprobs is not None or self._request.return_token_ids)
        if not (delta.text or with_tokens or delta.finish is not None):
            return []
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        usage = None if self._request.include_usage else UNSET
        return [self._completion([self._choice(delta, with_prompt=first)], usage, None)]

    def tail(self, usage: Usage, timing: Timing | None) -> Completion | None:
        with_timing = self._request.return_timing and timing is not None
        if not self._request.include_usage and not with_timing:
            return None
        return self._completion([], usage if self._request.include_usage else UNSET, timing)

    def whole(self, choices: list[Delta], usage: Usage, timing: Timing | None) -> Completion:
        return self._completion([self._choice(choice, with_prompt=True) for choice in choices], usage, timing)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, timing: Timing | None
    ) -> Completion:
        return Completion(
            id=self._plan.id,
            created=self._created,
            model=self._request.model,
            choices=choices,
            usage=usage,
            timing=timing if self._request.return_timing and timing is not None else UNSET,
        )

    def _choice(self, delta: Delta, *, with_prompt: bool) -> CompletionChoice:
        ids = self._request.return_token_ids
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            finish_reason=delta.finish,
            logprobs=self._logprobs(delta.tokens) if self._request.logprobs is not None else None,
            token_ids=[token.id for token in delta.tokens] if ids else UNSET,
            prompt_token_ids=list(self._plan.prompt_of(delta.index)) if ids and with_prompt else UNSET,
        )

    def _logprobs(self, tokens: list[Token]) -> CompletionLogprobs:
        out = CompletionLogprobs([], [], [], [])
        for token in tokens:
            assert token.logprobs is not None
            text, _ = self._tokenizer.token_text(token.id)
            top: dict[str, float] = {}
            for other, logprob in [*token.logprobs.top, (token.id, token.logprobs.logprob)]:
                # Distinct ids may read the same (U+FFFD): the likelier one stays.
                top.setdefault(self._tokenizer.token_text(other)[0], max(logprob, LEAST_LOGPROB))
            out.tokens.append(text)
            out.token_logprobs.append(max(token.logprobs.logprob, LEAST_LOGPROB))
            out.top_logprobs.append(top)
            out.text_offset.append(token.offset)
        return out
