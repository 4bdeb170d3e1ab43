"""/v1/completions: text and token ids, logprobs with offsets; and the list of models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import pytest
from openai.types import Completion, CompletionChoice, Model
from scripted_lead import steps
from serving import MAX_MODEL_LEN, SERVED

from tandem_runtime.engine.request import FinishReason, TokenLogprobs
from tandem_runtime.ipc import Output

if TYPE_CHECKING:
    import openai
    import tokenizers
    from scripted_lead import ScriptedLead
    from serving import Server

TEXT = " is Paris. 世界 😀"


class StreamedChoice(CompletionChoice):
    """OpenAI's own streams have a null here until the end; its type forgets that."""

    finish_reason: Literal["stop", "length", "content_filter"] | None


class StreamedCompletion(Completion):
    choices: list[StreamedChoice]


def chunks(server: Server, **fields: Any) -> list[StreamedCompletion]:
    reply = server.request(
        "POST", "/v1/completions", {"model": SERVED, "prompt": "The", "stream": True} | fields
    )
    assert reply.status == 200, reply.body
    *events, done = reply.events
    assert done == "[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            assert {"index", "text", "finish_reason", "logprobs"} <= set(choice)
    return [StreamedCompletion.model_validate_json(event, strict=True) for event in events]


@pytest.fixture
def text_ids(vocabulary: tokenizers.Tokenizer) -> list[int]:
    return list(vocabulary.encode(TEXT).ids)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_prompt_is_text_or_token_ids_alone_or_in_a_list(
    server: Server,
    lead: ScriptedLead,
    vocabulary: tokenizers.Tokenizer,
    text_ids: list[int],
    eos: int,
    as_list: bool,
    as_tokens: bool,
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos], cached_tokens=1)
    ids = vocabulary.encode("The capital").ids
    prompt: Any = ids if as_tokens else "The capital"
    body = {"model": SERVED, "prompt": [prompt] if as_list else prompt, "return_token_ids": True}
    reply = server.request("POST", "/v1/completions", body)
    answer = Completion.model_validate_json(reply.body, strict=True)
    assert lead.submit().prompt == ids
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", SERVED)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(text_ids) + 1)
    assert choice.model_extra == {"token_ids": [*text_ids, eos], "prompt_token_ids": ids}


def test_a_stream_carries_text_then_the_finish_and_token_ids(
    server: Server, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, text_ids: list[int], eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos])
    *got, tail = chunks(server, return_token_ids=True, stream_options={"include_usage": True})
    choices = [chunk.choices[0] for chunk in got]
    assert "".join(choice.text for choice in choices) == TEXT
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    extras = [choice.model_extra or {} for choice in choices]
    assert [token for extra in extras for token in extra["token_ids"]] == [*text_ids, eos]
    assert [extra.get("prompt_token_ids") for extra in extras] == [vocabulary.encode("The").ids] + [None] * (
        len(extras) - 1
    )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in [*got, tail]}) == 1
    assert tail.choices == []
    assert tail.usage is not None
    assert tail.usage.completion_tokens == len(text_ids) + 1


def test_several_prompts_with_n_give_choices_in_their_order(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, eos: int
) -> None:
    def script(submit: Any) -> list[Output]:
        said = f"{vocabulary.decode(submit.prompt)}/{submit.params.seed}"
        return steps(submit, [*vocabulary.encode(said).ids, eos], cached_tokens=1)

    lead.script = script
    answer = client.completions.create(model=SERVED, prompt=["a b", "c"], n=2, seed=5)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a b/5"),
        (1, "a b/6"),
        (2, "c/5"),
        (3, "c/6"),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(vocabulary.encode("a b").ids) + len(vocabulary.encode("c").ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 2])
def test_logprobs_give_each_token_its_place_in_the_text(
    client: openai.OpenAI, lead: ScriptedLead, text_ids: list[int], eos: int, top: int, stream: bool
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos])
    options: Any = {"model": SERVED, "prompt": "The capital of France", "logprobs": top}
    if stream:
        parts = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    else:
        parts = client.completions.create(**options).choices
    text = "".join(part.text for part in parts)
    tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens or []]
    offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset or []]
    logprobs = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs or []]
    tops = [entry for part in parts if part.logprobs for entry in part.logprobs.top_logprobs or []]
    assert text == TEXT
    assert len(tokens) == len(offsets) == len(logprobs) == len(tops) == len(text_ids) + 1
    assert logprobs == [-token / 1000 for token in [*text_ids, eos]]
    assert tokens[-1] == "<|im_end|>"
    assert offsets[-1] == len(text)
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens[:-1], offsets[:-1], strict=True):
        if "\ufffd" not in token:
            assert text[offset : offset + len(token)] == token
    assert all(len(entry) == top + 1 for entry in tops[:-1])
    assert tops[0][tokens[0]] == logprobs[0]


def test_ids_that_read_the_same_keep_the_likelier_logprob(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer
) -> None:
    first, second = vocabulary.token_to_id("Ģ"), vocabulary.token_to_id("ģ")
    lead.script = lambda submit: [
        Output(
            submit.request_id,
            [second],
            [TokenLogprobs(-2.0, [(first, -1.0), (second, -2.0)])],
            FinishReason.LENGTH,
        )
    ]
    logprobs = client.completions.create(model=SERVED, prompt="a", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"\ufffd": -1.0}]
    assert logprobs.token_logprobs == [-2.0]


def test_a_prompt_may_fill_the_context_but_for_one_token(client: openai.OpenAI, lead: ScriptedLead) -> None:
    lead.script = lambda submit: steps(submit, [65], FinishReason.LENGTH)
    client.completions.create(model=SERVED, prompt=[65] * (MAX_MODEL_LEN - 1))
    assert lead.submit().params.max_tokens == 1


def test_a_stop_list_with_stream_ends_a_completion(
    server: Server, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer
) -> None:
    lead.script = lambda submit: steps(submit, vocabulary.encode("alpha\n\nbeta").ids, None)
    got = [chunk.choices[0] for chunk in chunks(server, stop=["\n\n", "zzz"])]
    assert "".join(choice.text for choice in got) == "alpha"
    assert got[-1].finish_reason == "stop"
    assert lead.aborted() == lead.submit().request_id


def test_models_are_listed_and_found_by_name(client: openai.OpenAI, server: Server) -> None:
    (listed,) = client.models.list().data
    assert listed.id == SERVED
    one = server.request("GET", f"/v1/models/{SERVED}")
    model = Model.model_validate_json(one.body, strict=True)
    assert model.id == SERVED
    assert (model.model_extra or {})["max_model_len"] == MAX_MODEL_LEN
    reply = server.request("GET", "/v1/models/other")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_health_is_200(server: Server) -> None:
    assert server.request("GET", "/health").status == 200
