"""What one forward pass computes: the message the lead sends to every rank, and what comes back.

Knows: slots, token ids, page tables. Does not know: requests, text, transfers.

Ranks are stateful: `adds` opens slots, `drops` closes them (drops are applied first, so a slot may be reused
in the same step), and each row then carries only what is new. Page ids are physical and equal on all ranks.
"""

from __future__ import annotations

import msgspec

from .request import SamplingParams, TokenLogprobs


class AddSlot(msgspec.Struct, frozen=True, array_like=True):
    """Open `slot`. `history` is prompt + output so far, needed for penalties; `prompt_len` splits the two.

    On prefill workers, which have no sampler, `params` is None and `history` empty.
    """

    slot: int
    params: SamplingParams | None
    history: list[int]
    prompt_len: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Compute `tokens` at positions `[start, start + len(tokens))` of `slot`.

    `new_pages` are appended to the slot's page table before the pass. `sample` asks for one token from the
    last position.
    """

    slot: int
    start: int
    tokens: list[int]
    new_pages: list[int]
    sample: bool


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One pass. `counter_base` is what the layer counter must read before the first layer: passes so far,
    times layers. Rank 0 stores it at the start of the pass, which also moves the counter past a pass that
    failed half way.
    """

    step_id: int
    counter_base: int
    drops: list[int]
    adds: list[AddSlot]
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class RowFault(msgspec.Struct, frozen=True, array_like=True):
    """One row's request failed (say, NaN logits); the others are sound. `row` indexes `Step.rows`."""

    row: int
    message: str


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """`tokens[i]` belongs to the i-th row of the step with `sample`; -1 where that row is in `faults`.

    `error` set means the whole pass failed and nothing of it may be used: then `tokens` may be empty. `fatal`
    means the device is unusable.
    """

    step_id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    faults: list[RowFault] = []
    error: str | None = None
    fatal: bool = False
    forward_s: float = 0.0


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress while weights load: bytes read of bytes in all."""

    done_nbytes: int
    total_nbytes: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The rank is ready. File descriptors ride beside this message by SCM_RIGHTS, in this order:
    the KV pool's memfd, and from rank 0 also the layer counter's memfd and its eventfd."""

    rank: int
    pool_nbytes: int
    weights_nbytes: int
    pid: int


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The model cannot be served; `message` is one line that names the file, tensor or field at fault."""

    message: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish and exit 0."""


FromRank = Loading | Loaded | LoadFailed | StepResult
ToRank = Step | Shutdown
