"""Drives a runner as a lead would: opens slots, hands out pages, feeds sampled tokens back."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch

from tandem_runtime.engine import weights
from tandem_runtime.engine.attention.cpu import CPUAttention
from tandem_runtime.engine.checkpoint import read_config
from tandem_runtime.engine.kv_cache import KVCache
from tandem_runtime.engine.models import build
from tandem_runtime.engine.models.llama import kv_share
from tandem_runtime.engine.parallel import Group
from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.engine.runner import Runner
from tandem_runtime.engine.sampler import Sampler
from tandem_runtime.engine.step import AddSlot, Row, Step
from tandem_runtime.kv import KVLayout

if TYPE_CHECKING:
    from pathlib import Path

    from tandem_runtime.engine.runner import Progress
    from tandem_runtime.engine.step import StepResult

PAGE_TOKENS = 16


def greedy_params(tokens: int = 48) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0)


class RecordingProgress:
    """Stands for the layer counter in this process: keeps every value."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def store(self, value: int) -> None:
        self.values.append(value)

    def bump(self) -> None:
        self.values.append(self.values[-1] + 1)


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams
    slot: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    pages: int = 0
    open: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """One rank of `checkpoint` in this process, and the bookkeeping of a lead with pages to spare.

    Pages are handed out in a shuffled order and the pool is full of NaN before anything is computed, so that
    reading a wrong page, or past the end of a right one, shows.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        pages: int = 512,
        group: Group | None = None,
        progress: Progress | None = None,
        poison: float = float("nan"),
    ) -> None:
        config = read_config(checkpoint)
        group = group or Group()
        self.model = build(config, group, torch.float32, torch.device("cpu"))
        weights.load(self.model.parts(), checkpoint, lambda done, total: None)
        self.model.finish_loading()
        kv = kv_share(config, group)
        self.layout = KVLayout(
            config.layers, pages, kv.stop - kv.start, PAGE_TOKENS, config.head_dim, "float32"
        )
        self.cache = KVCache(self.layout)
        self.cache.pool.fill_(poison)
        self.runner = Runner(
            self.model,
            CPUAttention(self.cache, torch.float32),
            self.layout,
            group,
            Sampler(list(config.eos_token_ids)),
            torch.device("cpu"),
            progress,
        )
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(pages))
        self.free: list[int] = shuffled.tolist()
        self.steps = count()
        self.slots = count()
        self.jobs: list[Job] = []

    def add(self, prompt: list[int], params: SamplingParams | None = None) -> Job:
        job = Job(prompt, params or greedy_params(), next(self.slots))
        self.jobs.append(job)
        return job

    def row(self, job: Job, tokens: int) -> Row:
        """The next `tokens` of `job`, with the pages that they need."""
        stop = job.computed + tokens
        needed = self.layout.pages_for(stop) - job.pages
        new_pages = [self.free.pop() for _ in range(needed)]
        job.pages += needed
        return Row(
            job.slot, job.computed, job.tokens[job.computed : stop], new_pages, stop == len(job.tokens)
        )

    def step(self, budget: int) -> StepResult:
        """One pass over every unfinished job: decode rows first, then prompt chunks while the budget
        lasts.
        """
        chosen, rows, adds = [], [], []
        waiting = [job for job in self.jobs if len(job.output) < job.params.max_tokens]
        for job in sorted(waiting, key=lambda job: len(job.tokens) - job.computed):
            tokens = min(len(job.tokens) - job.computed, budget)
            if tokens <= 0:
                continue
            budget -= tokens
            if not job.open:
                adds.append(AddSlot(job.slot, job.params, list(job.tokens), len(job.prompt)))
                job.open = True
            rows.append(self.row(job, tokens))
            chosen.append(job)
        step_id = next(self.steps)
        result = self.runner.run(Step(step_id, step_id * self.layout.layers, [], adds, rows))
        assert result.error is None, result.error
        sampled = iter(result.tokens)
        for job, row in zip(chosen, rows, strict=True):
            job.computed += len(row.tokens)
            if row.sample:
                job.output.append(next(sampled))
        return result

    def run(self, budget: int) -> None:
        while any(len(job.output) < job.params.max_tokens for job in self.jobs):
            self.step(budget)
