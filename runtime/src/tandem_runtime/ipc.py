"""Messages between a pod's HTTP server process and its lead, msgpack over a unix socket.

Framing: a 4-byte little-endian length, then one message. The lead greets first with `Limits`. Every `Submit`
ends in exactly one `Output` with `finish` set, unless the connection breaks, which aborts all requests
submitted on it.
"""

from __future__ import annotations

import msgspec

from .engine.request import FinishReason, SamplingParams, TokenLogprobs


class Limits(msgspec.Struct, frozen=True, tag="limits"):
    """What the server needs to refuse a bad request before any queue."""

    served_name: str
    model_path: str
    role: str
    vocab_size: int
    max_model_len: int
    pool_tokens: int  # tokens the whole page pool can hold
    eos_token_ids: list[int]


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client left or a stop string matched. The lead answers with a final `Output` all the same."""

    request_id: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """One HTTP request as its client saw it, for the pod's metrics. `status` is the HTTP status."""

    endpoint: str
    status: int
    finish: str | None
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    itl_s: list[float]
    e2e_s: float


class Timing(msgspec.Struct, frozen=True):
    """Where one request's time went, in seconds. The transfer fields are None when nothing crossed the
    fabric.

    `exposed_s` is the time from the end of the last layer's compute on prefill to the last write counted on
    decode; it is None when the two sides do not share a clock. `hidden_nbytes` of `kv_nbytes` had crossed
    when that layer ended: behind the compute.
    """

    queue_s: float
    prefill_s: float | None = None
    prefill_queue_s: float | None = None
    transfer_s: float | None = None
    exposed_s: float | None = None
    kv_nbytes: int = 0
    hidden_nbytes: int | None = None
    prefill_node: str | None = None
    decode_node: str | None = None


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Tokens of one step, or the end of a request. `error` is a message for the client, set with `finish ==
    "error"`; `status` is the HTTP status such an error deserves."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] = []
    finish: FinishReason | None = None
    error: str | None = None
    status: int = 200
    cached_tokens: int = 0
    timing: Timing | None = None


FromServer = Submit | Abort | Report
ToServer = Limits | Output
