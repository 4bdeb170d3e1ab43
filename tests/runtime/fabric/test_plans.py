"""Plans: layers leave as the layer counter moves, in order, and stop when they are told to."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from fabric_sides import RemoteSide, Side, join, peer, until, write_and_count

from tandem_runtime.fabric.events import CountReached, LinkClosed, OutDrained
from tandem_runtime.fabric.fabric import Fabric, FabricError
from tandem_runtime.layer_counter import LayerCounter

providers = pytest.mark.parametrize("provider", ["net", "shm"])
LAYERS = 8
BIG = 8 << 20  # four of these fill a link's window


@providers
def test_a_layer_leaves_when_the_counter_passes_it_and_not_before(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.fill(1)
        right.fabric.counter_arm(0, 1, 3 * LAYERS)
        left.begin(1, 1, 4096, LAYERS)
        base = 5 * LAYERS
        left.store_layers(base)
        left.publish(base, [(1, [0, 1, 2], True)])
        for done in range(1, LAYERS + 1):
            left.store_layers(base + done)
            until(lambda done=done: right.fabric.counter_read(0, 1) == 3 * done, f"layer {done} was not sent")
            assert right.layers_touched(LAYERS) == [layer < done for layer in range(LAYERS)]
        right.wait_one(CountReached)
        drained = left.wait_one(OutDrained)
        assert drained.posted == 3 * LAYERS
        assert drained.first_post_ns < drained.last_layer_ns <= drained.last_completion_ns


@providers
def test_what_crossed_before_the_last_layer_was_hidden_behind_the_compute(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        right.fabric.counter_arm(0, 1, 3 * LAYERS)
        left.begin(1, 1, 4096, LAYERS)
        left.publish(0, [(1, [0, 1, 2], True)])
        left.store_layers(LAYERS - 1)
        until(
            lambda: left.fabric.stats().writes_completed == 3 * (LAYERS - 1), "not all but the last crossed"
        )
        left.store_layers(LAYERS)
        drained = left.wait_one(OutDrained)
        assert (drained.hidden_nbytes, drained.nbytes) == (3 * (LAYERS - 1) * 4096, 3 * LAYERS * 4096)


@providers
def test_what_is_posted_after_the_last_layer_hides_nothing(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        right.fabric.counter_arm(0, 1, 3 * LAYERS)
        left.begin(1, 1, 4096, LAYERS)
        left.store_layers(LAYERS)
        left.publish(0, [(1, [0, 1, 2], True)])
        drained = left.wait_one(OutDrained)
        assert (drained.hidden_nbytes, drained.nbytes) == (0, 3 * LAYERS * 4096)


@providers
def test_a_jump_of_the_counter_sends_every_layer_it_passed(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.fill(1)
        right.fabric.counter_arm(0, 1, 2 * LAYERS)
        left.begin(1, 1, 4096, LAYERS)
        left.publish(0, [(1, [0, 1], True)])
        left.store_layers(3)
        until(lambda: right.fabric.counter_read(0, 1) == 6, "three layers were not sent")
        assert right.layers_touched(LAYERS) == [True] * 3 + [False] * (LAYERS - 3)
        left.store_layers(LAYERS + 100)  # far into a later pass
        right.wait_one(CountReached)
        assert left.wait_one(OutDrained).posted == 2 * LAYERS


@providers
def test_a_plan_published_late_sends_the_layers_that_are_done(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        right.fabric.counter_arm(0, 1, LAYERS)
        left.begin(1, 1, 64, LAYERS)
        left.store_layers(LAYERS)
        left.publish(0, [(1, [0], True)])
        right.wait_one(CountReached)


@providers
def test_chunks_in_consecutive_plans_make_one_transfer(provider: str) -> None:
    """Each (layer, page) crosses once, with the chunk that completes it; a prefix hit goes first."""
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.fill(1)
        right.fabric.counter_arm(0, 1, 10 * LAYERS)
        left.begin(1, 1, 4096, LAYERS)
        left.post(1, [0, 1], last=False)
        until(lambda: right.fabric.counter_read(0, 1) == 2 * LAYERS, "the prefix was not sent")
        for step, (pages, last) in enumerate([([2, 3, 4], False), ([], False), ([5, 6, 7, 8, 9], True)]):
            left.publish(step * LAYERS, [(1, pages, last)])
            for done in range(1, LAYERS + 1):
                left.store_layers(step * LAYERS + done)
        assert right.wait_one(CountReached).count == 10 * LAYERS
        assert left.wait_one(OutDrained).posted == 10 * LAYERS
        assert left.fabric.stats().plans_pending == 0
        assert right.fabric.stats().immediates == 10 * LAYERS


@providers
def test_a_counter_without_an_eventfd_is_polled(provider: str) -> None:
    """On CUDA the counter's writer is the device, which signals nothing."""
    layers = LayerCounter()
    fabric = Fabric(provider=provider, bind_address="127.0.0.1", node_id=1, incarnation=1)
    try:
        fabric.watch_counter(layers.memfd, -1)
        fd = os.memfd_create("pool")
        os.ftruncate(fd, 1 << 20)
        fabric.register_fd(0, fd, 1 << 20)
        with peer(provider, 2) as right:
            left = Side.__new__(Side)  # a side whose fabric was opened by hand
            left.fabric, left.pool_nbytes, left.events = fabric, 1 << 20, []
            join(left, right)
            right.fabric.counter_arm(0, 1, LAYERS)
            left.begin(1, 1, 64, LAYERS)
            left.publish(0, [(1, [0], True)])
            for _ in range(LAYERS):
                layers.bump()
            right.wait_one(CountReached)
    finally:
        fabric.close()


