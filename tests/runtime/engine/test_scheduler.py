"""Exact sequences of passes for every role, and what each event does to a request in each state."""

from __future__ import annotations

import pytest
from scripted_rank import EOS, VOCAB, World, expected_output, rows_of

from tandem_crds.role_config import Role
from tandem_runtime.engine.request import FinishReason, SamplingParams, Status
from tandem_runtime.engine.scheduler import MAX_OVERTAKEN
from tandem_runtime.engine.step import RowFault


def prompt(count: int, first: int = 0) -> list[int]:
    return [(first * 37 + i * 11 + 3) % EOS for i in range(count)]


# --- Exact passes. A row is (slot, start, tokens, new pages, sample).

PASSES = {
    "one prompt in one pass, then token by token": (
        {"role": Role.MIXED, "budget": 64},
        [("a", 5, 3)],
        [[(0, 0, 5, 1, True)], [(0, 5, 1, 0, True)], [(0, 6, 1, 0, True)]],
    ),
    "a prompt of one token": (
        {"role": Role.MIXED},
        [("a", 1, 2)],
        [[(0, 0, 1, 1, True)], [(0, 1, 1, 0, True)]],
    ),
    "a prompt larger than the budget is cut, and only its last chunk samples": (
        {"role": Role.MIXED, "budget": 16},
        [("a", 40, 1)],
        [[(0, 0, 16, 3, False)], [(0, 16, 16, 0, False)], [(0, 32, 8, 0, True)]],
    ),
    "a budget of one token": (
        {"role": Role.MIXED, "budget": 1},
        [("a", 3, 2)],
        [
            [(0, 0, 1, 1, False)],
            [(0, 1, 1, 0, False)],
            [(0, 2, 1, 0, True)],
            [(0, 3, 1, 0, True)],
        ],
    ),
    "the rest of the budget goes to the next prompt": (
        {"role": Role.MIXED, "budget": 24},
        [("a", 20, 2), ("b", 30, 1)],
        [
            [(0, 0, 20, 2, True), (1, 0, 4, 2, False)],
            [(0, 20, 1, 0, True), (1, 4, 23, 0, False)],
            [(1, 27, 3, 0, True)],
        ],
    ),
    "a new page comes with the token that needs it": (
        {"role": Role.MIXED},
        [("a", 15, 4)],
        [[(0, 0, 15, 1, True)], [(0, 15, 1, 0, True)], [(0, 16, 1, 1, True)], [(0, 17, 1, 0, True)]],
    ),
    "a slot is used again in the pass that drops it": (
        {"role": Role.MIXED, "sequences": 1},
        [("a", 4, 1), ("b", 6, 2)],
        [[(0, 0, 4, 1, True)], [(0, 0, 6, 1, True)], [(0, 6, 1, 0, True)]],
    ),
    "prefill computes all tokens but the last and never samples": (
        {"role": Role.PREFILL, "budget": 16},
        [("a", 33, 1), ("b", 2, 1)],
        [[(0, 0, 16, 2, False)], [(0, 16, 16, 0, False)], [(0, 0, 1, 1, False)]],
    ),
    "prefill shares one pass among prompts, the longest waiting first": (
        {"role": Role.PREFILL, "budget": 32},
        [("a", 25, 1), ("b", 25, 1)],
        [[(0, 0, 24, 2, False), (1, 0, 8, 2, False)], [(1, 8, 16, 0, False)]],
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_passes_are_exactly(name: str) -> None:
    settings, prompts, expected = PASSES[name]
    world = World(**settings)
    for index, (request_id, tokens, max_tokens) in enumerate(prompts):
        world.add(request_id, prompt(tokens, index), max_tokens)
    passes = []
    while (planned := world.step()) is not None:
        passes.append(rows_of(planned))
    assert passes == expected
    world.assert_all_returned()
    if world.role is not Role.PREFILL:
        world.assert_outputs_are_right()


def test_decoding_rows_go_before_the_chunks_of_a_more_senior_prompt() -> None:
    world = World(Role.MIXED, budget=20)
    world.add("decoding", prompt(4), max_tokens=9)
    world.step()
    world.add("urgent", prompt(50, 1), max_tokens=1, priority=-1)
    passes = []
    for _ in range(3):
        planned = world.step()
        assert planned is not None
        passes.append([row[:3] for row in rows_of(planned)])
    assert passes == [
        [(0, 4, 1), (1, 0, 19)],
        [(0, 5, 1), (1, 19, 19)],
        [(0, 6, 1), (1, 38, 12)],
    ]


def test_a_decode_workers_first_pass_is_the_last_prompt_token() -> None:
    world = World(Role.DECODE)
    world.add("a", prompt(20), max_tokens=3)
    assert world.plan() is None
    remote = world.scheduler.next_remote()
    assert remote is not None
    assert (remote.cached_tokens, remote.tokens_to_move, len(remote.pages)) == (0, 19, 2)
    assert world.plan() is None
    world.land(remote)
    world.scheduler.ready("a")
    passes = []
    while (planned := world.step()) is not None:
        passes.append(rows_of(planned))
    assert passes == [[(0, 19, 1, 2, True)], [(0, 20, 1, 0, True)], [(0, 21, 1, 0, True)]]
    assert world.ended["a"].tokens == expected_output(prompt(20), 3)
    world.assert_all_returned()


@pytest.mark.parametrize(
    ("tokens", "moved", "pages"), [(1, 0, 0), (2, 1, 1), (16, 15, 1), (17, 16, 1), (18, 17, 2)]
)
def test_pages_to_move_are_those_of_all_tokens_but_the_last(tokens: int, moved: int, pages: int) -> None:
    world = World(Role.DECODE)
    request = world.add("a", prompt(tokens))
    remote = world.scheduler.next_remote()
    assert remote is not None
    assert (remote.tokens_to_move, len(remote.pages)) == (moved, pages)
    assert len(request.pages) == world.pool.pages_for(tokens)


def test_the_layer_counter_moves_on_by_a_pass_even_when_the_pass_failed() -> None:
    world = World(Role.MIXED)
    world.add("a", prompt(4))
    first = world.plan()
    assert first is not None
    world.compute(first)
    world.apply(first, [], error="boom")
    world.add("b", prompt(4))
    second = world.plan()
    assert second is not None
    assert (first.step.counter_base, second.step.counter_base) == (0, 3)


def test_prefill_says_which_pages_a_request_has_and_what_each_row_computes() -> None:
    world = World(Role.PREFILL, budget=20)
    request = world.add("a", prompt(40))
    first = world.step()
    second = world.step()
    assert first is not None
    assert second is not None
    assert (first.admitted, second.admitted) == ([request], [])
    chunks = [*first.chunks, *second.chunks]
    assert [(chunk.start, chunk.stop, chunk.last) for chunk in chunks] == [(0, 20, False), (20, 39, True)]
    assert len(set(chunks[0].pages)) == 3
    assert chunks[0].pages == chunks[1].pages
    assert [list(chunk.completed(16)) for chunk in chunks] == [[0], [1, 2]]
    assert world.ended["a"].finish is FinishReason.STOP
    assert world.scheduler.num_sampled == 0


def test_prefill_admits_a_prompt_only_with_all_its_pages() -> None:
    world = World(Role.PREFILL, pages=4, budget=16)
    world.add("a", prompt(50, 1))
    world.add("b", prompt(50, 2))
    planned = world.step()
    assert planned is not None
    assert [request.id for request in planned.admitted] == ["a"]
    world.run()
    assert set(world.ended) == {"a", "b"}
    assert world.scheduler.num_preemptions == 0


def test_a_messengers_pin_keeps_source_pages_after_the_prompt_is_computed() -> None:
    world = World(Role.PREFILL, pages=4)
    request = world.add("a", prompt(50))
    planned = world.plan()
    assert planned is not None
    world.pool.pin("transfer", request.pages)
    world.apply(planned, world.compute(planned))
    assert world.pool.counts().pinned == 4
    world.add("b", prompt(50, 1))
    assert world.plan() is None
    world.pool.unpin("transfer")
    assert world.plan() is not None


# --- Prefix hits.

HITS = {  # prompt length -> cached tokens when the same prompt comes again, by role
    15: (0, 0, 0),
    16: (0, 0, 0),
    17: (16, 0, 16),
    32: (16, 16, 16),
    33: (32, 16, 32),
    34: (32, 32, 32),
}


@pytest.mark.parametrize("tokens", HITS)
@pytest.mark.parametrize("role", [Role.MIXED, Role.PREFILL, Role.DECODE])
def test_the_same_prompt_again_finds_its_full_pages_but_always_leaves_work(role: Role, tokens: int) -> None:
    world = World(role)
    finish = world.run_decode if role is Role.DECODE else world.run
    world.add("first", prompt(tokens), max_tokens=1)
    finish()
    again = world.add("again", prompt(tokens), max_tokens=1)
    finish()
    assert again.num_cached == HITS[tokens][[Role.MIXED, Role.PREFILL, Role.DECODE].index(role)]
    world.assert_all_returned()
    if role is not Role.PREFILL:
        world.assert_outputs_are_right()


def test_a_whole_prompt_hit_on_decode_asks_nobody() -> None:
    world = World(Role.DECODE)
    world.add("first", prompt(33), max_tokens=1)
    world.run_decode()
    world.add("again", prompt(33), max_tokens=2)
    remote = world.scheduler.next_remote()
    assert remote is not None
    assert (remote.cached_tokens, remote.tokens_to_move, remote.pages) == (32, 0, [])
    world.scheduler.ready("again")
    world.run_decode()
    world.assert_outputs_are_right()
    world.assert_all_returned()


@pytest.mark.parametrize("shared", [15, 16, 17, 32, 33])
def test_prompts_share_the_full_pages_of_their_common_start(shared: int) -> None:
    world = World(Role.MIXED)
    world.add("first", prompt(shared) + prompt(20, 5))
    world.run()
    second = world.add("second", prompt(shared) + prompt(20, 6))
    world.run()
    assert second.num_cached == shared // 16 * 16
    world.assert_outputs_are_right()


def test_generated_tokens_are_found_too_when_the_conversation_goes_on() -> None:
    world = World(Role.MIXED)
    world.add("first", prompt(10), max_tokens=30)
    world.run()
    second = world.add("second", prompt(10) + world.output["first"] + prompt(5, 9))
    world.run()
    assert second.num_cached == 32
    world.assert_outputs_are_right()


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE, Role.PREFILL])
@pytest.mark.parametrize("budget", [1, 16, 64, 1000])
def test_equal_prompts_at_once_end_alike_and_leave_one_copy_in_the_index(role: Role, budget: int) -> None:
    world = World(role, budget=budget)
    for index in range(6):
        world.add(str(index), prompt(33), max_tokens=2)
    if role is Role.DECODE:
        world.run_decode()
    else:
        world.run()
    assert len(world.ended) == 6
    if role is not Role.PREFILL:
        assert len({tuple(tokens) for tokens in world.output.values()}) == 1
        world.assert_outputs_are_right()
    world.assert_all_returned()
    assert world.pool.counts().cached == 2


