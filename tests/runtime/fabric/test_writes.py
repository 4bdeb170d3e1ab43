"""Counted paged writes on real endpoints: every page once, right bytes, right counts, nothing outside the
grant.
"""

from __future__ import annotations

import random

import pytest
from fabric_sides import FROM_INITIATOR, Side, frame, join, peer, seal, until, write_and_count

from tandem_runtime.fabric.events import BootstrapFrame, CountReached, Frame, LinkClosed, OutDrained
from tandem_runtime.fabric.fabric import SLOTS, FabricError, Geometry, PlanItem, Segment
from tandem_runtime.messenger import wire

providers = pytest.mark.parametrize("provider", ["net", "shm"])
PAGE = 4096


def fill_randomly(side: Side, seed: int) -> None:
    side.write(0, random.Random(seed).randbytes(side.pool_nbytes))


@providers
@pytest.mark.parametrize("page_nbytes", [64, 4096, 65536])
def test_every_page_of_every_layer_lands_once_where_it_was_sent(provider: str, page_nbytes: int) -> None:
    layers, pages = 4, 16
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        fill_randomly(left, 1)
        layer_nbytes = left.pool_nbytes // layers
        targets = random.Random(2).sample(range(pages), pages)
        right.fabric.counter_arm(3, 9, layers * pages)
        left.fabric.out_begin(
            1,
            1,
            wire.immediate(wire.IMM_PAGE, wire.transfer_id(3, 9)),
            Geometry(page_nbytes, layer_nbytes, page_nbytes, layer_nbytes, layers),
            [Segment(0, 0, 0, 0, page_nbytes)],
        )
        left.fabric.out_post(PlanItem(1, range(pages), targets, True))
        reached = right.wait_one(CountReached)
        assert (reached.slot, reached.gen, reached.count) == (3, 9, layers * pages)
        drained = left.wait_one(OutDrained)
        assert (drained.posted, drained.completed, drained.failed) == (layers * pages, layers * pages, 0)
        assert drained.nbytes == layers * pages * page_nbytes
        assert not drained.link_closed
        assert 0 < drained.last_layer_ns <= drained.first_post_ns <= drained.last_completion_ns
        for layer in range(layers):
            for source, target in enumerate(targets):
                begin = layer * layer_nbytes
                assert right.read(begin + target * page_nbytes, page_nbytes) == left.read(
                    begin + source * page_nbytes, page_nbytes
                )
            rest = layer * layer_nbytes + pages * page_nbytes
            assert not any(right.read(rest, layer_nbytes - pages * page_nbytes)), "something else was written"
        stats = right.fabric.stats()
        assert (stats.immediates, stats.immediates_stale, stats.immediates_unknown) == (layers * pages, 0, 0)


@providers
def test_unequal_sharding_writes_a_run_of_each_page_to_another_stride(provider: str) -> None:
    """Two segments of each source page go to two regions' places inside larger target pages."""
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        fill_randomly(left, 3)
        right.fabric.counter_arm(0, 1, 2 * 3 * 2)
        left.fabric.out_begin(
            1,
            1,
            wire.immediate(wire.IMM_PAGE, wire.transfer_id(0, 1)),
            Geometry(1000, 100_000, 3000, 300_000, 2),
            [Segment(0, 0, 0, 500, 400), Segment(0, 0, 400, 2000, 600)],
        )
        left.fabric.out_post(PlanItem(1, [5, 6, 7], [0, 2, 9], True))
        right.wait_one(CountReached)
        for layer in range(2):
            for source, target in ((5, 0), (6, 2), (7, 9)):
                ours = left.read(layer * 100_000 + source * 1000, 1000)
                begin = layer * 300_000 + target * 3000
                assert right.read(begin + 500, 400) == ours[:400]
                assert right.read(begin + 2000, 600) == ours[400:]


@providers
def test_far_more_pages_than_the_window_holds_all_land(provider: str) -> None:
    pages = 20_000
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        assert pages > 10 * left.fabric.info.tx_window
        fill_randomly(left, 4)
        right.fabric.counter_arm(0, 1, pages)
        left.begin(1, 1, 64)
        left.post(1, range(pages))
        assert right.wait_one(CountReached).count == pages
        assert left.wait_one(OutDrained).completed == pages
        assert right.read(0, pages * 64) == left.read(0, pages * 64)
        assert right.fabric.stats().immediates == pages


