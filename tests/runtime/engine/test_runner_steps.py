"""A runner's contract with the lead: what a step changes, and what it leaves when it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from driver import PAGE_TOKENS, Driver, RecordingProgress, greedy_params
from tiny_checkpoints import greedy, oracle, random_prompt

from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.engine.step import AddSlot, Row, RowFault, Step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from tandem_runtime.engine.attention.base import Attention

GREEDY = greedy_params()


@pytest.fixture
def driver(tiny_qwen3: Path) -> Driver:
    return Driver(tiny_qwen3)


def add(slot: int, prompt: list[int], params: SamplingParams | None = GREEDY) -> AddSlot:
    return AddSlot(slot, params, prompt, len(prompt))


class BreakingModel:
    """The real model, failing after the first layer's keys and values as long as `broken`."""

    def __init__(self, driver: Driver, error: Exception) -> None:
        self.inner, self.error, self.broken = driver.model, error, True
        driver.runner._model = self

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, layer_done: Callable[[], None]
    ) -> Tensor:
        def fail() -> None:
            layer_done()
            raise self.error

        return self.inner.forward(tokens, positions, attention, fail if self.broken else layer_done)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)


def test_a_failed_pass_is_repeated_without_new_pages_and_answers_as_if_nothing_had_happened(
    driver: Driver, tiny_qwen3: Path
) -> None:
    prompt = random_prompt(33)
    expected = greedy(oracle(tiny_qwen3), prompt, 3)
    model = BreakingModel(driver, ValueError("no luck"))
    rows = [Row(0, 0, prompt, [4, 9, 2], True)]
    failed = driver.runner.run(Step(0, 0, [], [add(0, prompt)], rows))
    assert (failed.error, failed.fatal) == ("ValueError: no luck", False)
    assert (failed.tokens, failed.logprobs) == ([], [])
    model.broken = False
    output = driver.runner.run(Step(1, 2, [], [], [Row(0, 0, prompt, [], True)])).tokens
    model.broken = True
    decode = [Row(0, 33, output[-1:], [], True)]
    assert driver.runner.run(Step(2, 4, [], [], decode)).error is not None
    model.broken = False
    output += driver.runner.run(Step(3, 6, [], [], decode)).tokens
    output += driver.runner.run(Step(4, 8, [], [], [Row(0, 34, output[-1:], [], True)])).tokens
    assert output == expected


def test_a_slot_of_a_failed_pass_can_be_dropped_and_opened_again(driver: Driver) -> None:
    prompt = random_prompt(5)
    model = BreakingModel(driver, ValueError("no luck"))
    driver.runner.run(Step(0, 0, [], [add(0, prompt)], [Row(0, 0, prompt, [4], True)]))
    model.broken = False
    again = Step(1, 2, [0], [add(0, prompt)], [Row(0, 0, prompt, [7], True)])
    assert driver.runner.run(again).error is None


def test_a_fault_of_the_device_is_fatal(driver: Driver) -> None:
    BreakingModel(driver, torch.AcceleratorError("illegal memory access"))
    result = driver.runner.run(Step(0, 0, [], [add(0, [5, 6])], [Row(0, 0, [5, 6], [4], True)]))
    assert result.fatal


def test_running_out_of_memory_is_not_fatal(driver: Driver) -> None:
    BreakingModel(driver, torch.OutOfMemoryError("too big"))
    result = driver.runner.run(Step(0, 0, [], [add(0, [5, 6])], [Row(0, 0, [5, 6], [4], True)]))
    assert result.error is not None
    assert not result.fatal


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(1, 0, [1], [], []), "slot 1 is dropped, but not open"),
        (Step(1, 0, [], [add(0, [5])], []), "slot 0 is added, but open"),
        (Step(1, 0, [], [], [Row(2, 0, [5], [1], False)]), "slot 2 has a row, but is not open"),
        (Step(1, 0, [], [], [Row(0, 0, [5] * 17, [], False)]), "slot 0 has 1 pages for tokens 0 to 17"),
        (Step(1, 0, [], [], [Row(0, 2, [5], [9999], False)]), "slot 0 gets pages [9999]; the pool has 512"),
        (Step(1, 0, [], [], [Row(0, 4, [5], [], True)]), "slot 0 goes on at 4; 2 tokens are known"),
        (Step(1, 0, [], [], [Row(0, 0, [5], [], True)]), "slot 0 is to be sampled after 1 of 2 tokens"),
        (
            Step(1, 0, [], [add(1, [5, 6], None)], [Row(1, 0, [5], [1], True)]),
            "slot 1 is to be sampled, but has no sampling parameters",
        ),
    ],
)
def test_a_lead_that_disagrees_about_a_slot_is_fatal(driver: Driver, step: Step, message: str) -> None:
    opened = driver.runner.run(Step(0, 0, [], [add(0, [5, 6])], [Row(0, 0, [5, 6], [3], True)]))
    assert opened.error is None
    result = driver.runner.run(step)
    assert (result.error, result.fatal) == (f"SlotMismatch: {message}", True)


