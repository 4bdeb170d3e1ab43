"""What of the KV transfer is left when prefill has computed its last layer, beside one layer's compute.

    python benchmarks/transfer.py [--rounds N] [--prompts N] [--providers net ...] [--chunks 512 ...]

A prompt of 2,048 tokens to move (one more is decode's own first step) is prefilled on one core and decoded on
the other, one at a time, with chunks of 512 and 2,048 tokens, over net and shm. The figures are the answer's
own `timing`: `prefill_s` ends when prefill's fabric thread sees the last layer done, `exposed_s` is from then
to the last write counted at decode; both sides read one clock. A layer's time is `prefill_s` over layers and
chunks, so that the last layer, which cannot hide, is compared with its own compute. The bar is that layer
and 5 ms more.

`last layer at` is the rate at which the last chunk's last layer crossed, at the least: its bytes over the
whole of `exposed_s`, waking up and counting included. `hidden` is the share of all bytes whose writes had
completed when the last layer was done; `can hide` is the limit, the share that exists before then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from load.arrivals import Arrival, Load, steady
from load.checkpoint import LAYERS, VOCAB_SIZE, write_checkpoint
from load.client import Answer, Client, session
from load.deployment import NAME, Configuration, deployed
from load.figures import Spread, table

TOKENS = 2048
CHUNKS = (512, 2048)
PROVIDERS = ("net", "shm")
OUTPUT_TOKENS = 4  # so that prefill's last message, which no answer waits for, has come by the end
BAR_S = 0.005
TIMED = ("prefill_s", "exposed_s", "kv_nbytes", "hidden_nbytes")


async def measure(model: Path, provider: str, chunk: int, prompts: int, seed: int) -> list[dict[str, float]]:
    """The timing of each prompt but the first, which warms up. Raises RequestFailed."""
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    providers = ("net", "tcp") if provider == "net" else (provider,)
    configuration = Configuration("transfer", False, max_batched_tokens=chunk, providers=providers)
    load = Load(1.0, 1.0, 1, 1, prompts + 1, TOKENS + 1, OUTPUT_TOKENS, VOCAB_SIZE)
    async with (
        deployed(configuration, model, [frozenset({first}), frozenset({last})]) as deployment,
        session() as http,
    ):
        client = Client(deployment.url, NAME, http)
        timings = [checked(await timing(client, arrival)) for arrival in steady(load, seed)]
    return timings[1:]


async def timing(client: Client, arrival: Arrival) -> dict[str, Any]:
    answer = Answer(0.0)
    await client.stream(arrival, answer)
    return answer.timing


def checked(timing: dict[str, Any]) -> dict[str, float]:
    """Raises RuntimeError when prefill's part is missing: leaving such answers out would flatter."""
    missing = [name for name in TIMED if timing.get(name) is None]
    if missing:
        raise RuntimeError(f"the answer's timing has no {', '.join(missing)}: {timing}")
    return {name: float(timing[name]) for name in TIMED}


def row(provider: str, chunk: int, rounds: list[list[dict[str, float]]]) -> list[str]:
    """Each figure is the median within a round, and its spread over rounds."""

    def spread(figure: Any) -> Spread:
        return Spread.of([Spread.of([figure(one) for one in done]).median for done in rounds])

    passes = LAYERS * -(-TOKENS // chunk)
    exposed = spread(lambda one: one["exposed_s"])
    layer = spread(lambda one: one["prefill_s"] / passes)
    worst_s = max(one["exposed_s"] for done in rounds for one in done)
    last_layer = min(chunk, TOKENS) / TOKENS / LAYERS
    return [
        f"{provider}, chunk {chunk}",
        spread(lambda one: one["prefill_s"]).show(scale=1e3),
        layer.show(".1f", 1e3),
        exposed.show(".2f", 1e3),
        f"{worst_s * 1e3:.2f}",
        "yes" if exposed.median <= layer.median + BAR_S else "NO",
        spread(lambda one: one["kv_nbytes"]).show(".1f", 1e-6),
        spread(lambda one: last_layer * one["kv_nbytes"] / one["exposed_s"]).show(".2f", 1e-9),
        spread(lambda one: one["hidden_nbytes"] / one["kv_nbytes"]).show(".1f", 100) + " %",
        f"{1 - last_layer:.1%}",
    ]


async def compare(model: Path, cases: list[tuple[str, int]], rounds: int, prompts: int) -> list[list[str]]:
    done: dict[tuple[str, int], list[list[dict[str, float]]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            timings = await measure(model, *case, prompts, seed=number)
            done[case].append(timings)
            exposed = ", ".join(f"{timing['exposed_s'] * 1e3:.2f}" for timing in timings)
            print(f"round {number + 1}: {case[0]}, chunk {case[1]}: exposed {exposed} ms", flush=True)
    return [row(*case, done[case]) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6, help="measured in each round")
    parser.add_argument("--providers", nargs="*", default=PROVIDERS)
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS, help="prefill's tokens a step")
    options = parser.parse_args()
    cases = [(provider, chunk) for provider in options.providers for chunk in options.chunks]
    print(
        f"{TOKENS} tokens, {LAYERS} layers; medians of {options.prompts} prompts, spread over "
        f"{options.rounds} rounds; load average before: {os.getloadavg()[0]:.2f}"
    )
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as directory:
        write_checkpoint(Path(directory))
        rows = asyncio.run(compare(Path(directory), cases, options.rounds, options.prompts))
    header = ["transfer", "prefill ms", "a layer ms", "exposed ms", "worst ms", "within bar"]
    header += ["MB", "last layer at GB/s", "hidden", "can hide"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
