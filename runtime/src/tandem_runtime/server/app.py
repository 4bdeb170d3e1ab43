"""The routes: OpenAI's API in front of one lead.

    body ─► parse ─► plan (validate, tokenize) ─► Generation ─► whole answer or event stream
            └──────── 400, 404, 413 ────────┘

Every refusal comes before anything reaches the lead. Bodies are read here and not by FastAPI, which would
take them at any size and turn "0.7" into a number.
"""

from __future__ import annotations

import logging
import time
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from .answer import Model, ModelList
from .chat import ChatAnswer, plan_chat
from .completion import CompletionAnswer, plan_completion
from .errors import ApiError, BodyTooLarge, LeadLost, UnknownModel
from .generate import Generation
from .protocol import ChatRequest, CompletionRequest
from .stream import ClientGone, EventStream, collect, events, until_gone
from .tally import CLIENT_GONE, Tally
from .validate import parse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .lead import Lead
    from .stream import Answer
    from .tokenizer import Tokenizer
    from .validate import Plan

    Prepare = Callable[[bytes], Awaitable[tuple[Plan, Answer]]]

logger = logging.getLogger(__name__)

MAX_BODY_NBYTES = 8 << 20  # parsing holds the loop, 25 ms per MiB of token ids


class Endpoints:
    def __init__(self, lead: Lead, tokenizer: Tokenizer, served_name: str) -> None:
        self._lead = lead
        self._tokenizer = tokenizer
        self._served_name = served_name
        self._model = Model(served_name, int(time.time()), lead.limits.max_model_len)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self._prepare_chat)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, self._prepare_completion)

    async def models(self) -> Response:
        return _json(ModelList([self._model]))

    async def model(self, name: str) -> Response:
        if name != self._served_name:
            raise UnknownModel(name, self._served_name)
        return _json(self._model)

    async def health(self) -> Response:
        if self._lead.lost.is_set():
            raise LeadLost
        return Response(b"{}", media_type="application/json")

    async def _prepare_chat(self, body: bytes) -> tuple[Plan, Answer]:
        request = parse(ChatRequest, body)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        plan = await plan_chat(request, request_id, self._served_name, self._tokenizer, self._lead.limits)
        return plan, ChatAnswer(request, plan, int(time.time()), self._tokenizer)

    async def _prepare_completion(self, body: bytes) -> tuple[Plan, Answer]:
        request = parse(CompletionRequest, body)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        plan = await plan_completion(
            request, request_id, self._served_name, self._tokenizer, self._lead.limits
        )
        return plan, CompletionAnswer(request, plan, int(time.time()), self._tokenizer)

    async def _answer(self, request: Request, prepare: Prepare) -> Response:
        """One HTTP request from its body to its response, reported to the lead exactly once."""
        tally = Tally(request.url.path)
        try:
            body = await _read_body(request)
            response = await until_gone(request.receive, self._respond(body, prepare, tally))
        except (ClientGone, ClientDisconnect):
            tally.status, tally.finish = CLIENT_GONE, "abort"
            response = Response(status_code=CLIENT_GONE)  # goes nowhere
        except ApiError as error:
            tally.status = error.status
            tally.finish = "error" if error.status >= 500 else None
            response = _error(error)
        except Exception:  # fault boundary: a defect of ours fails this request only
            logger.exception("%s failed", tally.endpoint)
            tally.status, tally.finish = 500, "error"
            response = _error(ApiError(500, "Internal error."))
        if not isinstance(response, EventStream):  # which reports when it ends
            self._lead.report(tally.report())
        return response

    async def _respond(self, body: bytes, prepare: Prepare, tally: Tally) -> Response:
        plan, answer = await prepare(body)
        generation = Generation(self._lead, self._tokenizer, plan, tally)
        headers = {"x-request-id": plan.id}
        if not answer.stream:
            choices = await collect(generation, plan.num_choices)
            return _json(answer.whole(choices, generation.usage, generation.timing), headers)
        rest = events(generation, answer)
        first = await anext(rest)
        return EventStream(first, rest, headers, tally, lambda: self._lead.report(tally.report()))


def create_app(lead: Lead, tokenizer: Tokenizer, served_name: str) -> FastAPI:
    endpoints = Endpoints(lead, tokenizer, served_name)
    app = FastAPI(title="Tandem", openapi_url=None, redirect_slashes=False)
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.completion, methods=["POST"])
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoints.model, methods=["GET"])
    app.add_api_route("/health", endpoints.health, methods=["GET"])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    return app


async def _read_body(request: Request) -> bytes:
    """Raises BodyTooLarge as soon as that is known."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_NBYTES:
        raise BodyTooLarge(MAX_BODY_NBYTES)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_NBYTES:
            raise BodyTooLarge(MAX_BODY_NBYTES)
    return bytes(body)


def _json(content: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers=headers)


def _error(error: ApiError) -> Response:
    # The rest of a body that is too large is not read: the connection cannot be used again.
    headers = {"connection": "close"} if isinstance(error, BodyTooLarge) else None
    return Response(error.body(), error.status, media_type="application/json", headers=headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase}."
    response = _error(ApiError(error.status_code, message, code=HTTPStatus(error.status_code).name.lower()))
    response.headers.update(error.headers or {})
    return response