def test_a_landed_page_that_lacks_its_last_token_is_not_found_yet() -> None:
    world = World(Role.DECODE)
    world.add("first", prompt(32), max_tokens=1)
    world.serve_remote()
    second = world.add("second", prompt(40), max_tokens=1)
    world.serve_remote()
    assert second.num_cached == 16
    world.run_decode()
    world.assert_outputs_are_right()


def test_a_page_is_not_found_before_its_pass_has_succeeded() -> None:
    world = World(Role.MIXED, budget=32)
    world.add("a", prompt(33))
    planned = world.plan()
    assert planned is not None
    world.compute(planned)
    world.apply(planned, [], error="boom")
    again = world.add("again", prompt(33))
    world.step()
    assert again.num_cached == 0


@pytest.mark.parametrize("budget", [1, 16, 64, 1000])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 300])
def test_outputs_do_not_depend_on_how_prompts_are_cut(tokens: int, budget: int) -> None:
    world = World(Role.MIXED, budget=budget, pages=64)
    for index in range(3):
        world.add(str(index), prompt(tokens, index), max_tokens=20)
    world.run(3 * (tokens + 25))
    assert len(world.ended) == 3
    world.assert_outputs_are_right()
    world.assert_all_returned()


# --- Ends.


def finish_with(
    tokens: list[int], max_model_len: int = 100, **params: object
) -> tuple[list[int], FinishReason]:
    """What a request gets whose rank samples `tokens`, one after another."""
    world = World(Role.MIXED, max_model_len=max_model_len)
    sampling = SamplingParams(**{"max_tokens": 50} | params)  # type: ignore[arg-type]  # the table's own values
    request = world.add_with("a", prompt(4), sampling)
    for token in tokens:
        if request.status is Status.FINISHED:
            break
        planned = world.plan()
        assert planned is not None
        world.apply(planned, [token])
    ended = world.ended["a"]
    world.assert_all_returned()
    return ended.tokens, ended.finish