def test_a_step_without_rows_only_moves_slots(driver: Driver) -> None:
    result = driver.runner.run(Step(0, 0, [], [add(0, [5, 6])], []))
    assert (result.error, result.tokens) == (None, [])
    result = driver.runner.run(Step(1, 0, [0], [add(0, [7])], [Row(0, 0, [7], [3], True)]))
    assert (result.error, len(result.tokens)) == (None, 1)


def test_the_layer_counter_starts_each_pass_at_its_base_and_moves_once_a_layer(tiny_llama: Path) -> None:
    progress = RecordingProgress()
    driver = Driver(tiny_llama, progress=progress)
    prompt = random_prompt(20)
    rows = [Row(0, 0, prompt[:19], [0, 1], False)]
    driver.runner.run(Step(0, 6, [], [add(0, prompt, None)], rows))
    assert progress.values == [6, 7, 8]
    BreakingModel(driver, ValueError("no luck"))
    driver.runner.run(Step(1, 8, [], [], rows))
    assert progress.values == [6, 7, 8, 8, 9]


def test_keys_and_values_are_in_the_pool_before_the_counter_says_so(tiny_llama: Path) -> None:
    class LookingProgress(RecordingProgress):
        def bump(self) -> None:
            layer = self.values[-1]
            page = driver.cache.pool[layer, 3, :, :, :5]
            assert bool(page.isfinite().all())
            super().bump()

    driver = Driver(tiny_llama, progress=LookingProgress())
    result = driver.runner.run(Step(0, 0, [], [add(0, [5] * 6, None)], [Row(0, 0, [5] * 5, [3], False)]))
    assert result.error is None


def test_prompt_chunks_and_decode_rows_share_a_pass(driver: Driver, tiny_qwen3: Path) -> None:
    model = oracle(tiny_qwen3)
    first = driver.add(random_prompt(33), greedy_params(20))
    driver.step(64)
    second = driver.add(random_prompt(300), greedy_params(10))
    third = driver.add(random_prompt(2), greedy_params(10))
    driver.run(40)
    for job in (first, second, third):
        assert job.output == greedy(model, job.prompt, job.params.max_tokens)


def test_a_nan_in_one_request_fails_that_row_and_no_other(driver: Driver, tiny_qwen3: Path) -> None:
    prompts = [random_prompt(20, seed) for seed in range(3)]
    jobs = [driver.add(prompt, greedy_params(2)) for prompt in prompts]
    driver.step(1000)
    # The keys of the second request's first page go bad: say, a broken write.
    table = driver.runner._slots[jobs[1].slot].pages
    driver.cache.pool[0, table[0]] = float("nan")
    rows = [driver.row(job, 1) for job in jobs]
    result = driver.runner.run(Step(9, 0, [], [], rows))
    assert result.faults == [RowFault(1, "the model's logits are not finite")]
    assert result.tokens[1] == -1
    model = oracle(tiny_qwen3)
    for index in (0, 2):
        expected = greedy(model, prompts[index], 2)
        assert [*jobs[index].output, result.tokens[index]] == expected


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_lies_behind_a_sequence_in_its_pages_does_not_leak(tiny_llama: Path, poison: float) -> None:
    driver = Driver(tiny_llama, poison=poison)
    lengths = [1, 15, 16, 17, 40]
    jobs = [driver.add(random_prompt(length), greedy_params(18)) for length in lengths]
    driver.run(24)
    model = oracle(tiny_llama)
    for job in jobs:
        assert job.output == greedy(model, job.prompt, 18)


def test_a_request_that_comes_back_after_preemption_goes_on_where_it_was(driver: Driver) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, frequency_penalty=0.5)
    whole = driver.add(random_prompt(20), params)
    driver.run(1000)
    cut = driver.add(random_prompt(20), params)
    for _ in range(5):
        driver.step(1000)
    # Preempted: dropped, then added again with what it has produced, everything to be computed anew.
    cut.slot, cut.computed, cut.pages, cut.open = next(driver.slots), 0, 0, False
    history = AddSlot(cut.slot, params, list(cut.tokens), 20)
    result = driver.runner.run(Step(99, 0, [], [history], [driver.row(cut, len(cut.tokens))]))
    cut.computed, cut.open = len(cut.tokens), True
    cut.output += result.tokens
    driver.run(1000)
    assert cut.output == whole.output


def test_requests_without_a_seed_differ(driver: Driver) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0)
    jobs = [driver.add(random_prompt(20), params) for _ in range(2)]
    driver.run(1000)
    assert jobs[0].output != jobs[1].output


def test_pages_hold_whole_runs_of_tokens_per_head(tiny_llama: Path) -> None:
    driver = Driver(tiny_llama)
    shape = driver.cache.pool.shape
    assert shape == driver.layout.shape
    assert shape[4] == PAGE_TOKENS
    key, value = driver.cache.key(1), driver.cache.value(1)
    assert key.stride() == value.stride()
    base = driver.cache.pool.data_ptr()
    assert key[5, 1].data_ptr() - base == driver.layout.page_offset(1, 5, 1)
    assert value[5, 1].data_ptr() - key[5, 1].data_ptr() == driver.layout.head_nbytes // 2