@providers
def test_writes_leave_layer_by_layer_and_the_older_request_first(provider: str) -> None:
    """The receiver stands still, so only one window of writes can leave: it must be the first layer of both
    requests.
    """
    with Side(provider, 1, 4 * BIG) as left, RemoteSide(provider, 2, pool_nbytes=4 * BIG) as right:
        join(left, right)
        write_and_count(left, right, 1, slot=9, transfer=9)
        right.signal(signal.SIGSTOP)
        for transfer in (1, 2):
            left.begin(1, transfer, BIG // 2, 2, slot=transfer)
        left.publish(0, [(1, [0, 1, 2, 3], True), (2, [0, 1], True)])
        left.store_layers(2)
        until(lambda: left.fabric.stats().bytes_posted >= 4 * BIG, "the window was not filled")
        left.thread_sleeps()
        for transfer in (1, 2):
            left.fabric.out_stop(transfer)
        left.fabric.link_close(1)
        ended = {event.transfer: event.posted for event in left.wait(OutDrained, 2)}
        assert ended == {1: 6, 2: 2}, "layer 0 of both (4 + 2), then layer 1 of the older"


@providers
def test_an_aborted_plan_posts_nothing_more(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.fill(1)
        right.fabric.counter_arm(0, 1, 1000)
        left.begin(1, 1, 4096, LAYERS)
        left.publish(0, [(1, [0, 1, 2], True)])
        left.store_layers(2)
        until(lambda: right.fabric.counter_read(0, 1) == 6, "two layers were not sent")
        left.fabric.plan_abort(0)
        left.store_layers(LAYERS)
        left.begin(1, 2, 64, LAYERS, slot=1)
        right.fabric.counter_arm(1, 1, LAYERS)
        left.publish(LAYERS, [(2, [0], True)])  # the next pass goes on
        left.store_layers(2 * LAYERS)
        right.wait_one(CountReached)
        assert left.wait_one(OutDrained).transfer == 2
        left.fabric.out_stop(1)
        assert left.wait_one(OutDrained).posted == 6
        assert right.fabric.counter_read(0, 1) == 6


@providers
def test_nothing_is_posted_after_an_abort_has_returned(provider: str) -> None:
    """While the counter races through the layers, what was posted at the return of plan_abort is all there
    will ever be.
    """
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        for attempt in range(20):
            slot, base = attempt, attempt * LAYERS
            right.fabric.counter_arm(slot, 1, 10**9)
            left.begin(1, attempt + 1, 64, LAYERS, slot=slot)
            left.publish(base, [(attempt + 1, range(500), True)])
            writer = threading.Thread(
                target=lambda base=base: [left.store_layers(base + n) for n in range(1, LAYERS)]
            )
            before = left.fabric.stats().writes_posted
            writer.start()
            until(lambda before=before: left.fabric.stats().writes_posted > before, "nothing was posted")
            left.fabric.plan_abort(base)
            posted = left.fabric.stats().writes_posted
            writer.join()
            left.store_layers(base + LAYERS)
            write_and_count(left, right, 1, slot=1000 + attempt, transfer=1000 + attempt)
            assert left.fabric.stats().writes_posted == posted + 1, "the aborted plan went on"
            left.fabric.out_stop(attempt + 1)
            drained = left.wait_one(OutDrained)
            assert drained.posted == drained.completed
            until(
                lambda slot=slot, drained=drained: right.fabric.counter_read(slot, 1) == drained.posted,
                "not all that was posted was counted",
            )


@providers
def test_a_stopped_transfer_ends_with_what_was_posted(provider: str) -> None:
    with Side(provider, 1, 4 * BIG) as left, RemoteSide(provider, 2, pool_nbytes=4 * BIG) as right:
        join(left, right)
        write_and_count(left, right, 1, slot=9, transfer=9)
        right.fabric.counter_arm(0, 1, 10**9)
        right.signal(signal.SIGSTOP)
        left.begin(1, 1, BIG, 1)
        left.post(1, [0, 1, 2, 3] * 3)
        until(lambda: left.fabric.stats().bytes_posted >= 4 * BIG, "the window was not filled")
        left.fabric.out_stop(1)
        posted = left.fabric.stats().writes_posted - 1
        assert not [event for event in left.take() if isinstance(event, OutDrained)], (
            "its writes are not done yet"
        )
        right.signal(signal.SIGCONT)
        drained = left.wait_one(OutDrained)
        assert (drained.posted, drained.completed, drained.failed) == (posted, posted, 0)
        assert posted < 12
        right.fabric.counter_expect(0, 1, drained.posted)
        assert right.wait_one(CountReached).count == posted


@providers
def test_a_plan_needs_a_counter_and_a_base_of_its_own(provider: str) -> None:
    fabric = Fabric(provider=provider, bind_address="127.0.0.1", node_id=1, incarnation=1)
    try:
        with pytest.raises(FabricError, match="watch the layer counter"):
            fabric.plan_publish(0, [])
    finally:
        fabric.close()
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.begin(1, 1, 64, LAYERS)
        left.publish(0, [(1, [0], False)])
        with pytest.raises(FabricError, match="taken"):
            left.publish(0, [(1, [1], False)])
        left.fabric.plan_abort(0)
        left.publish(0, [(1, [1], False)])
        left.fabric.plan_abort(77)  # unknown: nothing to withdraw


@providers
def test_closing_a_fabric_in_the_midst_of_transfers_is_harmless(provider: str) -> None:
    for delay_s in (0, 0.001, 0.01):
        with Side(provider, 1) as left, peer(provider, 2) as right, peer(provider, 3) as third:
            join(left, right, 1)
            join(third, left, 2)
            for sender, link in ((left, 1), (third, 2)):
                sender.begin(link, 1, 65536, 1)
                sender.post(1, [page % 64 for page in range(20_000)])
                sender.begin(link, 2, 64, LAYERS)
                sender.publish(0, [(2, [0], True)])
            until(lambda left=left: left.fabric.stats().writes_completed > 0, "nothing moved")
            time.sleep(delay_s)
            left.fabric.close()
            with pytest.raises(FabricError, match="closed"):
                left.fabric.stats()
            right.fabric.link_close(1)
            right.wait_one(LinkClosed)