@pytest.mark.parametrize(
    ("tokens", "params", "count", "finish"),
    [
        ([5, EOS, 7], {}, 2, FinishReason.STOP),
        ([5, EOS, 7], {"ignore_eos": True, "max_tokens": 3}, 3, FinishReason.LENGTH),
        ([5, 6, 7], {"stop_token_ids": (6,)}, 2, FinishReason.STOP),
        ([5, 6, 7], {"stop_token_ids": (6,), "ignore_eos": True}, 2, FinishReason.STOP),
        ([EOS, 6, EOS], {"min_tokens": 3}, 3, FinishReason.STOP),
        ([6, 6, 6], {"min_tokens": 2, "stop_token_ids": (6,)}, 2, FinishReason.STOP),
        ([5, 6, 7], {"max_tokens": 2}, 2, FinishReason.LENGTH),
        ([5, EOS, 7], {"max_tokens": 2}, 2, FinishReason.STOP),
        ([5, 6, 7, 8, 9], {"max_tokens": 4}, 4, FinishReason.LENGTH),
    ],
)
def test_a_request_ends(
    tokens: list[int], params: dict[str, object], count: int, finish: FinishReason
) -> None:
    assert finish_with(tokens, **params) == (tokens[:count], finish)


def test_a_request_ends_at_the_models_length_and_may_reach_it() -> None:
    assert finish_with([5] * 9, max_model_len=8, max_tokens=4) == ([5] * 4, FinishReason.LENGTH)


