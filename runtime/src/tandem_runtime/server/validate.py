"""From a request's bytes to what the engine is asked, or an error that names the field at fault.

Knows: the model's limits. Everything here happens before any queue: a request that passes can be served as
far as its own content goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
from pydantic import ValidationError

from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.ipc import Submit

from .errors import BadRequest, ContextTooLong, UnknownModel
from .protocol import MAX_CHOICES, Sampling

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pydantic_core import ErrorDetails

    from tandem_runtime.ipc import Limits

    from .tokenizer import Tokenizer

R = TypeVar("R", bound=Sampling)

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "not_served": "unsupported_parameter",
}


@dataclass(frozen=True)
class Plan:
    """What one HTTP request asks of the engine. Choice `p * n + i` is the i-th of prompt p."""

    id: str
    prompts: Sequence[Sequence[int]]
    n: int
    params: Sequence[SamplingParams]  # one per prompt; with `seed`, choice i draws with seed + i
    stops: Sequence[str]
    priority: int = 0

    def prompt_of(self, choice: int) -> Sequence[int]:
        return self.prompts[choice // self.n]

    def params_of(self, choice: int) -> SamplingParams:
        return self.params[choice // self.n]

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def submits(self) -> list[Submit]:
        return [self._submit(choice) for choice in range(self.num_choices)]

    def _submit(self, choice: int) -> Submit:
        params = self.params_of(choice)
        if params.seed is not None:
            params = msgspec.structs.replace(params, seed=params.seed + choice % self.n)
        return Submit(f"{self.id}-{choice}", list(self.prompt_of(choice)), params, self.priority)


def parse(kind: type[R], body: bytes) -> R:
    """Types, ranges and names of fields. Raises BadRequest about the first one that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request(error.errors(include_url=False)[0]) from None


def check_fields(request: Sampling, served_name: str) -> None:
    """What needs two fields of the request, and its model's name. Raises UnknownModel, BadRequest."""
    if request.model != served_name:
        raise UnknownModel(request.model, served_name)
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")
    if request.best_of is not None and request.best_of > request.num_choices:
        raise BadRequest(
            f"best_of {request.best_of} is more than n: choosing among answers is not served.",
            param="best_of",
            code="unsupported_parameter",
        )


def check_length(text: str, tokenizer: Tokenizer, limits: Limits, *, param: str) -> None:
    """Refuses far too long texts without the seconds it takes to encode them. Raises ContextTooLong."""
    least = tokenizer.fewest_tokens(text)
    if least >= limits.max_model_len:
        raise ContextTooLong(
            f"The prompt has at least {least} tokens; the model's context is {limits.max_model_len}.",
            param=param,
        )


def check_tokens(tokens: Collection[int], limits: Limits, *, param: str) -> None:
    """Ids out of the vocabulary would end as an illegal memory access in a kernel. Raises BadRequest."""
    if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocab_size):
        token = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        raise BadRequest(
            f"Token id {token} is not in the model's vocabulary of {limits.vocab_size} tokens.",
            param=param,
        )


def plan(
    request: Sampling,
    request_id: str,
    prompts: Sequence[Sequence[int]],
    logprobs: int | None,
    limits: Limits,
    *,
    param: str,
) -> Plan:
    """`param` is the field that the prompts came from. Raises BadRequest, ContextTooLong."""
    if len(prompts) * request.num_choices > MAX_CHOICES:
        raise BadRequest(f"Prompts times n must be at most {MAX_CHOICES}.", param="n")
    if request.return_timing and len(prompts) * request.num_choices > 1:
        raise BadRequest("return_timing needs a request with a single choice.", param="return_timing")
    check_tokens(request.stop_token_ids or (), limits, param="stop_token_ids")
    check_tokens(request.logit_bias or (), limits, param="logit_bias")
    budgets = [_max_tokens(request, len(prompt), limits, param=param) for prompt in prompts]
    for prompt in prompts:
        check_tokens(prompt, limits, param=param)
    return Plan(
        id=request_id,
        prompts=prompts,
        n=request.num_choices,
        params=[_sampling_params(request, budget, logprobs, limits) for budget in budgets],
        stops=request.stops,
        priority=request.priority or 0,
    )


def _max_tokens(request: Sampling, prompt_tokens: int, limits: Limits, *, param: str) -> int:
    """How many tokens may be generated: what was asked for, else whatever the context still holds."""
    if prompt_tokens == 0:
        raise BadRequest("The prompt is empty.", param=param)
    if prompt_tokens > limits.pool_tokens:
        raise ContextTooLong(
            f"The prompt has {prompt_tokens} tokens; this worker's cache holds {limits.pool_tokens} in all.",
            param=param,
        )
    context = min(limits.max_model_len, limits.pool_tokens + 1)  # the last token sampled needs no place
    if prompt_tokens + 1 > context:
        raise ContextTooLong(
            f"The prompt has {prompt_tokens} tokens; with one more to generate, at most {context - 1} fit "
            f"into the model's context of {context}.",
            param=param,
        )
    field, asked = request.budget
    if asked is None:
        return context - prompt_tokens
    if prompt_tokens + asked > context:
        raise ContextTooLong(
            f"The prompt's {prompt_tokens} tokens and {field} {asked} are more than the model's context of "
            f"{context}; {field} may be at most {context - prompt_tokens} here.",
            param=field,
        )
    return asked


def _sampling_params(
    request: Sampling, max_tokens: int, logprobs: int | None, limits: Limits
) -> SamplingParams:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens {min_tokens} is larger than the {max_tokens} that may be generated.",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=request.logit_bias or {},
        logprobs=None if logprobs is None else min(logprobs, limits.vocab_size),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )


def _bad_request(error: ErrorDetails) -> BadRequest:
    kind, param = error["type"], _path(error["loc"])
    if kind == "json_invalid":
        return BadRequest(
            f"The body is not valid JSON: {error['ctx']['error']}.", param=None, code="invalid_json"
        )
    code = CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "missing":
        message = f"{param} is required."
    elif kind == "extra_forbidden":
        message = f"{param} is not a parameter of this endpoint."
    elif kind == "not_served":
        message = f"{param}: {error['msg']}."
    else:
        given = repr(error["input"])
        given = given if len(given) <= 60 else given[:57] + "…"
        message = f"{param or 'The body'}: {error['msg']}, not {given}."
    return BadRequest(message, param=param, code=code)


def _path(loc: Sequence[str | int]) -> str | None:
    """`messages[0].role`. Tags of shapes (in brackets) are no part of it, nor are keys the client chose."""
    out = ""
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        elif not part.startswith("("):
            out += f".{part}" if out else part
        if out == "logit_bias":
            break
    return out or None
