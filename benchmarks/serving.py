"""Decode's inter-token latency while prompts arrive: disaggregated beside mixed, on the same two cores.

    python benchmarks/serving.py [--quick] [--rounds N] [--rate PROMPTS_PER_S] [--steady N]

Disaggregated is one prefill and one decode worker, mixed is two replicas behind the router; every worker has
one core and one compute thread. Router and client run on whichever core the kernel gives them, and are in the
path of both. Mixed is tried with each chunk size; disaggregated runs with the product's defaults. A round
runs every configuration once, under that round's arrivals, in an order that rotates, so that a busy neighbour
on the machine does not always hurt the same one.

A configuration is started afresh, warmed up with two prompts, given its steady requests, and then measured
for one window: ITL is every gap that ended in the window, of all answers; TTFT counts from the moment a
prompt was due and covers every prompt that arrived in the window, whenever it was answered. `busy` is the
part of the window that a rank spent in forward passes: prefill's is its utilisation; whoever decodes steady
answers has always something to compute, so that there `unanswered` tells whether it keeps up.

Everything measured is written to benchmarks/out/serving.json, ITL over time to benchmarks/out/itl.png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from load.arrivals import Arrival, Load, arriving, steady
from load.checkpoint import VOCAB_SIZE, write_checkpoint
from load.client import Answer, Client, session
from load.comparison import OURS, Run, claim, show
from load.deployment import NAME, Configuration, Deployment, deployed, machine_busy_s
from load.figures import gaps
from load.plot import plot_itl

OUT = Path(__file__).parent / "out"
CHUNKS = (64, 128, 256, 512, 1024)
OURS_CONFIGURATION = Configuration(OURS, mixed=False)
WARM_UP = 2
SETTLE_S = 1.0  # from the last steady request's first token to the opening of the window
STEADY_S = 60.0  # within which every steady request must have its first token
ANSWER_S = 120.0  # after the window, for what arrived in it


async def measure(configuration: Configuration, model: Path, load: Load, seed: int) -> Run:
    """Starts, warms up, measures, stops. Raises what a deployment or a client raises."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    cpus = [frozenset({core}) for core in cores]
    async with deployed(configuration, model, cpus) as deployment, session() as http:
        client = Client(deployment.url, NAME, http)
        await client.play(arriving_together(load, WARM_UP, seed), time.monotonic())
        under_way = [Answer(time.monotonic()) for _ in range(load.steady)]
        tasks = [
            asyncio.create_task(client.stream(arrival, answer))
            for arrival, answer in zip(steady(load, seed), under_way, strict=True)
        ]
        try:
            async with asyncio.timeout(STEADY_S):
                while not all(answer.token_times_s for answer in under_way):
                    await fail_with_the_first(tasks, within_s=0.05)
            await fail_with_the_first(tasks, within_s=SETTLE_S)
            return await window(configuration.name, deployment, client, load, seed, under_way)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def window(
    name: str, deployment: Deployment, client: Client, load: Load, seed: int, under_way: list[Answer]
) -> Run:
    run = Run(name, window_s=load.window_s)
    gc.collect()
    gc.disable()  # this process's pauses would be taken for the workers'
    try:
        before, cpu_before, machine_before = await deployment.metrics(), deployment.cpu_s(), machine_busy_s()
        opened_s = time.monotonic()
        playing = asyncio.create_task(client.play(arriving(load, seed), opened_s))
        await asyncio.sleep(opened_s + load.window_s - time.monotonic())
        closed_s = time.monotonic()
        cpu_after, machine_after, after = deployment.cpu_s(), machine_busy_s(), await deployment.metrics()
        async with asyncio.timeout(ANSWER_S):
            arrived = await playing
    finally:
        gc.enable()
    lasted_s = closed_s - opened_s
    for worker, metrics in after.items():
        forward_s = metrics["tandem_forward_seconds_sum"] - before[worker]["tandem_forward_seconds_sum"]
        run.busy[worker] = forward_s / lasted_s
    run.cpu_s = {process: used_s - cpu_before[process] for process, used_s in cpu_after.items()}
    run.neighbours = max(0.0, machine_after - machine_before - sum(run.cpu_s.values())) / lasted_s
    run.ttft_s = [answer.ttft_s for answer in arrived]
    run.unanswered = sum(answer.token_times_s[0] >= closed_s for answer in arrived)
    for answer in (*under_way, *arrived):
        times = [at_s - opened_s for at_s in answer.token_times_s]
        run.tokens += sum(0 <= at_s < load.window_s for at_s in times)
        run.itl += [(at_s, gap_s) for at_s, gap_s in gaps(times) if 0 <= at_s < load.window_s]
    return run


