"""Where a decode step's time goes: the forward pass is the limit, the rest is ours.

    python benchmarks/decode_step.py [--seconds S]

One prefill and one decode worker, no prompts but the first ones: B answers are streamed at once. In the
steady state a token's latency is one turn of the lead's loop: plan, send the step, forward pass, receive the
result, apply. Server, router and client only follow, but they take CPU time; where everything shares one
core, that time comes out of the turn. So the same is measured with the decode worker confined to one core and
with it free to use both.

Printed per step: the client's mean ITL, the rank's forward pass, the lead's own plan and apply, what is left
over (messages, waking up, waiting for the core), and the CPU time that each process used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from load.arrivals import Load, steady
from load.checkpoint import VOCAB_SIZE, write_checkpoint
from load.client import Answer, Client, session
from load.deployment import NAME, Configuration, deployed
from load.figures import gaps, table

PROMPT_TOKENS = 128
SETTLE_S = 2.0
BATCHES = (1, 8)
DECODE = "decode-0"
PROCESSES = (f"{DECODE} rank", f"{DECODE} lead", f"{DECODE} server", "router", "client")


async def measure(model: Path, batch: int, *, one_core: bool, seconds: float) -> list[str]:
    """One row of the table."""
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    cpus = [frozenset({first}), frozenset({last}) if one_core else None]
    load = Load(1.0, 1.0, 1, 1, batch, PROMPT_TOKENS, 3900, VOCAB_SIZE)
    configuration = Configuration("decode", mixed=False)
    async with deployed(configuration, model, cpus) as deployment, session() as http:
        client = Client(deployment.url, NAME, http)
        answers = [Answer(time.monotonic()) for _ in range(batch)]
        tasks = [
            asyncio.create_task(client.stream(arrival, answer))
            for arrival, answer in zip(steady(load, batch), answers, strict=True)
        ]
        try:
            while not all(answer.token_times_s for answer in answers):
                done, _ = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            await asyncio.sleep(SETTLE_S)
            before, cpu_before, opened_s = await deployment.metrics(), deployment.cpu_s(), time.monotonic()
            await asyncio.sleep(seconds)
            closed_s, cpu_after, after = time.monotonic(), deployment.cpu_s(), await deployment.metrics()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def grown(name: str) -> float:
        return after[DECODE][name] - before[DECODE][name]

    steps = grown("tandem_forward_seconds_count")
    forward_s = grown("tandem_forward_seconds_sum") / steps
    overhead_s = grown("tandem_step_overhead_seconds_sum") / grown("tandem_step_overhead_seconds_count")
    itl_s = [gap_s for a in answers for at_s, gap_s in gaps(a.token_times_s) if opened_s <= at_s < closed_s]
    mean_s = sum(itl_s) / len(itl_s)
    times = [mean_s, forward_s, overhead_s, mean_s - forward_s - overhead_s]
    times += [(cpu_after[process] - cpu_before[process]) / steps for process in PROCESSES]
    return [f"B={batch}, {'one core' if one_core else 'free'}", *(f"{value * 1e3:.2f}" for value in times)]


async def compare(model: Path, seconds: float) -> list[list[str]]:
    return [
        await measure(model, batch, one_core=one_core, seconds=seconds)
        for batch in BATCHES
        for one_core in (True, False)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="measured for each row")
    options = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}; ms per step")
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as directory:
        write_checkpoint(Path(directory))
        rows = asyncio.run(compare(Path(directory), options.seconds))
    cpu = [f"CPU {process.removeprefix(f'{DECODE} ')}" for process in PROCESSES]
    print(table(["decode", "ITL", "forward", "plan+apply", "left over", *cpu], rows))


if __name__ == "__main__":
    main()