@providers
def test_two_links_share_the_thread_and_neither_starves(provider: str) -> None:
    """A transfer of few pages that starts behind one of very many ends long before it."""
    with Side(provider, 1) as left, peer(provider, 2) as right, peer(provider, 3) as other:
        join(left, right, 1)
        join(left, other, 2)
        right.fabric.counter_arm(0, 1, 60_000)
        other.fabric.counter_arm(0, 1, 10)
        left.begin(1, 1, 64)
        left.begin(2, 2, 64)
        left.post(1, range(60_000))
        left.post(2, range(10))
        other.wait_one(CountReached)
        first, second = left.wait(OutDrained, 2)
        assert (first.transfer, second.transfer) == (2, 1)
        right.wait_one(CountReached)


@providers
def test_a_counter_of_nothing_is_reached_at_once(provider: str) -> None:
    with Side(provider, 1) as side:
        side.fabric.counter_arm(7, 3, 0)
        reached = side.wait_one(CountReached)
        assert (reached.slot, reached.gen, reached.count) == (7, 3, 0)


@providers
def test_late_immediates_are_stale_and_change_nothing(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        right.fabric.counter_arm(5, 1, 8)
        left.begin(1, 1, 64, slot=5, gen=1)
        left.post(1, [0, 1], last=False)
        until(lambda: right.fabric.counter_read(5, 1) == 2, "two writes were not counted")
        right.fabric.counter_disarm(5, 1)
        right.fabric.counter_arm(5, 2, 2)
        left.post(1, [2, 3, 4])
        until(lambda: right.fabric.stats().immediates_stale == 3, "stale writes were not counted as such")
        assert right.fabric.counter_read(5, 2) == 0
        assert right.fabric.counter_read(5, 1) == 0, "the old generation has no count any more"
        left.begin(1, 2, 64, slot=5, gen=2)
        left.post(2, [5, 6])
        assert right.wait_one(CountReached).gen == 2
        right.fabric.counter_disarm(5, 2)
        left.begin(1, 3, 64, slot=5, gen=2)
        left.post(3, [7])
        until(lambda: right.fabric.stats().immediates_stale == 4, "a disarmed slot's write is stale")
        left.begin(1, 4, 64, slot=6, gen=2)
        left.post(4, [7])
        until(lambda: right.fabric.stats().immediates_unknown == 1, "a slot never armed is unknown")
        assert right.take() == []


@providers
def test_an_expectation_may_change_to_what_was_posted(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        right.fabric.counter_arm(0, 1, 100)
        left.begin(1, 1, 64)
        left.post(1, range(7))
        left.wait_one(OutDrained)
        right.fabric.counter_expect(0, 1, 7)
        assert right.wait_one(CountReached).count == 7
        right.fabric.counter_expect(0, 1, 8)
        assert right.take() == []
        right.fabric.counter_expect(0, 1, 7)
        assert right.wait_one(CountReached).count == 7, "it is told again"


def test_slots_and_generations_have_their_bounds() -> None:
    with Side("shm", 1) as side:
        side.fabric.counter_arm(SLOTS - 1, 0xFFFF, 1)
        for slot, gen in ((SLOTS, 1), (0, 0), (0, 1 << 16)):
            with pytest.raises(FabricError, match="counter_arm"):
                side.fabric.counter_arm(slot, gen, 1)
        with pytest.raises(FabricError, match="armed; disarm"):
            side.fabric.counter_arm(SLOTS - 1, 1, 1)
        with pytest.raises(FabricError, match="counter_disarm"):
            side.fabric.counter_disarm(SLOTS - 1, 1)


@providers
def test_pages_outside_either_pool_are_refused_before_anything_is_posted(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        pages = left.pool_nbytes // PAGE
        left.begin(1, 1, PAGE)
        for source, target in ((pages, 0), (0, pages), (2**32 - 1, 0)):
            with pytest.raises(FabricError, match="outside its region"):
                left.fabric.out_post(PlanItem(1, [0, source], [0, target], False))
        geometry = Geometry(PAGE, 0, PAGE, 0, 1)
        for segment, reason in (
            (Segment(0, 0, 1, 0, left.pool_nbytes), "outside its region"),
            (Segment(0, 0, 0, 2**64 - 1, 2), "outside its region"),
            (Segment(1, 0, 0, 0, PAGE), "register the region"),
            (Segment(0, 1, 0, 0, PAGE), "register the region"),
            (Segment(0, 0, 0, 0, 0), "bytes"),
        ):
            with pytest.raises(FabricError, match=reason):
                left.fabric.out_begin(2, 1, 1 << 14, geometry, [segment])
        with pytest.raises(FabricError, match="outside its region"):
            left.fabric.out_write(1, 1 << 14, 0, left.pool_nbytes - 8, 0, 0, 9)
        with pytest.raises(ValueError, match="2 source pages, 1 target"):
            left.fabric.out_post(PlanItem(1, [0, 1], [0], False))
        with pytest.raises(FabricError, match="no such link, transfer"):
            left.fabric.out_post(PlanItem(9, [0], [0], False))
        left.fabric.out_stop(1)
        assert left.wait_one(OutDrained).posted == 0
        assert left.fabric.stats().writes_posted == 0


@providers
@pytest.mark.parametrize("lie", ["a larger region", "another key", "another base"])
def test_the_target_refuses_what_it_did_not_grant(provider: str, lie: str) -> None:
    """A peer that ignores its grant. Its writes touch nothing, count nothing, and disturb no other link."""
    with Side(provider, 1) as left, peer(provider, 2) as right, peer(provider, 3) as other:
        right_address, [(key, base, nbytes)] = right.open(1)
        left_address, left_regions = left.open(1)
        told = {
            "a larger region": (key, base, 2 * nbytes),
            "another key": (key ^ 1, base, nbytes),
            "another base": (key, base + nbytes, nbytes),
        }[lie]
        left.connect(1, right_address, [told], True)
        right.connect(1, left_address, left_regions, False)
        join(other, right, 2)
        left.fill(0xEE)
        right.fabric.counter_arm(0, 1, 1)
        left.begin(1, 1, PAGE)
        if lie == "a larger region":
            geometry = Geometry(PAGE, 0, PAGE, 0, 1)
            left.fabric.out_begin(
                2, 1, wire.immediate(0, wire.transfer_id(0, 1)), geometry, [Segment(0, 0, 0, nbytes, PAGE)]
            )
            left.fabric.out_post(PlanItem(2, [0], [0], True))
        else:
            left.post(1, [0])
        until(lambda: left.fabric.stats().writes_posted > 0, "nothing was posted")
        for number in range(5):
            write_and_count(other, right, 2, slot=1 + number, transfer=1 + number)
        assert right.beyond_is_zero()
        assert not any(right.read(64, right.pool_nbytes - 64)), "the first 64 bytes are the other link's"
        assert right.fabric.counter_read(0, 1) == 0
        left.fabric.link_close(1)
        left.wait_one(LinkClosed)


@providers
def test_single_writes_are_counted_with_their_transfer(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        fill_randomly(left, 5)
        right.fabric.counter_arm(0, 1, 3)
        left.begin(1, 1, 64)
        tail = wire.immediate(wire.IMM_TAIL, wire.transfer_id(0, 1))
        left.fabric.out_write(1, tail, 0, 100_000, 0, 200_000, 777)
        left.post(1, [0, 1])
        right.wait_one(CountReached)
        assert left.wait_one(OutDrained).posted == 3
        assert right.read(200_000, 777) == left.read(100_000, 777)


@providers
def test_a_transfer_may_end_without_pages(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.begin(1, 1, 64)
        left.post(1, [])
        drained = left.wait_one(OutDrained)
        assert (drained.posted, drained.first_post_ns, drained.failed) == (0, 0, 0)
        left.begin(1, 1, 64)  # its end was read: the number may name another, though callers never do that
        left.fabric.out_stop(1)
        assert left.wait_one(OutDrained).posted == 0


@providers
def test_posts_to_a_transfer_whose_end_was_not_read_yet_are_ignored(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.begin(1, 1, 64)
        left.fabric.out_stop(1)
        left.post(1, [0])
        left.publish(0, [(1, [0], True)])
        assert left.wait_one(OutDrained).posted == 0
        with pytest.raises(FabricError, match="no such link, transfer"):
            left.post(1, [0])


@providers
def test_links_may_share_one_endpoint_as_on_efa(provider: str) -> None:
    """Frames and writes reach the right link; closing one ends it and claims no fence."""
    with (
        Side(provider, 1, one_endpoint=True) as left,
        peer(provider, 2, one_endpoint=True) as right,
        peer(provider, 3, one_endpoint=True) as other,
    ):
        info = left.fabric.info
        assert (info.one_endpoint, info.close_fences_source, info.close_fences_target) == (True, False, False)
        join(left, right, 1, key=b"1" * 32)
        join(other, right, 2, key=b"2" * 32)
        left.fabric.link_send(1, frame(1))
        other.fabric.link_send(2, frame(2))
        got = right.wait(Frame, 2)
        assert {(event.link, event.frame) for event in got} == {(1, frame(1)), (2, frame(2))}
        left.fabric.bootstrap_send(right.fabric.bootstrap_address, seal(FROM_INITIATOR, frame(3), b"1" * 32))
        assert right.wait_one(BootstrapFrame).frame.startswith(frame(3)), "not taken for a link's"
        write_and_count(left, right, 1, slot=0, transfer=1)
        write_and_count(other, right, 2, slot=1, transfer=1)
        left.fabric.link_close(1)
        left.wait_one(LinkClosed)
        right.fabric.link_close(1)
        right.wait_one(LinkClosed)
        write_and_count(other, right, 2, slot=2, transfer=2)
