"""Draw one token for each row of logits.

Knows: sampling parameters, a request's tokens so far. Does not know: text, slots, the model.

The order is that of vLLM: logprobs are taken from the model's own distribution, before anything below; then
min_tokens, logit_bias, penalties (repetition over prompt and output, presence and frequency over the output);
then greedy rows take the most likely token, and the others are divided by the temperature and cut by min_p,
top_k, top_p.

A token depends only on its own row: it is found by inverting the cumulative distribution at one uniform
number, a hash of the request's seed and the token's position. So batch mates, preemption and a repeated pass
change nothing.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from .request import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

GREEDY_BELOW = 1e-5  # a temperature below this would overflow the division
# Tokens sorted at first where top_p cuts without top_k: sorting a whole vocabulary costs milliseconds a row.
SHORTLIST = 512


@dataclass(slots=True)
class History:
    """What the sampler must know of one request. `tokens` is prompt + output; `prompt_len` splits the two.

    `seed` is the request's, or random where it gave none.
    """

    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    seed: int

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(slots=True)
class Drawn:
    """`tokens[i]` is -1 where `i` is in `faults`, a message for each row that cannot be drawn from."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    faults: dict[int, str] = field(default_factory=dict)


class Sampler:
    def __init__(self, eos_token_ids: list[int]) -> None:
        self._eos = eos_token_ids

    def draw(self, logits: Tensor, rows: list[History]) -> Drawn:
        """`logits` is `[len(rows), vocab]` and is left as it is."""
        logits = logits.float()
        adjusted = self._adjust(logits, rows)
        highest, best = adjusted.max(dim=1)  # a NaN anywhere in a row is its maximum
        tokens = best.tolist()
        faults = {}
        for row in (~highest.isfinite()).nonzero()[:, 0].tolist():
            nan = bool(highest[row].isnan()) or bool(highest[row] > 0)
            faults[row] = "the model's logits are not finite" if nan else "no token is allowed here"
            tokens[row] = -1
        warm = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW and i not in faults]
        for restricted in (False, True):
            chosen = [i for i in warm if _restricted(rows[i].params) is restricted]
            if chosen:
                picked = _pick(adjusted[chosen], [rows[i] for i in chosen], restricted=restricted)
                for i, token in zip(chosen, picked, strict=True):
                    tokens[i] = token
        return Drawn(tokens, _logprobs(logits, tokens, rows, faults), faults)

    def _adjust(self, logits: Tensor, rows: list[History]) -> Tensor:
        """Apply min_tokens, logit_bias and penalties, to a copy if any row has them."""
        adjusted = logits
        for i, history in enumerate(rows):
            params = history.params
            too_short = len(history.tokens) - history.prompt_len < params.min_tokens
            penalized = (
                params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
            )
            if not (too_short or params.logit_bias or penalized):
                continue
            if adjusted is logits:
                adjusted = logits.clone()
            row = adjusted[i]
            if too_short:
                stops = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)]
                row[stops] = -torch.inf
            if params.logit_bias:
                row[list(params.logit_bias)] += torch.tensor(
                    list(params.logit_bias.values()), device=row.device
                )
            if penalized:
                _penalize(row, history)
        return adjusted


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 52 bits, the same for the same seed and position everywhere."""
    packed = struct.pack("<QQ", seed % (1 << 64), position)
    (word,) = struct.unpack("<Q", hashlib.blake2b(packed, digest_size=8).digest())
    # With 52 bits `u * total < total` holds in double precision, so the last token of weight zero is never
    # drawn.
    return float(word >> 12) / float(1 << 52)


def _penalize(row: Tensor, history: History) -> None:
    params = history.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(history.tokens, dtype=np.int64))).to(row.device)
        logits = row[seen]
        row[seen] = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(np.asarray(history.output, dtype=np.int64), return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(penalty).to(row)


def _restricted(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _pick(logits: Tensor, rows: list[History], *, restricted: bool) -> list[int]:
    """Draw from each row's distribution; all rows have a temperature, and top_k or top_p if `restricted`."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([row.params.temperature for row in rows])
    weights = torch.softmax(logits / temperature.float(), dim=1)
    if any(row.params.min_p > 0 for row in rows):
        least = column([row.params.min_p for row in rows]) * weights.amax(dim=1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0.0)
    ids = None
    if restricted:
        weights, ids = _cut(weights, rows, column([row.params.top_p for row in rows]))
    # Positions, not steps: prompt + output so far is where the new token will stand.
    points = column([uniform(row.seed, len(row.tokens)) for row in rows])
    cumulative = weights.double().cumsum(dim=1)
    index = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    if ids is not None:
        index = ids.gather(1, index)
    picked: list[int] = index[:, 0].tolist()
    return picked


def _cut(weights: Tensor, rows: list[History], top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the top_k most likely, and of those the fewest whose mass reaches top_p; sorted, with token
    ids.
    """
    vocab = weights.shape[1]
    top_k = [min(row.params.top_k, vocab) or vocab for row in rows]
    mass = weights.sum(dim=1, dtype=torch.float64)[:, None]
    size = min(vocab, max(k if k < vocab else SHORTLIST for k in top_k))
    kept, ids = weights.topk(size, dim=1)
    limits = torch.tensor(top_k, device=weights.device)[:, None]
    if size < vocab:
        # Without top_k the shortlist must hold all of top_p's mass, or it is cut too early.
        short = (kept.sum(dim=1, dtype=torch.float64)[:, None] < top_p * mass) & (limits == vocab)
        if bool(short.any()):
            kept, ids = weights.sort(dim=1, descending=True)
    kept = kept.double()
    ranks = torch.arange(kept.shape[1], device=weights.device)
    kept = kept.masked_fill(ranks >= limits, 0.0)
    mass = torch.where(limits == vocab, mass, kept.sum(dim=1, keepdim=True))
    before = kept.cumsum(dim=1) - kept
    return kept.masked_fill((before >= top_p * mass) & (ranks > 0), 0.0), ids


def _logprobs(
    logits: Tensor, tokens: list[int], rows: list[History], faults: dict[int, str]
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and i not in faults]
    if not wanted:
        return result
    logprobs = torch.log_softmax(logits[wanted], dim=1)
    size = max(rows[i].params.logprobs or 0 for i in wanted)
    values, ids = (part.tolist() for part in logprobs.topk(size, dim=1))
    for place, i in enumerate(wanted):
        k = rows[i].params.logprobs
        top = list(zip(ids[place][:k], values[place][:k], strict=True))
        result[i] = TokenLogprobs(float(logprobs[place, tokens[i]]), top)
    return result
