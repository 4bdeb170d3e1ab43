"""From a plan to text: submits its requests, turns their tokens into deltas, decides how each choice ends.

Knows: tokens, stop strings, finish reasons. Does not know: which endpoint asked, JSON, HTTP.

A choice ends once. A stop string found here beats whatever the lead says afterwards (it answers our Abort),
and the tokens sampled meanwhile are never shown. A choice that ends in an error ends the whole call with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_runtime.engine.request import FinishReason

from .answer import PromptTokensDetails, Usage
from .detokenizer import Detokenizer
from .errors import GenerationFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tandem_runtime.engine.request import TokenLogprobs
    from tandem_runtime.ipc import Output, Timing

    from .lead import Lead
    from .tally import Tally
    from .tokenizer import Tokenizer
    from .validate import Plan


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    offset: int  # characters of its choice's text before it
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a choice. `tokens` may be here before their text is: it may be the beginning of
    a stop string."""

    index: int
    text: str
    tokens: list[Token]
    finish: str | None


class _Choice:
    def __init__(self, index: int, plan: Plan, tokenizer: Tokenizer, eos_token_ids: list[int]) -> None:
        params = plan.params_of(index)
        self.index = index
        self.finish: str | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self._want_logprobs = params.logprobs is not None
        self._stop_tokens = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._detokenizer = Detokenizer(tokenizer, plan.prompt_of(index), plan.stops, params.min_tokens)

    def take(self, output: Output) -> Delta:
        text, tokens = "", []
        for position, token in enumerate(output.tokens):
            logprobs = output.logprobs[position] if self._want_logprobs else None
            tokens.append(Token(token, self._detokenizer.num_chars, logprobs))
            if (
                output.finish is FinishReason.STOP
                and position == len(output.tokens) - 1
                and token in self._stop_tokens
            ):
                break  # the token that ended it is counted, and has no text
            text += self._detokenizer.push(token)
            if self._detokenizer.stopped:
                break
        if output.finish is not None and not self._detokenizer.stopped:
            text += self._detokenizer.flush()
        if self._detokenizer.stopped:
            self.finish = FinishReason.STOP.value
        elif output.finish is not None:
            self.finish = output.finish.value
        self.num_tokens += len(tokens)
        return Delta(self.index, text, tokens, self.finish)


class Generation:
    def __init__(self, lead: Lead, tokenizer: Tokenizer, plan: Plan, tally: Tally) -> None:
        self.timing: Timing | None = None
        self._lead = lead
        self._plan = plan
        self._tally = tally
        self._choices = [
            _Choice(i, plan, tokenizer, lead.limits.eos_token_ids) for i in range(plan.num_choices)
        ]
        tally.prompt_tokens = plan.num_prompt_tokens

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Until every request has ended, aborted ones too, so that usage and timing are complete afterwards.
        Closing it aborts the rest.

        Raises GenerationFailed, LeadLost.
        """
        with self._lead.call(self._plan.submits()) as call:
            async for index, output in call.outputs():
                choice = self._choices[index]
                choice.cached_tokens = max(choice.cached_tokens, output.cached_tokens)
                self.timing = output.timing or self.timing
                if choice.finish is not None:
                    continue
                if output.finish is FinishReason.ERROR:
                    raise GenerationFailed(
                        output.status, output.error or "The engine could not go on with this request."
                    )
                if output.finish is FinishReason.ABORT:  # not by us: the worker is stopping, say
                    raise GenerationFailed(
                        503 if output.status == 200 else output.status,
                        output.error or "The worker gave this request up.",
                    )
                delta = choice.take(output)
                if delta.tokens:
                    self._tally.tokens(index, len(delta.tokens))
                if delta.finish is not None:
                    self._tally.finish = self._tally.finish or delta.finish
                    call.abort(index)  # does nothing where the lead has ended it already
                yield delta

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices were drawn from it; so do its cached tokens, those its
        first choice found."""
        prompt = self._plan.num_prompt_tokens
        completion = sum(choice.num_tokens for choice in self._choices)
        cached = sum(choice.cached_tokens for choice in self._choices[:: self._plan.n])
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
