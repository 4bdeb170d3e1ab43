"""One rank's passes: slots, the batch, the model, the sampler.

Knows: what the lead has said about each slot. Does not know: requests, transfers, sockets.

The rank keeps, per slot, the page table and (where it samples) the tokens. It never believes its own samples:
tokens come from the lead, in `AddSlot.history` and in the rows, so a lost or repeated result cannot put the
two at odds. A step's drops, adds, new pages and row tokens are applied before the pass. **When the pass fails
they stay applied and nothing else has changed**: the lead may send the same rows again without `new_pages`,
or drop their slots. A failed pass may have written keys and values at its rows' own positions, which nobody
reads before they are written again.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from .attention.base import Batch, Sequence
from .sampler import Drawn, History, Sampler
from .step import RowFault, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..kv import KVLayout
    from .attention.base import Attention
    from .parallel import Group
    from .step import AddSlot, Row, Step

log = logging.getLogger(__name__)


class Progress(Protocol):
    """The layer counter."""

    def store(self, value: int) -> None: ...
    def bump(self) -> None: ...


class Model(Protocol):
    """Of a model, what a pass uses."""

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, layer_done: Callable[[], None]
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class SlotMismatch(Exception):
    """The lead and this rank disagree about a slot. A bug, and fatal: nothing that the rank holds can be
    trusted.
    """


@dataclass(slots=True)
class _Slot:
    history: History | None  # None on prefill workers
    pages: list[int] = field(default_factory=list)


class Runner:
    """`progress` is None on ranks whose layers nobody waits for: all but rank 0 of a prefill worker."""

    def __init__(
        self,
        model: Model,
        attention: Attention,
        layout: KVLayout,
        group: Group,
        sampler: Sampler,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._layout = layout
        self._group = group
        self._sampler = sampler
        self._device = device
        self._progress = progress
        self._slots: dict[int, _Slot] = {}

    def run(self, step: Step) -> StepResult:
        """Never raises: what goes wrong is in the result."""
        started = time.perf_counter()
        drawn = Drawn([], [])
        try:
            self._apply(step)
            if step.rows:
                drawn = self._forward(step)
        except Exception as error:  # the fault boundary of a pass
            log.exception("step %d failed", step.step_id)
            return StepResult(
                step.step_id, [], [], error=f"{type(error).__name__}: {error}", fatal=self._is_fatal(error)
            )
        sampled = [i for i, row in enumerate(step.rows) if row.sample]
        return StepResult(
            step.step_id,
            drawn.tokens,
            drawn.logprobs,
            [RowFault(sampled[i], message) for i, message in drawn.faults.items()],
            forward_s=time.perf_counter() - started,
        )

    def _is_fatal(self, error: Exception) -> bool:
        """With several ranks the others now wait in a collective that this rank will never join."""
        if isinstance(error, torch.OutOfMemoryError) and self._group.size == 1:
            return False
        return isinstance(error, (SlotMismatch, torch.AcceleratorError)) or self._group.size > 1

    def _apply(self, step: Step) -> None:
        for slot in step.drops:
            if self._slots.pop(slot, None) is None:
                raise SlotMismatch(f"slot {slot} is dropped, but not open")
        for add in step.adds:
            if add.slot in self._slots:
                raise SlotMismatch(f"slot {add.slot} is added, but open")
            self._slots[add.slot] = _Slot(_history(add))
        for row in step.rows:
            self._extend(row)

    def _extend(self, row: Row) -> None:
        slot = self._slots.get(row.slot)
        if slot is None:
            raise SlotMismatch(f"slot {row.slot} has a row, but is not open")
        slot.pages.extend(row.new_pages)
        stop = row.start + len(row.tokens)
        if not row.tokens or self._layout.pages_for(stop) > len(slot.pages):
            raise SlotMismatch(
                f"slot {row.slot} has {len(slot.pages)} pages for tokens {row.start} to {stop}"
            )
        if any(not 0 <= page < self._layout.pages for page in row.new_pages):
            raise SlotMismatch(
                f"slot {row.slot} gets pages {row.new_pages}; the pool has {self._layout.pages}"
            )
        if slot.history is None:
            if row.sample:
                raise SlotMismatch(f"slot {row.slot} is to be sampled, but has no sampling parameters")
            return
        tokens = slot.history.tokens
        if row.start > len(tokens):
            raise SlotMismatch(f"slot {row.slot} goes on at {row.start}; {len(tokens)} tokens are known")
        tokens.extend(row.tokens[len(tokens) - row.start :])
        if row.sample and stop != len(tokens):
            raise SlotMismatch(f"slot {row.slot} is to be sampled after {stop} of {len(tokens)} tokens")

    @torch.inference_mode()
    def _forward(self, step: Step) -> Drawn:
        if self._progress is not None:
            self._progress.store(step.counter_base)
        batch = self._batch(step.rows)
        self._attention.prepare(batch)
        layer_done = self._progress.bump if self._progress is not None else _nobody_waits
        hidden = self._model.forward(batch.tokens, batch.positions, self._attention, layer_done)
        last, histories = [], []
        end = 0
        for row in step.rows:
            end += len(row.tokens)
            if row.sample:
                last.append(end - 1)
                history = self._slots[row.slot].history
                assert history is not None
                histories.append(history)
        if not last:
            return Drawn([], [])
        logits = self._model.logits(hidden[last])
        if self._group.rank > 0:  # rank 0 alone draws; the lead tells everyone which token it was
            return Drawn([-1] * len(last), [None] * len(last))
        return self._sampler.draw(logits, histories)

    def _batch(self, rows: list[Row]) -> Batch:
        size = self._layout.page_tokens
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sequences = []
        for row in rows:
            pages = self._slots[row.slot].pages
            stop = row.start + len(row.tokens)
            tokens += row.tokens
            positions += range(row.start, stop)
            slots += [pages[p // size] * size + p % size for p in range(row.start, stop)]
            sequences.append(Sequence(row.start, stop, pages))
        return Batch(
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            torch.tensor(slots, device=self._device),
            sequences,
        )


def _history(add: AddSlot) -> History | None:
    if add.params is None:
        return None
    seed = add.params.seed if add.params.seed is not None else secrets.randbits(64)
    return History(add.params, list(add.history), add.prompt_len, seed)


def _nobody_waits() -> None:
    pass
