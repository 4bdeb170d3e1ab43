"""/v1/chat/completions as OpenAI's client library and its types see it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted_lead import steps
from serving import MAX_MODEL_LEN, SERVED

from tandem_runtime.engine.request import FinishReason
from tandem_runtime.ipc import Output, Timing

if TYPE_CHECKING:
    import openai
    import tokenizers
    from scripted_lead import ScriptedLead
    from serving import Server

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXT = "The capital of France is Paris. 你好 😀"


@pytest.fixture
def text_ids(vocabulary: tokenizers.Tokenizer) -> list[int]:
    return list(vocabulary.encode(TEXT).ids)


def chunks(server: Server, **fields: Any) -> list[ChatCompletionChunk]:
    """A whole stream, every chunk valid by OpenAI's types without coercion, ended by [DONE]."""
    body = {"model": SERVED, "messages": HELLO, "stream": True} | fields
    reply = server.request("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = reply.events
    assert done == "[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            assert {"index", "delta", "finish_reason", "logprobs"} <= set(choice)
    return [ChatCompletionChunk.model_validate_json(event, strict=True) for event in events]


def test_an_answer_has_the_text_usage_and_ids_of_what_was_sampled(
    server: Server, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, text_ids: list[int], eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos], cached_tokens=3)
    body = {"model": SERVED, "messages": HELLO, "return_token_ids": True}
    reply = server.request("POST", "/v1/chat/completions", body)
    answer = ChatCompletion.model_validate_json(reply.body, strict=True)
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert lead.submit().prompt == vocabulary.encode(prompt).ids
    assert answer.id.startswith("chatcmpl-")
    assert reply.headers["x-request-id"] == answer.id
    assert (answer.object, answer.model) == ("chat.completion", SERVED)
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", TEXT, None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(vocabulary.encode(prompt).ids)
    assert answer.usage.completion_tokens == len(text_ids) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    extra = json.loads(reply.body)
    assert extra["prompt_token_ids"] == vocabulary.encode(prompt).ids
    assert extra["choices"][0]["token_ids"] == [*text_ids, eos]


def test_a_stream_is_role_then_content_then_an_empty_finish(
    server: Server, lead: ScriptedLead, text_ids: list[int], eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos])
    first, *middle, last = chunks(server)
    assert first.choices[0].delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
    assert all(list(chunk.choices[0].delta.model_dump(exclude_unset=True)) == ["content"] for chunk in middle)
    assert all(chunk.choices[0].delta.content for chunk in middle)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == TEXT
    assert last.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert [chunk.choices[0].finish_reason for chunk in (first, *middle, last)] == [None] * (
        len(middle) + 1
    ) + ["stop"]
    assert (
        len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in (first, *middle, last)}) == 1
    )
    assert all("usage" not in chunk.model_fields_set for chunk in (first, *middle, last))


def test_include_usage_adds_one_chunk_without_choices(
    server: Server, lead: ScriptedLead, text_ids: list[int], eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos], cached_tokens=2)
    *before, last = chunks(server, stream_options={"include_usage": True})
    assert all(
        chunk.choices and chunk.usage is None and "usage" in chunk.model_fields_set for chunk in before
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(text_ids) + 1
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 2


def test_the_openai_client_reads_answers_and_streams(
    client: openai.OpenAI, lead: ScriptedLead, text_ids: list[int], eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos])
    answer = client.chat.completions.create(model=SERVED, messages=HELLO)
    assert answer.choices[0].message.content == TEXT
    with client.chat.completions.stream(model=SERVED, messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT
    history = [
        *HELLO,
        answer.choices[0].message.model_dump(),
        *HELLO,
    ]  # our own answer, with all its null fields
    assert client.chat.completions.create(model=SERVED, messages=history).choices[0].finish_reason == "stop"


def test_without_a_limit_the_answer_may_fill_the_context(client: openai.OpenAI, lead: ScriptedLead) -> None:
    lead.script = lambda submit: steps(submit, [65], FinishReason.LENGTH)
    answer = client.chat.completions.create(model=SERVED, messages=HELLO)
    submit = lead.submit()
    assert len(submit.prompt) + submit.params.max_tokens == MAX_MODEL_LEN
    assert answer.choices[0].finish_reason == "length"


def test_every_sampling_option_reaches_the_engine(
    client: openai.OpenAI, lead: ScriptedLead, eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [eos])
    client.chat.completions.create(
        model=SERVED,
        messages=HELLO,
        max_completion_tokens=9,
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        logit_bias={"5": -100, "7": 1},
        seed=42,
        logprobs=True,
        top_logprobs=4,
        user="somebody",
        metadata={"a": "b"},
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 1,
            "stop_token_ids": [8, 9],
            "ignore_eos": True,
            "priority": -2,
        },
    )
    submit = lead.submit()
    params = submit.params
    assert submit.priority == -2
    assert (params.max_tokens, params.min_tokens, params.seed, params.top_k) == (9, 1, 42, 3)
    assert (params.temperature, params.top_p, params.min_p) == (0.0, 0.5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.5, 0.25, 1.2)
    assert params.logit_bias == {5: -100.0, 7: 1.0}
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((8, 9), True, 4)


