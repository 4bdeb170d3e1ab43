"""Who asks what, and when: drawn from a seed, so that every configuration is asked the same.

Knows: times, token ids. Does not know: who answers.

The load is open: a request comes at its time whether or not the earlier ones were answered. Steady requests
are there before the window opens and outlast it; the others come as a Poisson process while it is open. No
two prompts begin alike, so a prefix cache finds nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s` counts from the opening of the window; a steady request's is 0."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of `prompt_tokens` arrive at `rate_per_s` for `window_s`, over `steady` answers under way."""

    window_s: float
    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    steady: int
    steady_prompt_tokens: int
    steady_output_tokens: int
    vocab_size: int

    @property
    def offered_tokens_per_s(self) -> float:
        """Prompt tokens a second, in the mean."""
        return self.rate_per_s * self.prompt_tokens


def steady(load: Load, seed: int) -> list[Arrival]:
    """Those whose answers are under way before the window opens."""
    rng = random.Random(f"steady {seed}")
    return [
        Arrival(0.0, _prompt(rng, load.steady_prompt_tokens, load.vocab_size), load.steady_output_tokens)
        for _ in range(load.steady)
    ]


def arriving(load: Load, seed: int) -> list[Arrival]:
    """Those that arrive while the window is open, in order."""
    rng = random.Random(f"arriving {seed}")
    arrivals = []
    at_s = rng.expovariate(load.rate_per_s)
    while at_s < load.window_s:
        arrivals.append(Arrival(at_s, _prompt(rng, load.prompt_tokens, load.vocab_size), load.output_tokens))
        at_s += rng.expovariate(load.rate_per_s)
    return arrivals


def _prompt(rng: random.Random, tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Ordinary token ids: 0 ends a text."""
    return tuple(rng.randrange(1, vocab_size) for _ in range(tokens))
