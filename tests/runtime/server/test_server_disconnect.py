"""A client that leaves stops its request at the lead at once, whatever it was waiting for."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from scripted_lead import steps
from serving import SERVED

from tandem_runtime.engine.request import FinishReason
from tandem_runtime.ipc import Output

if TYPE_CHECKING:
    from scripted_lead import ScriptedLead
    from serving import Server


def ask(server: Server, path: str = "/v1/completions", **fields: Any) -> socket.socket:
    """Send a request and return its socket without reading the answer."""
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = json.dumps({"model": SERVED} | prompt | fields).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def settled(server: Server, lead: ScriptedLead) -> None:
    """The server answers the next request: whatever was going wrong did not spread."""
    lead.script = lambda submit: steps(submit, [65], FinishReason.LENGTH)
    assert server.request("POST", "/v1/completions", {"model": SERVED, "prompt": "x"}).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts(
    server: Server, lead: ScriptedLead, path: str, stream: bool
) -> None:
    sock = ask(server, path, stream=stream)
    submit = lead.submit()
    sock.close()
    assert lead.aborted() == submit.request_id
    report = lead.report()
    assert (report.endpoint, report.status, report.finish, report.ttft_s) == (path, 499, "abort", None)
    settled(server, lead)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_amid_the_tokens_aborts(server: Server, lead: ScriptedLead, stream: bool) -> None:
    lead.script = lambda submit: steps(submit, [65, 66], None)
    sock = ask(server, stream=stream)
    submit = lead.submit()
    if stream:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    sock.close()
    assert lead.aborted() == submit.request_id
    report = lead.report()
    assert (report.status, report.finish) == (499, "abort")
    settled(server, lead)


def test_leaving_aborts_every_open_choice_and_only_those(server: Server, lead: ScriptedLead) -> None:
    lead.script = lambda submit: steps(submit, [65], FinishReason.LENGTH if submit.params.seed == 1 else None)
    sock = ask(server, n=3, seed=0, stream=True)
    submits = [lead.submit() for _ in range(3)]
    received = b""
    while b'"length"' not in received:  # the second choice has ended
        received += sock.recv(1 << 16)
    sock.close()
    assert {lead.aborted(), lead.aborted()} == {submits[0].request_id, submits[2].request_id}
    assert lead.report().status == 499
    assert lead.aborts.empty()


def test_tokens_that_cross_an_abort_are_dropped_in_silence(server: Server, lead: ScriptedLead) -> None:
    sock = ask(server, stream=True)
    submit = lead.submit()
    lead.hold_aborts = True
    sock.close()
    assert lead.aborted() == submit.request_id
    lead.send(Output(submit.request_id, [65]), Output(submit.request_id, [], finish=FinishReason.ABORT))
    lead.hold_aborts = False
    settled(server, lead)


def test_leaving_while_the_body_is_on_its_way_reaches_nobody(server: Server, lead: ScriptedLead) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    sock.close()
    assert lead.report().status == 499
    assert lead.submits.empty()
    settled(server, lead)


def test_a_finished_answer_aborts_nothing(server: Server, lead: ScriptedLead) -> None:
    lead.script = lambda submit: steps(submit, [65], FinishReason.LENGTH)
    for stream in (False, True):
        with contextlib.closing(ask(server, stream=stream)) as sock:
            response = http.client.HTTPResponse(sock)
            response.begin()
            assert response.status == 200
            response.read()
        lead.report()
    settled(server, lead)
    assert lead.aborts.empty()


def test_a_kept_connection_serves_one_request_after_another(server: Server, lead: ScriptedLead) -> None:
    lead.script = lambda submit: steps(submit, [65], FinishReason.LENGTH)
    with contextlib.closing(server.connect()) as connection:
        for stream in (False, True, False):
            connection.request(
                "POST", "/v1/completions", json.dumps({"model": SERVED, "prompt": "x", "stream": stream})
            )
            response = connection.getresponse()
            assert response.status == 200
            response.read()


def test_a_slow_reader_gets_every_token_and_holds_nobody_up(server: Server, lead: ScriptedLead) -> None:
    """More than the socket's buffers hold is on its way to a client that does not read yet."""
    wide = {"logprobs": True, "top_logprobs": 20, "return_token_ids": True, "ignore_eos": True}
    submits = []

    def script(submit: Any) -> list[Output]:
        submits.append(submit)
        return steps(submit, [65] * 4000, FinishReason.LENGTH)

    lead.script = script
    with contextlib.closing(ask(server, "/v1/chat/completions", stream=True, **wide)) as sock:
        lead.submit()
        settled(server, lead)
        response = http.client.HTTPResponse(sock)
        response.begin()
        events = response.read().decode().split("\n\n")
    tokens = [token for event in events[1:-4] for token in json.loads(event[6:])["choices"][0]["token_ids"]]
    assert len(tokens) == 4000 - 1 or len(tokens) == 4000
    assert events[-2] == "data: [DONE]"
