"""Every error that a client is told, as OpenAI's body says it.

    ApiError                  status, message, param, code
    ├── BadRequest            400  the request is wrong; `param` names the field
    │   └── ContextTooLong         the prompt, or prompt + max_tokens, does not fit
    ├── UnknownModel          404
    ├── BodyTooLarge          413
    ├── GenerationFailed           the lead ended the request with an error and said which status it deserves
    └── LeadLost              503  the connection to the lead is gone; this process is about to exit

After the first byte of a stream the status can no longer be told; the body still is.
"""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class BadRequest(ApiError):
    def __init__(self, message: str, *, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(400, message, param=param, code=code)


class ContextTooLong(BadRequest):
    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnknownModel(ApiError):
    def __init__(self, name: str, served: str) -> None:
        message = f"The model {name!r} does not exist here; this server serves {served!r}."
        super().__init__(404, message, param="model", code="model_not_found")


class BodyTooLarge(ApiError):
    def __init__(self, limit_nbytes: int) -> None:
        super().__init__(413, f"The body is larger than {limit_nbytes} bytes.", code="body_too_large")


class GenerationFailed(ApiError):
    """`status` is the lead's; anything that is no error status becomes 500."""

    def __init__(self, status: int, message: str) -> None:
        status = status if 400 <= status < 600 else 500
        super().__init__(status, message, code="generation_failed")


class LeadLost(ApiError):
    def __init__(self) -> None:
        super().__init__(503, "The engine of this worker is gone.", code="engine_lost")