def arriving_together(load: Load, count: int, seed: int) -> list[Arrival]:
    """`count` prompts at once, to warm up: other tokens than any that are measured."""
    at_once = Load(**{**asdict(load), "steady": count, "steady_prompt_tokens": load.prompt_tokens})
    return [Arrival(0.0, arrival.prompt, 4) for arrival in steady(at_once, -1 - seed)]


async def fail_with_the_first(tasks: list[asyncio.Task[Answer]], *, within_s: float) -> None:
    """Waits that long, or until a steady request ends, which none should: then raises its error."""
    done, _ = await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        raise RuntimeError("a steady request ended before the window closed")


async def compare(
    configurations: list[Configuration], model: Path, load: Load, rounds: int
) -> list[dict[str, Run]]:
    """Every configuration once a round."""
    done: list[dict[str, Run]] = []
    for number in range(rounds):
        turn = number % len(configurations)
        runs = {}
        for configuration in configurations[turn:] + configurations[:turn]:
            run = await measure(configuration, model, load, seed=number)
            runs[run.name] = run
            print(
                f"round {number + 1}: {run.name}: TTFT p50 {run.ttft_p50_s * 1e3:.0f} ms, "
                f"ITL p99 {run.itl_p99_s * 1e3:.0f} ms; neighbours used {run.neighbours:.2f} cores",
                flush=True,
            )
        done.append(runs)
    return done


def save(rounds: list[dict[str, Run]], load: Load) -> None:
    OUT.mkdir(exist_ok=True)
    raw = {
        "load": asdict(load),
        "rounds": [{name: asdict(run) for name, run in done.items()} for done in rounds],
    }
    (OUT / "serving.json").write_text(json.dumps(raw))
    first = rounds[0]
    plot_itl(
        OUT / "itl.png",
        [(name, first[name].itl) for name in sorted(first, key=lambda name: (name != OURS, len(name), name))],
        [arrival.at_s for arrival in arriving(load, 0)],
        load.window_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round, three chunk sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=20.0, help="seconds measured")
    parser.add_argument("--rate", type=float, default=0.8, help="prompts a second, in the mean")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of an arriving prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of its answer")
    parser.add_argument("--steady", type=int, default=4, help="answers under way all the time")
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS, help="mixed's tokens a step")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.window, options.chunks = 1, min(options.window, 10.0), (64, 256, 1024)
    load = Load(
        window_s=options.window,
        rate_per_s=options.rate,
        prompt_tokens=options.prompt,
        output_tokens=options.output,
        steady=options.steady,
        steady_prompt_tokens=32,
        steady_output_tokens=4000,
        vocab_size=VOCAB_SIZE,
    )
    configurations = [OURS_CONFIGURATION] + [
        Configuration(f"mixed, chunk {chunk}", mixed=True, max_batched_tokens=chunk)
        for chunk in options.chunks
    ]
    names = [configuration.name for configuration in configurations]
    print(
        f"{load.rate_per_s:g} prompts/s of {load.prompt_tokens} tokens ({load.offered_tokens_per_s:.0f} "
        f"tok/s), {load.output_tokens} out each, over {load.steady} steady answers; {options.rounds} rounds "
        f"of {load.window_s:g} s; load average before: {os.getloadavg()[0]:.2f}"
    )
    begin_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-model-")))
        write_checkpoint(model)
        gc.collect()
        gc.freeze()
        rounds = asyncio.run(compare(configurations, model, load, options.rounds))
    save(rounds, load)
    print(
        f"\nMedian (least-most) of {options.rounds} rounds; busy: time in forward passes, worker by worker."
    )
    print(show(rounds, names))
    print(claim(rounds, names))
    neighbours = max(run.neighbours for done in rounds for run in done.values())
    print(
        f"other processes used at most {neighbours:.2f} cores during a window; "
        f"{time.monotonic() - begin_s:.0f} s in all"
    )


if __name__ == "__main__":
    main()
