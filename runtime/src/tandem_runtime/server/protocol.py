"""What clients may send: OpenAI's chat and text completion requests, field by field.

Three kinds of field: served; harmless, accepted and ignored (`Ignored`, the whole list); and known but not
served (`not_served`), which are refused by name unless they carry the value that means "off". Any other name
is refused too: a client that asks for something must not get an answer that silently lacks it.

Checked here: types and ranges of single fields. In `validate`: what needs the model's limits or two fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

MAX_CHOICES = 1024  # prompts times n in one request
INT64 = 2**63


def not_served(what: str, *off: object) -> AfterValidator:
    def check(value: object) -> None:
        if value is not None and value not in off:
            raise PydanticCustomError("not_served", "{what} is not served", {"what": what})

    return AfterValidator(check)


def _shape(value: object) -> str | None:
    """Tags tell the shapes of one field apart; `validate` leaves them out of a field's path by their
    brackets."""
    if isinstance(value, str):
        return "(text)"
    if isinstance(value, list):
        first = value[0] if value else ""
        if isinstance(first, list):
            return "(token lists)"
        return "(tokens)" if isinstance(first, int) and not isinstance(first, bool) else "(list)"
    return None


def _either(what: str) -> Discriminator:
    return Discriminator(
        _shape, custom_error_type="wrong_shape", custom_error_message=f"Input should be {what}"
    )


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """What assistants' messages carry besides text is accepted empty: clients send our own answers back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("(text)")] | Annotated[list[TextPart], Tag("(list)"), Field(min_length=1)],
        _either("a string or a list of text parts"),
    ]
    name: str | None = None
    tool_calls: Annotated[Any, not_served("Tool calling", [])] = None
    tool_call_id: Annotated[Any, not_served("Tool calling")] = None
    function_call: Annotated[Any, not_served("Tool calling")] = None
    audio: Annotated[Any, not_served("Audio")] = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    @property
    def text(self) -> str:
        return (
            self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        )


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: ignored


class Ignored(Strict):
    """Harmless: they identify or bill the caller, or steer features that do nothing here."""

    user: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None


class Sampling(Ignored):
    """What both endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: (
        Annotated[
            Annotated[str, Tag("(text)"), Field(min_length=1)]
            | Annotated[list[Annotated[str, Field(min_length=1)]], Tag("(list)"), Field(max_length=4)],
            _either("a string or a list of up to 4 strings"),
        ]
        | None
    ) = None

    # Extensions, named as in vLLM.
    top_k: Annotated[int, Field(ge=-1, lt=INT64)] | None = None  # 0 and -1 are off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None  # the lower, the sooner
    return_token_ids: bool | None = None
    # Ours: where the time went, see `ipc.Timing`.
    return_timing: bool | None = None

    prompt_logprobs: Annotated[Any, not_served("Logprobs of the prompt")] = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def budget(self) -> tuple[str, int | None]:
        """The most tokens to generate, and the field that says so."""
        return "max_tokens", self.max_tokens


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's: the template's own switches

    tools: Annotated[Any, not_served("Tool calling", [])] = None
    tool_choice: Annotated[Any, not_served("Tool calling", "none", "auto")] = None
    functions: Annotated[Any, not_served("Tool calling", [])] = None
    function_call: Annotated[Any, not_served("Tool calling", "none", "auto")] = None
    response_format: Annotated[Any, not_served("Structured output", {"type": "text"})] = None
    modalities: Annotated[Any, not_served("Any modality but text", ["text"])] = None
    audio: Annotated[Any, not_served("Audio")] = None
    prediction: Annotated[Any, not_served("Predicted output")] = None
    web_search_options: Annotated[Any, not_served("Web search")] = None
    reasoning_effort: Annotated[Any, not_served("Reasoning effort")] = None
    verbosity: Annotated[Any, not_served("Verbosity")] = None

    @property
    def budget(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().budget


class CompletionRequest(Sampling):
    prompt: Annotated[
        Annotated[str, Tag("(text)")]
        | Annotated[list[str], Tag("(list)"), Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[int], Tag("(tokens)")]
        | Annotated[list[list[int]], Tag("(token lists)"), Field(max_length=MAX_CHOICES)],
        _either("a string, a list of strings, a list of token ids, or a list of lists of token ids"),
    ]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    echo: Annotated[Any, not_served("Echo of the prompt", False)] = None
    suffix: Annotated[Any, not_served("Insertion before a suffix", "")] = None