def test_n_choices_draw_with_consecutive_seeds_and_share_one_prompt(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, eos: int
) -> None:
    def script(submit: Any) -> list[Output]:
        ids = vocabulary.encode(f"seed {submit.params.seed}").ids
        return steps(submit, [*ids, eos], cached_tokens=0 if submit.params.seed == 10 else 5)

    lead.script = script
    answer = client.chat.completions.create(model=SERVED, messages=HELLO, n=3, seed=10)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["seed 10", "seed 11", "seed 12"]
    submits = [lead.submit() for _ in range(3)]
    assert len({submit.request_id for submit in submits}) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(submits[0].prompt)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_choices_interleave_each_with_its_own_role_and_finish(
    server: Server, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, eos: int
) -> None:
    waiting: list[Any] = []

    def script(submit: Any) -> list[Output]:
        waiting.append(submit)
        if len(waiting) < 2:
            return []
        each = [steps(own, [*vocabulary.encode(f"choice {i}").ids, eos]) for i, own in enumerate(waiting)]
        return [output for pair in zip(*each, strict=True) for output in pair]

    lead.script = script
    got = [chunk.choices[0] for chunk in chunks(server, n=2)]
    assert [choice.index for choice in got[:4]] == [0, 0, 1, 1]
    for index in (0, 1):
        own = [choice for choice in got if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == f"choice {index}"
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_one_entry_per_token_with_its_bytes(
    client: openai.OpenAI, lead: ScriptedLead, text_ids: list[int], eos: int, stream: bool
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos])
    options: Any = {"model": SERVED, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    if stream:
        entries = [
            entry
            for chunk in client.chat.completions.create(**options, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
    else:
        logprobs = client.chat.completions.create(**options).choices[0].logprobs
        assert logprobs is not None
        entries = logprobs.content or []
    assert [entry.logprob for entry in entries] == [-token / 1000 for token in [*text_ids, eos]]
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == TEXT.encode() + b"<|im_end|>"
    assert all([top.logprob for top in entry.top_logprobs] == [0, -1] for entry in entries)
    assert entries[0].top_logprobs[1].token == "<|im_start|>"


def test_an_impossible_tokens_logprob_is_a_number(
    client: openai.OpenAI, lead: ScriptedLead, eos: int
) -> None:
    from tandem_runtime.engine.request import TokenLogprobs

    lead.script = lambda submit: [
        Output(submit.request_id, [eos], [TokenLogprobs(float("-inf"), [])], finish=FinishReason.STOP)
    ]
    answer = client.chat.completions.create(model=SERVED, messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].logprob == -9999.0


@pytest.mark.parametrize("at_once", [1, 2, 50])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_nothing_sampled_after_it_shows(
    server: Server, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, stream: bool, at_once: int
) -> None:
    """The lead goes on for a while, as it does until the Abort arrives, and ends with `length`: the choice
    still ends in `stop`."""
    ids = vocabulary.encode("One. Stop here and there").ids
    lead.script = lambda submit: steps(submit, ids, FinishReason.LENGTH, at_once=at_once)
    fields = {"stop": ["op her", "zzz"], "return_token_ids": True, "logprobs": True}
    body = {"model": SERVED, "messages": HELLO, "stream": stream} | fields
    if stream:
        got = [chunk.choices[0] for chunk in chunks(server, **fields)]
        text = "".join(choice.delta.content or "" for choice in got)
        finish = [choice.finish_reason for choice in got if choice.finish_reason]
        tokens = [token for choice in got for token in (choice.model_extra or {}).get("token_ids", [])]
    else:
        (choice,) = json.loads(server.request("POST", "/v1/chat/completions", body).body)["choices"]
        text, finish, tokens = choice["message"]["content"], [choice["finish_reason"]], choice["token_ids"]
        assert len(choice["logprobs"]["content"]) == len(tokens)
    assert (text, finish) == ("One. St", ["stop"])
    needed = next(n for n in range(len(ids)) if "op her" in vocabulary.decode(ids[:n]))
    assert tokens == ids[:needed]
    assert lead.report().output_tokens == needed


def test_a_stop_string_aborts_the_request_at_the_lead(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer
) -> None:
    lead.script = lambda submit: steps(submit, vocabulary.encode("to be STOP").ids, None, cached_tokens=7)
    answer = client.chat.completions.create(model=SERVED, messages=HELLO, stop=" STOP")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("to be", "stop")
    assert lead.aborted() == lead.submit().request_id
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


def test_an_empty_delta_is_not_sent_while_a_stop_string_may_begin(
    server: Server, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer
) -> None:
    ids = [vocabulary.token_to_id(char) for char in "abcabx"]
    lead.script = lambda submit: steps(submit, ids, FinishReason.LENGTH)
    contents = [chunk.choices[0].delta.content for chunk in chunks(server, stop="abcd")[1:-1]]
    assert contents == ["abc", "abx"]


def test_a_stop_tokens_text_is_not_shown_though_it_is_counted(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, eos: int
) -> None:
    ids = vocabulary.encode("Yes.").ids
    lead.script = lambda submit: steps(submit, ids)
    answer = client.chat.completions.create(
        model=SERVED, messages=HELLO, extra_body={"stop_token_ids": [ids[-1]]}
    )
    assert answer.choices[0].message.content == "Yes"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)


def test_with_ignore_eos_the_end_token_is_just_a_token_without_text(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, eos: int
) -> None:
    a, b = vocabulary.encode("a").ids[0], vocabulary.encode("b").ids[0]
    lead.script = lambda submit: steps(submit, [a, eos, b], FinishReason.LENGTH)
    answer = client.chat.completions.create(model=SERVED, messages=HELLO, extra_body={"ignore_eos": True})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "length")


def test_bytes_that_never_became_a_character_are_flushed_at_the_end(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer
) -> None:
    ids = [vocabulary.token_to_id(char) for char in "aðŁĺ"]
    lead.script = lambda submit: steps(submit, ids, FinishReason.LENGTH)
    assert (
        client.chat.completions.create(model=SERVED, messages=HELLO).choices[0].message.content == "a\ufffd"
    )


@pytest.mark.parametrize("include_usage", [False, True])
def test_timing_comes_in_the_final_chunk_or_the_whole_answer(
    server: Server, lead: ScriptedLead, eos: int, include_usage: bool
) -> None:
    timing = Timing(
        0.25,
        prefill_s=1.5,
        transfer_s=0.5,
        exposed_s=0.125,
        kv_nbytes=4096,
        hidden_nbytes=3072,
        prefill_node="p",
        decode_node="d",
    )
    lead.script = lambda submit: steps(submit, [65, eos], timing=timing)
    body = {"model": SERVED, "messages": HELLO, "return_timing": True}
    whole = json.loads(server.request("POST", "/v1/chat/completions", body).body)
    expected = {
        "queue_s": 0.25, "prefill_s": 1.5, "prefill_queue_s": None, "transfer_s": 0.5, "exposed_s": 0.125,
        "kv_nbytes": 4096, "hidden_nbytes": 3072, "prefill_node": "p", "decode_node": "d",
    }  # fmt: skip
    assert whole["timing"] == expected
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    *before, last = chunks(server, return_timing=True, **options)
    assert last.choices == []
    assert (last.model_extra or {})["timing"] == expected
    assert (last.usage is not None) == include_usage
    assert not any("timing" in (chunk.model_extra or {}) for chunk in before)


def test_text_parts_are_joined_and_names_reach_the_template(
    client: openai.OpenAI, lead: ScriptedLead, vocabulary: tokenizers.Tokenizer, eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [eos])
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(model=SERVED, messages=[{"role": "user", "name": "ann", "content": parts}])
    assert "user\none\ntwo<|im_end|>" in vocabulary.decode(lead.submit().prompt, skip_special_tokens=False)


def test_what_is_switched_off_by_its_value_is_not_refused(
    server: Server, lead: ScriptedLead, eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [eos])
    body = {
        "model": SERVED, "messages": HELLO, "tools": [], "tool_choice": "none", "modalities": ["text"],
        "response_format": {"type": "text"}, "audio": None, "stop": None, "temperature": None, "n": None,
        "logit_bias": None, "stream": False, "stream_options": None, "best_of": 1, "top_k": -1,
        "store": False, "service_tier": "auto",
        "parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "y",
    }  # fmt: skip
    reply = server.request("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert lead.submit().params.top_k == 0


def test_a_report_tells_what_the_client_saw(
    client: openai.OpenAI, lead: ScriptedLead, text_ids: list[int], eos: int
) -> None:
    lead.script = lambda submit: steps(submit, [*text_ids, eos])
    list(client.chat.completions.create(model=SERVED, messages=HELLO, stream=True))
    report, submit = lead.report(), lead.submit()
    assert (report.endpoint, report.status, report.finish) == ("/v1/chat/completions", 200, "stop")
    assert (report.prompt_tokens, report.output_tokens) == (len(submit.prompt), len(text_ids) + 1)
    assert report.ttft_s is not None
    assert len(report.itl_s) == len(text_ids)
    assert all(gap_s >= 0 for gap_s in report.itl_s)
    assert report.e2e_s >= report.ttft_s + sum(report.itl_s)
