"""What the sampler draws: exact distributions by chi-square with fixed seeds, each option by its effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.engine.sampler import History, Sampler, uniform

VOCAB = 8
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5])
DRAWS = 4000
# Chi-square's 99.9 % quantile for 0 to 7 degrees of freedom. The seeds are fixed, so a pass stays a pass.
CRITICAL = (0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32)


def history(tokens: list[int] | None = None, prompt_len: int = 1, seed: int = 7, **params: Any) -> History:
    given = SamplingParams(max_tokens=100, **params)
    return History(given, tokens or [0], prompt_len, given.seed if given.seed is not None else seed)


def draw(rows: list[History], logits: torch.Tensor | None = None, eos: list[int] | None = None) -> list[int]:
    logits = LOGITS.expand(len(rows), -1) if logits is None else logits
    drawn = Sampler(eos or []).draw(logits, rows)
    assert drawn.faults == {}
    return drawn.tokens


def counts(**params: Any) -> list[int]:
    """How often each token is drawn at DRAWS positions of one request."""
    rows = [history([0] * (position + 1), seed=11, **params) for position in range(DRAWS)]
    return torch.bincount(torch.tensor(draw(rows)), minlength=VOCAB).tolist()


def assert_drawn_from(observed: list[int], probabilities: list[float]) -> None:
    assert math.isclose(sum(probabilities), 1.0)
    allowed = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(observed[i] for i in allowed) == DRAWS, "a token with probability zero was drawn"
    chi = sum((observed[i] - DRAWS * probabilities[i]) ** 2 / (DRAWS * probabilities[i]) for i in allowed)
    assert chi <= CRITICAL[len(allowed) - 1], (observed, probabilities)


def softmax(temperature: float = 1.0, keep: set[int] | None = None) -> list[float]:
    weights = [
        math.exp(float(logit) / temperature) if keep is None or i in keep else 0.0
        for i, logit in enumerate(LOGITS)
    ]
    return [weight / sum(weights) for weight in weights]


def test_the_plain_distribution_is_the_softmax() -> None:
    assert_drawn_from(counts(), softmax())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(temperature: float) -> None:
    assert_drawn_from(counts(temperature=temperature), softmax(temperature))


def test_a_temperature_of_zero_or_next_to_it_is_greedy() -> None:
    assert counts(temperature=0.0)[0] == counts(temperature=1e-30)[0] == DRAWS


def test_top_k_keeps_the_k_most_likely() -> None:
    assert_drawn_from(counts(top_k=3), softmax(keep={0, 1, 7}))


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert_drawn_from(counts(top_k=100), softmax())


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = softmax()
    two = probabilities[0] + probabilities[7]
    assert_drawn_from(counts(top_p=two - 0.01), softmax(keep={0, 7}))
    assert_drawn_from(counts(top_p=two + 0.01), softmax(keep={0, 7, 1}))


def test_a_tiny_top_p_keeps_the_most_likely() -> None:
    assert counts(top_p=1e-9)[0] == DRAWS


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    left = softmax(keep={0, 1, 7})
    assert_drawn_from(counts(top_k=3, top_p=left[0] + left[7] - 0.01), softmax(keep={0, 7}))


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely() -> None:
    # e^(1 - 2) = 0.37 and e^(0.5 - 2) = 0.22 of the most likely.
    assert_drawn_from(counts(min_p=0.3), softmax(keep={0, 7, 1}))
    assert_drawn_from(counts(min_p=0.3, top_k=2), softmax(keep={0, 7}))


def test_top_p_of_a_flat_distribution_reaches_past_the_shortlist() -> None:
    rows = [history([0] * (position + 1), top_p=0.999) for position in range(256)]
    drawn = draw(rows, torch.zeros(1, 5000).expand(256, -1))
    assert max(drawn) > 4000
    assert len(set(drawn)) > 200


def test_a_seed_and_a_position_fix_the_token_whatever_the_batch() -> None:
    alone = draw([history([0] * 9, seed=5, temperature=1.3, top_p=0.9)])
    mates = [history([0] * (i + 1), temperature=0.7, top_k=i) for i in range(5)]
    rows = [*mates, history([0] * 9, seed=5, temperature=1.3, top_p=0.9), history(temperature=0.0)]
    assert draw(rows)[5] == alone[0]


def test_other_seeds_draw_other_tokens() -> None:
    drawn = [tuple(draw([history([0] * (p + 1), seed=seed) for p in range(16)])) for seed in range(16)]
    assert len(set(drawn)) == 16


def test_uniform_is_uniform_and_below_one() -> None:
    values = torch.tensor([uniform(-3, position) for position in range(20_000)], dtype=torch.float64)
    assert 0.0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1.0
    buckets = torch.histc(values, bins=20, min=0.0, max=1.0)
    assert float(((buckets - 1000) ** 2 / 1000).sum()) < 43.8  # 99.9 % for 19 degrees


def test_logit_bias_moves_a_token() -> None:
    assert draw([history(temperature=0.0, logit_bias={6: 100.0})]) == [6]
    assert draw([history(temperature=0.0, logit_bias={0: -100.0})]) == [7]


def test_min_tokens_keeps_the_ends_away_until_there_are_enough() -> None:
    stops: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (7,)}
    assert draw([history([0, 5], prompt_len=1, **stops)], eos=[0]) == [1]
    assert draw([history([0, 5, 5], prompt_len=1, **stops)], eos=[0]) == [0]
    assert draw([history([0, 5], prompt_len=1, ignore_eos=True, **stops)], eos=[0]) == [0]


def test_repetition_penalty_holds_against_prompt_and_output() -> None:
    penalty: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 3.0}
    assert draw([history([0], prompt_len=1, **penalty)]) == [7]
    assert draw([history([7, 0], prompt_len=1, **penalty)]) == [1]
    # A negative logit is multiplied, so that it falls as well.
    logits = torch.tensor([[-1.0, -2.0]])
    assert draw([history([0], prompt_len=1, **penalty)], logits) == [1]


def test_presence_and_frequency_penalties_hold_against_the_output_alone() -> None:
    assert draw([history([0], prompt_len=1, temperature=0.0, presence_penalty=2.0)]) == [0]
    assert draw([history([3, 0], prompt_len=1, temperature=0.0, presence_penalty=1.0)]) == [7]
    assert draw([history([3, 0], prompt_len=1, temperature=0.0, frequency_penalty=0.4)]) == [0]
    assert draw([history([3, 0, 0], prompt_len=1, temperature=0.0, frequency_penalty=0.4)]) == [7]


def test_penalties_of_one_row_leave_the_others_and_the_logits_alone() -> None:
    logits = LOGITS.repeat(2, 1)
    assert draw([history(temperature=0.0, logit_bias={0: -100.0}), history(temperature=0.0)], logits) == [
        7,
        0,
    ]
    assert torch.equal(logits, LOGITS.repeat(2, 1))


def test_logprobs_are_of_the_models_own_distribution() -> None:
    rows = [
        history(temperature=0.0, logit_bias={6: 100.0}, logprobs=2),
        history(temperature=0.3, top_k=1),
        history(temperature=0.3, top_k=1, logprobs=0),
    ]
    drawn = Sampler([]).draw(LOGITS.expand(3, -1), rows)
    expected = torch.log_softmax(LOGITS, 0)
    assert drawn.tokens == [6, 0, 0]
    first, second, third = drawn.logprobs
    assert first is not None
    assert first.logprob == pytest.approx(float(expected[6]))
    assert [token for token, _ in first.top] == [0, 7]
    assert [value for _, value in first.top] == pytest.approx([float(expected[0]), float(expected[7])])
    assert second is None
    assert third is not None
    assert (third.logprob, third.top) == (pytest.approx(float(expected[0])), [])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(poison: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = poison
    rows = [history(temperature=temperature, logprobs=1, seed=seed) for seed in range(3)]
    drawn = Sampler([]).draw(logits, rows)
    assert drawn.faults == {1: "the model's logits are not finite"}
    assert drawn.tokens[1] == -1
    assert drawn.logprobs[1] is None
    assert [drawn.tokens[0], drawn.tokens[2]] == draw([rows[0], rows[2]])


def test_a_row_without_an_allowed_token_fails_alone() -> None:
    everything = tuple(range(VOCAB))
    rows = [history(min_tokens=5, stop_token_ids=everything), history(temperature=0.0)]
    drawn = Sampler([]).draw(LOGITS.expand(2, -1), rows)
    assert drawn.faults == {0: "no token is allowed here"}
    assert drawn.tokens == [-1, 0]
