"""Every error that the router itself tells a client, in OpenAI's shape.

    RouterError               status, message, type, code
    ├── Unauthorized          401  no key, or a wrong one
    ├── NoSuchRoute           404  or whatever status aiohttp gives
    ├── BodyTooLarge          413
    ├── NoWorker              503  no decode worker is ready and paired, or none could be reached
    └── WorkerLost            502  a worker took the request and died before the first byte of its answer

After the first byte the status can no longer be told: an event stream gets the body as its last event.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from aiohttp import web


class RouterError(Exception):
    status = 500
    type = "server_error"
    code = ""
    headers: ClassVar[dict[str, str]] = {}

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.type, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        return web.Response(
            body=self.body(), status=self.status, headers=self.headers, content_type="application/json"
        )


class Unauthorized(RouterError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": "Bearer"}

    def __init__(self) -> None:
        super().__init__("No valid API key was given; send it as `Authorization: Bearer KEY`.")


class NoSuchRoute(RouterError):
    type = "invalid_request_error"
    code = "not_found"

    def __init__(self, refusal: web.HTTPException, method: str, path: str) -> None:
        super().__init__(f"{method} {path}: {refusal.reason}")
        self.status = refusal.status


class BodyTooLarge(RouterError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"

    def __init__(self, limit_nbytes: int) -> None:
        super().__init__(f"The body is larger than {limit_nbytes} bytes.")


class NoWorker(RouterError):
    status = 503
    code = "no_worker"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}

    def __init__(self) -> None:
        super().__init__("No decode worker is ready and paired with a prefill worker; retry shortly.")


class WorkerLost(RouterError):
    status = 502
    code = "worker_lost"

    def __init__(self) -> None:
        super().__init__("The worker that served this request is gone.")
