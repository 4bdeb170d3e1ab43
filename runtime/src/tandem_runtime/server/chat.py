"""/v1/chat/completions: messages to a prompt, deltas to OpenAI's chat objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from .answer import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Message,
    MessageDelta,
    TokenLogprob,
    TopLogprob,
)
from .errors import BadRequest
from .tokenizer import TemplateError
from .validate import check_fields, check_length, plan

if TYPE_CHECKING:
    from tandem_runtime.ipc import Limits, Timing

    from .answer import Usage
    from .generate import Delta, Token
    from .protocol import ChatRequest
    from .tokenizer import Tokenizer
    from .validate import Plan

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own stand-in


async def plan_chat(
    request: ChatRequest, request_id: str, served_name: str, tokenizer: Tokenizer, limits: Limits
) -> Plan:
    """Raises BadRequest, UnknownModel."""
    check_fields(request, served_name)
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    messages = [
        {"role": message.role, "content": message.text}
        | ({} if message.name is None else {"name": message.name})
        for message in request.messages
    ]
    try:
        text = tokenizer.render_chat(messages, request.chat_template_kwargs or {})
    except TemplateError as error:
        raise BadRequest(str(error), param="messages") from error
    check_length(text, tokenizer, limits, param="messages")
    prompt = await tokenizer.encode(text, add_special_tokens=False)  # the template has written them
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return plan(request, request_id, [prompt], logprobs, limits, param="messages")


class ChatAnswer:
    """Words one request's deltas. Per choice: a chunk with the role, chunks with content, a chunk with the
    finish reason and nothing else."""

    def __init__(self, request: ChatRequest, plan: Plan, created: int, tokenizer: Tokenizer) -> None:
        self.stream = bool(request.stream)
        self._request = request
        self._plan = plan
        self._created = created
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def chunks(self, delta: Delta) -> list[ChatChunk]:
        choices = []
        if delta.index not in self._begun:
            choices.append(ChatChunkChoice(delta.index, MessageDelta(role="assistant", content="")))
        if delta.text or (delta.tokens and (self._request.logprobs or self._request.return_token_ids)):
            choices.append(
                ChatChunkChoice(
                    delta.index,
                    MessageDelta(content=delta.text),
                    logprobs=self._logprobs(delta.tokens),
                    token_ids=self._token_ids(delta.tokens),
                )
            )
        if delta.finish is not None:
            choices.append(ChatChunkChoice(delta.index, MessageDelta(), finish_reason=delta.finish))
        first = not self._begun
        self._begun.add(delta.index)
        return [self._chunk([choice], with_prompt=first and i == 0) for i, choice in enumerate(choices)]

    def tail(self, usage: Usage, timing: Timing | None) -> ChatChunk | None:
        with_timing = self._request.return_timing and timing is not None
        if not self._request.include_usage and not with_timing:
            return None
        return self._chunk([], usage=usage, timing=timing)

    def whole(self, choices: list[Delta], usage: Usage, timing: Timing | None) -> ChatCompletion:
        return ChatCompletion(
            id=self._plan.id,
            created=self._created,
            model=self._request.model,
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
            prompt_token_ids=self._prompt_token_ids(),
            timing=timing if self._request.return_timing and timing is not None else UNSET,
        )

    def _choice(self, choice: Delta) -> ChatChoice:
        assert choice.finish is not None
        return ChatChoice(
            index=choice.index,
            message=Message(choice.text),
            finish_reason=choice.finish,
            logprobs=self._logprobs(choice.tokens),
            token_ids=self._token_ids(choice.tokens),
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        *,
        with_prompt: bool = False,
        usage: Usage | None = None,
        timing: Timing | None = None,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._plan.id,
            created=self._created,
            model=self._request.model,
            choices=choices,
            usage=usage if self._request.include_usage else UNSET,
            prompt_token_ids=self._prompt_token_ids() if with_prompt else UNSET,
            timing=timing if self._request.return_timing and timing is not None else UNSET,
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._plan.prompts[0]) if self._request.return_token_ids else UNSET

    def _token_ids(self, tokens: list[Token]) -> list[int] | UnsetType:
        return [token.id for token in tokens] if self._request.return_token_ids else UNSET

    def _logprobs(self, tokens: list[Token]) -> ChatLogprobs | None:
        return (
            ChatLogprobs([self._token_logprob(token) for token in tokens]) if self._request.logprobs else None
        )

    def _token_logprob(self, token: Token) -> TokenLogprob:
        assert token.logprobs is not None
        top = [TopLogprob(*self._entry(*pair)) for pair in token.logprobs.top]
        return TokenLogprob(*self._entry(token.id, token.logprobs.logprob), top_logprobs=top)

    def _entry(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        text, raw = self._tokenizer.token_text(token)
        return text, max(logprob, LEAST_LOGPROB), list(raw)
