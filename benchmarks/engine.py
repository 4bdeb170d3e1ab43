"""Our CPU engine beside transformers: the same random weights, fp32, interleaved in one run.

    OMP_WAIT_POLICY=PASSIVE .venv/bin/python benchmarks/engine.py --threads 2

The model is Qwen3-shaped: 8 layers, hidden 512, 8 query and 4 KV heads of 64, a vocabulary of 32,000 (41.6 M
parameters). Prefill is one prompt of 512 tokens. Decode follows prompts of 128 tokens, greedy. Ours goes
through `Runner.run`, so building the batch and sampling are in its time; theirs is a forward loop with a
`DynamicCache` and argmax. Each round runs ours and theirs one after the other (the order alternates), and the
ratio is the median of the rounds' own ratios: a neighbour on the machine slows both halves of a round alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from tandem_runtime.engine import weights
from tandem_runtime.engine.attention.cpu import CPUAttention
from tandem_runtime.engine.checkpoint import read_config
from tandem_runtime.engine.kv_cache import KVCache
from tandem_runtime.engine.models import build
from tandem_runtime.engine.parallel import Group
from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.engine.runner import Runner
from tandem_runtime.engine.sampler import Sampler
from tandem_runtime.engine.step import AddSlot, Row, Step
from tandem_runtime.kv import KVLayout

SHAPE = Qwen3Config(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
PAGE_TOKENS = 16
DECODE_PROMPT = 128
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    prompt: int
    steps: int  # 0: measure the prefill
    bar: float  # ours / theirs

    @property
    def tokens(self) -> int:
        return self.batch * (self.steps or self.prompt)


CASES = [
    Case("prefill 512", 1, 512, 0, 1.0),
    Case("decode B1", 1, DECODE_PROMPT, 32, 1.0),
    Case("decode B8", 8, DECODE_PROMPT, 16, 1.0),
    Case("decode B32", 32, DECODE_PROMPT, 8, 0.9),
]


class Ours:
    def __init__(self, checkpoint: Path) -> None:
        config = read_config(checkpoint)
        model = build(config, Group(), torch.float32, torch.device("cpu"))
        weights.load(model.parts(), checkpoint, lambda done, total: None)
        model.finish_loading()
        self.layout = KVLayout(config.layers, 1024, config.kv_heads, PAGE_TOKENS, config.head_dim, "float32")
        self.runner = Runner(
            model,
            CPUAttention(KVCache(self.layout), torch.float32),
            self.layout,
            Group(),
            Sampler([]),
            torch.device("cpu"),
            None,
        )
        self.steps = 0

    def step(self, adds: list[AddSlot], rows: list[Row], drops: list[int]) -> list[int]:
        self.steps += 1
        result = self.runner.run(Step(self.steps, 0, drops, adds, rows))
        assert result.error is None, result.error
        return result.tokens

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[list[int]]]:
        """Seconds of the measured part, and the ids of every sequence."""
        pages = self.layout.pages_for(len(prompts[0]) + steps)
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(len(prompts))]
        answers: list[list[int]] = []
        prefill_s = 0.0
        for slot, prompt in enumerate(prompts):
            add = AddSlot(slot, GREEDY, prompt, len(prompt))
            started = time.perf_counter()
            answers.append(self.step([add], [Row(slot, 0, prompt, tables[slot], True)], []))
            prefill_s += time.perf_counter() - started
        started = time.perf_counter()
        for position in range(len(prompts[0]), len(prompts[0]) + steps):
            rows = [Row(slot, position, answer[-1:], [], True) for slot, answer in enumerate(answers)]
            for answer, token in zip(answers, self.step([], rows, []), strict=True):
                answer.append(token)
        decode_s = time.perf_counter() - started
        self.step([], [], list(range(len(prompts))))
        return (decode_s if steps else prefill_s), answers


class Theirs:
    def __init__(self, checkpoint: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[list[int]]]:
        cache = DynamicCache(config=self.model.config)
        tokens = torch.tensor(prompts)
        started = time.perf_counter()
        output = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = [output.logits[:, -1].argmax(-1)]
        prefill_s = time.perf_counter() - started
        started = time.perf_counter()
        for _ in range(steps):
            output = self.model(ids[-1][:, None], past_key_values=cache, use_cache=True)
            ids.append(output.logits[:, -1].argmax(-1))
        decode_s = time.perf_counter() - started
        return (decode_s if steps else prefill_s), torch.stack(ids, 1).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory)
        Qwen3ForCausalLM(SHAPE).save_pretrained(checkpoint)
        ours, theirs = Ours(checkpoint), Theirs(checkpoint)
        print(f"{options.threads} threads, fp32, tok/s, median of {options.rounds} interleaved rounds")
        print(f"{'':12} {'tandem':>8} {'transformers':>13} {'ratio':>6} {'bar':>5}")
        for case in CASES:
            measure(case, ours, theirs, options.rounds)
    return 0


def measure(case: Case, ours: Ours, theirs: Theirs, rounds: int) -> None:
    prompts = torch.randint(0, SHAPE.vocab_size, (case.batch, case.prompt)).tolist()
    mine, peer = [], []
    for round_ in range(rounds + 1):
        if round_ % 2:
            theirs_s, expected = theirs.run(prompts, case.steps)
            ours_s, answers = ours.run(prompts, case.steps)
        else:
            ours_s, answers = ours.run(prompts, case.steps)
            theirs_s, expected = theirs.run(prompts, case.steps)
        assert answers == expected, f"{case.name}: the two disagree"
        if round_:  # the first round warms up
            mine.append(case.tokens / ours_s)
            peer.append(case.tokens / theirs_s)
    ratio = statistics.median(a / b for a, b in zip(mine, peer, strict=True))
    print(
        f"{case.name:12} {statistics.median(mine):8.1f} {statistics.median(peer):13.1f} "
        f"{ratio:6.2f} {case.bar:5.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