def test_a_request_may_fill_the_whole_pool_and_then_ends() -> None:
    world = World(Role.MIXED, pages=2)
    world.add("a", prompt(30), max_tokens=100)
    world.run()
    assert world.ended["a"].finish is FinishReason.LENGTH
    assert len(world.ended["a"].tokens) == 3  # the third token's KV would not fit, nor does it need to
    world.assert_outputs_are_right()


REFUSALS = {
    "no tokens": ([], {}, "has 0 tokens"),
    "one token too long": (prompt(61), {"max_tokens": 4}, "prompt and output together may have 64"),
    "larger than the pool": (prompt(49), {}, "holds 48"),
    "a foreign token": ([1, VOCAB], {}, f"prompt: token id {VOCAB}"),
    "a negative token": ([-1], {}, "prompt: token id -1"),
    "a foreign stop token": ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids: token id"),
    "a foreign bias": ([1], {"logit_bias": {VOCAB + 5: 1.0}}, "logit_bias: token id"),
    "nothing to generate": ([1], {"max_tokens": 0}, "max_tokens is 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str) -> None:
    tokens, params, reason = REFUSALS[name]
    world = World(Role.MIXED, pages=3, max_model_len=64)
    refusal = world.scheduler.validate(tokens, SamplingParams(**{"max_tokens": 4} | params))
    assert refusal is not None
    assert reason in refusal


def test_the_longest_prompts_that_fit_are_not_refused() -> None:
    world = World(Role.MIXED, pages=3, max_model_len=52)
    assert world.scheduler.validate(prompt(48), SamplingParams(max_tokens=4)) is None
    world = World(Role.PREFILL, pages=4, max_model_len=64)
    assert world.scheduler.validate(prompt(64), SamplingParams(max_tokens=1)) is None
    assert world.scheduler.validate(prompt(65), SamplingParams(max_tokens=1)) is not None
    assert world.scheduler.validate(prompt(1), SamplingParams(max_tokens=1)) is not None


# --- Abort and failure, in every state.


def test_abort_of_a_waiting_request_ends_it_at_once() -> None:
    world = World(Role.MIXED)
    world.add("a", prompt(4))
    emitted = world.scheduler.abort("a")
    assert emitted is not None
    assert emitted.finish is FinishReason.ABORT
    assert world.step() is None
    world.assert_all_returned()


def test_abort_in_flight_waits_for_the_pass_and_hides_its_token() -> None:
    world = World(Role.MIXED)
    world.add("a", prompt(4))
    world.add("b", prompt(5, 1))
    planned = world.plan()
    assert planned is not None
    tokens = world.compute(planned)
    assert world.scheduler.abort("a") is None
    assert world.scheduler.abort("a") is None
    world.apply(planned, tokens)
    assert (world.ended["a"].tokens, world.ended["a"].finish) == ([], FinishReason.ABORT)
    world.run()
    assert "b" in world.ended
    world.assert_outputs_are_right()
    world.assert_all_returned()


def test_abort_wins_over_an_error_or_an_end_of_the_same_pass() -> None:
    for error in (None, "boom"):
        world = World(Role.MIXED)
        world.add("a", prompt(4), max_tokens=1)
        planned = world.plan()
        assert planned is not None
        world.scheduler.abort("a")
        world.apply(planned, world.compute(planned), error=error)
        assert world.ended["a"].finish is FinishReason.ABORT
        world.assert_all_returned()


def test_abort_between_passes_frees_the_slot_for_the_next_one() -> None:
    world = World(Role.MIXED, sequences=1)
    world.add("a", prompt(4), max_tokens=9)
    world.add("b", prompt(5, 1), max_tokens=1)
    world.step()
    assert world.scheduler.abort("a") is not None
    planned = world.step()
    assert planned is not None
    assert (planned.step.drops, [add.slot for add in planned.step.adds]) == ([0], [0])
    assert world.ended["b"].tokens == expected_output(prompt(5, 1), 1)


def test_abort_of_a_blocked_request_leaves_its_pages_to_the_ticket() -> None:
    world = World(Role.DECODE)
    world.add("a", prompt(20))
    remote = world.scheduler.next_remote()
    assert remote is not None
    world.pool.pin("ticket", remote.pages)
    emitted = world.scheduler.abort("a")
    assert emitted is not None
    assert emitted.finish is FinishReason.ABORT
    assert world.pool.counts().pinned == 2
    world.scheduler.check()
    world.pool.unpin("ticket")
    world.assert_all_returned()


def test_abort_of_an_ended_or_unknown_request_is_nothing() -> None:
    world = World(Role.MIXED)
    world.add("a", prompt(4), max_tokens=1)
    world.run()
    assert world.scheduler.abort("a") is None
    assert world.scheduler.abort("never heard of") is None


def test_a_failed_pass_ends_its_requests_and_the_rest_goes_on() -> None:
    world = World(Role.MIXED, budget=8)
    world.add("a", prompt(8))
    world.add("b", prompt(8, 1))
    planned = world.plan()
    assert planned is not None
    world.compute(planned)
    world.apply(planned, [], error="out of memory")
    assert world.ended["a"].error == "out of memory"
    assert "b" not in world.ended
    world.run()
    assert world.ended["b"].finish is FinishReason.LENGTH
    world.assert_all_returned()


def test_a_faulty_row_ends_its_request_only_and_what_it_computed_is_not_found_again() -> None:
    world = World(Role.MIXED, budget=16)
    world.add("sound", prompt(4, 1), max_tokens=9)
    world.add("faulty", prompt(40))
    while True:
        planned = world.plan()
        assert planned is not None
        tokens = world.compute(planned)
        slot = world.requests["faulty"].slot
        rows = planned.step.rows
        index = next((i for i, row in enumerate(rows) if row.slot == slot and row.sample), None)
        if index is not None:
            break
        world.apply(planned, tokens)
    tokens[sum(row.sample for row in rows[:index])] = -1
    world.apply(planned, tokens, faults=[RowFault(index, "NaN in the logits")])
    assert world.ended["faulty"].error == "NaN in the logits"
    world.run()
    assert world.ended["sound"].finish is FinishReason.LENGTH
    again = world.add("again", prompt(40))
    world.run()
    assert again.num_cached == 0
    world.assert_all_returned()


# --- Role decode: blocked requests.


def test_a_requeued_request_gets_new_pages_while_the_ticket_holds_the_old() -> None:
    world = World(Role.DECODE)
    world.add("a", prompt(20))
    world.add("b", prompt(20, 1))
    first = world.scheduler.next_remote()
    assert first is not None
    world.pool.pin("ticket 1", first.pages)
    world.scheduler.requeue("a")
    second = world.scheduler.next_remote()
    assert second is not None
    assert second.request is first.request
    assert not set(first.pages) & set(second.pages)
    world.land(second)
    world.scheduler.ready("a")
    world.memory.update({(page, 0): -1 for page in first.pages})  # a late write
    world.run_decode()
    world.pool.unpin("ticket 1")
    world.assert_outputs_are_right()
    world.assert_all_returned()


@pytest.mark.parametrize("state", ["waiting", "blocked"])
def test_a_request_without_a_prefill_worker_is_computed_here(state: str) -> None:
    world = World(Role.DECODE, budget=16)
    world.add("a", prompt(40), max_tokens=3)
    if state == "blocked":
        remote = world.scheduler.next_remote()
        assert remote is not None
    world.scheduler.run_local("a")
    assert world.scheduler.next_remote() is None
    passes = []
    while (planned := world.step()) is not None:
        passes.append([row[1:3] for row in rows_of(planned)])
    assert passes == [[(0, 16)], [(16, 16)], [(32, 8)], [(40, 1)], [(41, 1)]]
    world.assert_outputs_are_right()
    world.assert_all_returned()


@pytest.mark.parametrize("state", ["waiting", "blocked"])
def test_a_request_that_no_prefill_worker_will_take_ends_with_the_error(state: str) -> None:
    world = World(Role.DECODE)
    world.add("a", prompt(20))
    if state == "blocked":
        world.scheduler.next_remote()
    emitted = world.scheduler.fail("a", "no prefill worker is ready")
    assert (emitted.finish, emitted.error) == (FinishReason.ERROR, "no prefill worker is ready")
    world.assert_all_returned()


def test_blocked_requests_take_no_slot_and_landed_ones_wait_for_one() -> None:
    world = World(Role.DECODE, sequences=2)
    for index in range(5):
        world.add(str(index), prompt(20, index), max_tokens=2)
    assert world.serve_remote() == 5
    first = world.step()
    assert first is not None
    assert len(first.step.rows) == 2
    world.run_decode()
    assert len(world.ended) == 5
    world.assert_outputs_are_right()
    world.assert_all_returned()


def test_blocked_requests_pin_at_most_half_of_the_pool() -> None:
    world = World(Role.DECODE, pages=20)
    for index in range(9):
        world.add(str(index), prompt(33, index))
    while world.scheduler.next_remote() is not None:
        pass
    assert world.scheduler.counts().blocked == 3
    assert world.pool.counts().pinned == 9


def test_prompts_that_are_computed_here_do_not_wait_for_pinned_pages() -> None:
    world = World(Role.DECODE, pages=20)
    for index in range(4):
        world.add(str(index), prompt(33, index), max_tokens=1)
    while world.scheduler.next_remote() is not None:
        pass
    world.scheduler.run_local("3")
    world.run()
    assert list(world.ended) == ["3"]
    assert world.scheduler.counts().blocked == 3


def test_one_prompt_larger_than_half_of_the_pool_is_served_alone() -> None:
    world = World(Role.DECODE, pages=4)
    world.add("big", prompt(60), max_tokens=2)
    world.add("small", prompt(10, 1), max_tokens=2)
    world.run_decode()
    assert set(world.ended) == {"big", "small"}
    world.assert_outputs_are_right()


def test_a_shared_prefix_is_pinned_once_however_many_wait_for_the_rest() -> None:
    world = World(Role.DECODE, pages=20)
    world.add("first", prompt(128), max_tokens=1)
    world.run_decode()
    for index in range(4):
        world.add(str(index), prompt(128) + prompt(4, index))
    while world.scheduler.next_remote() is not None:
        pass
    assert world.scheduler.counts().blocked == 2  # 8 shared pages and one more each: half of 20
    assert world.pool.counts().pinned == 10


# --- Who goes first.


def test_a_lower_priority_number_is_admitted_first() -> None:
    world = World(Role.MIXED, sequences=1)
    world.add("later", prompt(4), max_tokens=1, priority=1)
    world.add("urgent", prompt(4, 1), max_tokens=1, priority=-1)
    world.run()
    assert list(world.ended) == ["urgent", "later"]


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_small_prompts_pass_one_that_does_not_fit_but_not_for_ever(role: Role) -> None:
    world = World(role, pages=8, max_model_len=512)
    world.add("running", prompt(60), max_tokens=150)
    if role is Role.DECODE:
        world.serve_remote()
    world.step()
    world.add("big", prompt(110, 1), max_tokens=1)
    for index in range(MAX_OVERTAKEN + 20):
        world.add(f"small {index}", prompt(5, index + 2), max_tokens=1)
    for _ in range(MAX_OVERTAKEN + 20):
        if role is Role.DECODE:
            world.serve_remote()
        world.step()
    small = [request_id for request_id in world.ended if request_id.startswith("small")]
    assert len(small) == MAX_OVERTAKEN
    if role is Role.DECODE:
        world.run_decode()
    else:
        world.run()
    assert list(world.ended)[MAX_OVERTAKEN : MAX_OVERTAKEN + 2] == ["running", "big"]
    world.assert_outputs_are_right()
    world.assert_all_returned()


# --- Preemption.


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_the_youngest_is_preempted_keeps_its_tokens_and_comes_back(role: Role) -> None:
    world = World(role, pages=5)
    old = world.add("old", prompt(30), max_tokens=20)
    young = world.add("young", prompt(20, 1), max_tokens=20)
    if role is Role.DECODE:
        world.serve_remote()
    while not world.scheduler.num_preemptions:
        world.step()
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert young.status is Status.WAITING
    assert young.output
    assert young.pages == []
    if role is Role.DECODE:
        world.run_decode()
    else:
        world.run()
    assert [len(world.ended[i].tokens) for i in ("old", "young")] == [20, 20]
    world.assert_outputs_are_right()
    world.assert_all_returned()


def test_a_preempted_decode_request_asks_for_prompt_and_output() -> None:
    world = World(Role.DECODE, pages=5)
    world.add("old", prompt(30), max_tokens=20)
    young = world.add("young", prompt(20, 1), max_tokens=20)
    world.serve_remote()
    while young.status is Status.RUNNING or not young.preemptions:
        world.step()
    while (remote := world.scheduler.next_remote()) is None:
        world.step()
    assert remote.request is young
    assert remote.cached_tokens + remote.tokens_to_move == young.num_tokens - 1
    assert young.num_tokens > 20


def test_the_lowest_priority_is_preempted_before_the_youngest() -> None:
    world = World(Role.MIXED, pages=5)
    world.add("patient", prompt(20), max_tokens=20, priority=1)
    world.add("urgent", prompt(30, 1), max_tokens=20)
    world.run()
    assert world.requests["patient"].preemptions
    assert not world.requests["urgent"].preemptions
    world.assert_outputs_are_right()


def test_nothing_waiting_is_admitted_in_a_pass_that_preempted() -> None:
    world = World(Role.MIXED, pages=5)
    world.add("old", prompt(30), max_tokens=20)
    world.add("young", prompt(20, 1), max_tokens=20)
    world.step()
    world.add("new", prompt(2, 2), max_tokens=20)
    planned = None
    while not world.scheduler.num_preemptions:
        planned = world.step()
    assert planned is not None
    assert planned.admitted == []


def test_who_preempts_itself_waits_for_the_page_it_lacked_and_goes_on() -> None:
    world = World(Role.MIXED, pages=4)
    pages = world.pool.allocate(2)
    world.pool.pin("a peer that has not answered yet", pages)
    world.pool.release(pages)
    request = world.add("a", prompt(30), max_tokens=20)
    world.run()
    assert (request.status, request.preemptions, len(request.output)) == (Status.WAITING, 1, 3)
    world.pool.unpin("a peer that has not answered yet")
    world.run()
    assert world.ended["a"].tokens == expected_output(prompt(30), 20)
    world.assert_all_returned()
