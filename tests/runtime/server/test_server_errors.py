"""What bad input gets: an exact error before anything reaches the lead; and what the lead's own errors
become."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from scripted_lead import steps
from serving import MAX_MODEL_LEN, POOL_TOKENS, SERVED

from tandem_runtime.engine.request import FinishReason
from tandem_runtime.ipc import Output

if TYPE_CHECKING:
    from scripted_lead import ScriptedLead
    from serving import Server

HELLO = [{"role": "user", "content": "Hello"}]

# Fields beside a good request, the `param` that is named, the code.
BOTH: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "0.7"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": "1"}, "seed", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": [1]}, "n", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_value"),
    ({"stop": ["a", 5]}, "stop[1]", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [400]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"logit_bias": {"400": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"ignore_eos": "yes"}, "ignore_eos", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "invalid_type",
    ),
    ({"return_timing": True, "n": 2}, "return_timing", "invalid_value"),
    ({"user": 5}, "user", "invalid_type"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
    ({"made_up": 1}, "made_up", "unknown_parameter"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"model": None}, "model", "invalid_type"),
    ({"model": ...}, "model", "missing_required_parameter"),
]
CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": ...}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "Hello"}, "messages", "invalid_type"),
    ({"messages": ["Hello"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1].role", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": "x", "color": "red"}]},
        "messages[0].color",
        "unknown_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}]},
        "messages[0].content[1].type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
        "unsupported_parameter",
    ),
    ({"messages": [{"role": "user", "content": "x " * 200}]}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens", "context_length_exceeded"),
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"functions": [{}]}, "functions", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "unsupported_parameter",
    ),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"prediction": {}}, "prediction", "unsupported_parameter"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ({"prompt": "x"}, "prompt", "unknown_parameter"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "invalid_type"),
]
COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": ...}, "prompt", "missing_required_parameter"),
    ({"prompt": None}, "prompt", "invalid_value"),
    ({"prompt": 5}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [""]}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": [[5], []]}, "prompt", "invalid_value"),
    ({"prompt": [5, "x"]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["x", 5]}, "prompt[1]", "invalid_type"),
    ({"prompt": [[5], [True]]}, "prompt[1][0]", "invalid_type"),
    ({"prompt": [5, -1]}, "prompt", "invalid_value"),
    ({"prompt": [5, 400]}, "prompt", "invalid_value"),
    ({"prompt": "lorem ipsum " * 500_000}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * MAX_MODEL_LEN}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * (POOL_TOKENS + 1)}, "prompt", "context_length_exceeded"),
    ({"prompt": [[5], [5] * MAX_MODEL_LEN]}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * (MAX_MODEL_LEN - 2), "max_tokens": 3}, "max_tokens", "context_length_exceeded"),
    ({"prompt": ["x"] * 100, "n": 11}, "n", "invalid_value"),
    ({"prompt": ["x", "y"], "return_timing": True}, "return_timing", "invalid_value"),
    ({"logprobs": 6}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"messages": HELLO}, "messages", "unknown_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
]
CASES = [
    *(("/v1/chat/completions", *case) for case in BOTH + CHAT),
    *(("/v1/completions", *case) for case in BOTH + COMPLETIONS),
]


def case_id(value: object) -> str:
    return (
        str(value)[:50] if not isinstance(value, dict) else json.dumps(value, default=lambda _: "absent")[:60]
    )


@pytest.mark.parametrize(("path", "fields", "param", "code"), CASES, ids=case_id)
def test_a_bad_field_is_refused_by_name_before_any_queue(
    server: Server, lead: ScriptedLead, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    good = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    body = {key: value for key, value in ({"model": SERVED} | good | fields).items() if value is not ...}
    reply = server.request("POST", path, body)
    error = reply.error
    assert (reply.status, error["param"], error["code"]) == (
        404 if code == "model_not_found" else 400,
        param,
        code,
    ), error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300
    report = lead.report()
    assert (report.endpoint, report.status, report.output_tokens) == (path, reply.status, 0)
    assert lead.submits.empty()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'{"model": "tiny/model", "prompt": "x", "temperature": NaN}', "invalid_value"),
        (b'{"model": "tiny/model", "prompt": "x", "temperature": 1e999}', "invalid_value"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(
    server: Server, lead: ScriptedLead, body: bytes, code: str
) -> None:
    reply = server.request("POST", "/v1/completions", body)
    assert (reply.status, reply.error["code"]) == (400, code)
    assert reply.error["param"] == ("temperature" if b"temperature" in body else None)
    assert lead.submits.empty()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_and_the_server_goes_on(server: Server, chunked: bool) -> None:
    connection = server.connect()
    piece = b" " * (1 << 20)
    pieces = (piece for _ in range(9))
    if chunked:
        connection.request(
            "POST", "/v1/completions", pieces, encode_chunked=True, headers={"transfer-encoding": "chunked"}
        )
    else:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", str(9 << 20))
        connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "body_too_large"
    connection.close()
    assert server.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/docs", 404),
    ],
)
def test_a_wrong_path_or_method_is_a_json_error(server: Server, method: str, path: str, status: int) -> None:
    reply = server.request(method, path)
    assert (reply.status, reply.error["type"], reply.error["param"]) == (
        status,
        "invalid_request_error",
        None,
    )
    assert path in reply.error["message"]


def test_the_openai_client_raises_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=SERVED, prompt="x", temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def failing(status: int, message: str | None, after: int = 0) -> Any:
    def script(submit: Any) -> list[Output]:
        end = Output(submit.request_id, [], finish=FinishReason.ERROR, error=message, status=status)
        return [*(Output(submit.request_id, [65]) for _ in range(after)), end]

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "shown", "kind"),
    [
        (500, 500, "server_error"),
        (503, 503, "server_error"),
        (400, 400, "invalid_request_error"),
        (200, 500, "server_error"),
    ],
)
def test_an_error_of_the_lead_before_the_first_token_is_its_http_status(
    server: Server, lead: ScriptedLead, status: int, shown: int, kind: str, stream: bool
) -> None:
    lead.script = failing(status, "no prefill worker is ready")
    reply = server.request("POST", "/v1/completions", {"model": SERVED, "prompt": "x", "stream": stream})
    assert (reply.status, reply.error["type"], reply.error["message"]) == (
        shown,
        kind,
        "no prefill worker is ready",
    )
    report = lead.report()
    assert (report.status, report.finish) == (shown, "error" if shown >= 500 else None)


def test_an_error_after_the_first_token_fails_the_whole_answer(
    client: openai.OpenAI, lead: ScriptedLead
) -> None:
    lead.script = failing(500, "NaN logits", after=3)
    with pytest.raises(openai.InternalServerError, match="NaN logits"):
        client.completions.create(model=SERVED, prompt="x")


def test_an_error_after_the_first_byte_of_a_stream_is_an_event_and_the_end(
    server: Server, client: openai.OpenAI, lead: ScriptedLead
) -> None:
    """No finish reason and no [DONE] pretend that the answer is whole."""
    lead.script = failing(503, "decode gave up", after=2)
    body = {"model": SERVED, "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    reply = server.request("POST", "/v1/completions", body)
    *chunks, last = [json.loads(event) for event in reply.events]
    assert reply.status == 200
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    assert last == {
        "error": {
            "message": "decode gave up",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
    }
    assert lead.report().finish == "error"
    with pytest.raises(openai.APIError, match="decode gave up"):
        list(client.completions.create(model=SERVED, prompt="x", stream=True))


def test_an_abort_nobody_here_asked_for_is_an_error_not_a_short_answer(
    client: openai.OpenAI, lead: ScriptedLead
) -> None:
    lead.script = lambda submit: steps(submit, [65], FinishReason.ABORT)
    with pytest.raises(openai.InternalServerError) as error:
        client.completions.create(model=SERVED, prompt="x")
    assert error.value.status_code == 503


def test_one_failed_choice_fails_the_call_and_aborts_the_others(
    client: openai.OpenAI, lead: ScriptedLead
) -> None:
    lead.script = lambda submit: failing(500, "lost", 1)(submit) if submit.params.seed == 1 else []
    with pytest.raises(openai.InternalServerError, match="lost"):
        client.completions.create(model=SERVED, prompt="x", n=2, seed=0)
    assert lead.aborted() == lead.submit().request_id


def test_a_template_that_refuses_the_messages_is_a_bad_request(
    client: openai.OpenAI, lead: ScriptedLead
) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError, match="The last message must not be the assistant's") as error:
        client.chat.completions.create(model=SERVED, messages=messages)
    assert error.value.param == "messages"
    assert lead.submits.empty()
