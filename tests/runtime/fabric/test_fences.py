"""When memory may be used again: what closing a link proves, and what it does not.

The schedule of most tests: stop the receiving process, write more than its socket holds, reuse the source,
let it go on, and look at what it has got. `A` is what was sent, `B` what the source was reused for.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from fabric_sides import RemoteSide, Side, join, until, write_and_count

from tandem_runtime.fabric.events import BootstrapFrame, CountReached, LinkClosed, OutDrained, ProcessGone

BLOCK = 4096
MIB = 1 << 20
A, B = ord("A"), ord("B")
SLOT_PROBE = 100


def process_of(side: RemoteSide) -> tuple[int, int]:
    """pid and start time, as a HELLO tells them."""
    with open(f"/proc/{side.pid}/stat") as file:
        return side.pid, int(file.read().rpartition(")")[2].split()[19])


def post_to_a_stopped_peer(left: Side, right: RemoteSide, write_nbytes: int) -> None:
    """One counted write while the peer runs, then three that it cannot take yet."""
    join(left, right)
    left.fill(A)
    right.fabric.counter_arm(0, 1, 4)
    left.begin(1, 1, write_nbytes)
    left.post(1, [0], last=False)
    until(lambda: right.fabric.counter_read(0, 1) == 1, "the first write was not counted")
    right.signal(signal.SIGSTOP)
    left.post(1, [1, 2, 3])
    until(
        lambda: left.fabric.stats().writes_posted == 4 or left.fabric.stats().bytes_posted >= 32 * MIB,
        "the writes were not posted",
    )
    left.thread_sleeps()


def settle(left: Any, right: Any) -> None:
    """The receiver has turned over often enough to have taken whatever could still come: a second link's
    writes say so.
    """
    join(left, right, 2)
    for number in range(20):
        write_and_count(left, right, 2, slot=SLOT_PROBE + number, transfer=SLOT_PROBE + number)


def test_over_tcp_a_closed_link_reads_the_source_no_more() -> None:
    """16 MiB do not fit the socket: without the close the reused source would arrive (next test)."""
    with Side("net", 1, 64 * MIB) as left, RemoteSide("net", 2, pool_nbytes=64 * MIB) as right:
        assert left.fabric.info.close_fences_source
        post_to_a_stopped_peer(left, right, 16 * MIB)
        left.fabric.link_close(1)
        drained = left.wait_one(OutDrained)
        left.wait_one(LinkClosed)
        assert drained.link_closed
        assert drained.completed < drained.posted
        left.fill(B)
        right.signal(signal.SIGCONT)
        settle(left, right)
        got = right.blocks(BLOCK, first=16 * MIB)
        assert B not in got, f"{got[B]} blocks came from the reused source"
        assert got[A] > 0, "nothing was in flight: the schedule proves nothing"


def test_over_tcp_an_open_link_sends_what_the_source_was_reused_for() -> None:
    """Why a source is fenced at all."""
    with Side("net", 1, 64 * MIB) as left, RemoteSide("net", 2, pool_nbytes=64 * MIB) as right:
        post_to_a_stopped_peer(left, right, 16 * MIB)
        left.fill(B)
        right.signal(signal.SIGCONT)
        assert right.wait_one(CountReached).count == 4, "the count is full all the same"
        assert right.blocks(BLOCK, first=16 * MIB)[B] > 0


@pytest.mark.parametrize("write_nbytes", [BLOCK, 64 << 10, MIB, 16 * MIB])
@pytest.mark.parametrize("provider", ["net", "shm"])
def test_after_local_completion_the_source_is_free(provider: str, write_nbytes: int) -> None:
    with (
        Side(provider, 1, 4 * write_nbytes) as left,
        RemoteSide(provider, 2, pool_nbytes=4 * write_nbytes) as right,
    ):
        post_to_a_stopped_peer(left, right, write_nbytes)
        right.signal(signal.SIGCONT)
        drained = left.wait_one(OutDrained)
        assert (drained.posted, drained.completed, drained.link_closed) == (4, 4, False)
        left.fill(B)
        assert right.wait_one(CountReached).count == 4
        assert right.blocks(BLOCK) == {A: 4 * write_nbytes // BLOCK}


@pytest.mark.parametrize("write_nbytes", [64 << 10, MIB])
def test_over_shm_a_closed_link_does_not_free_the_source_and_says_so(write_nbytes: int) -> None:
    """The peer's poll copies late, out of our memory, whether our endpoint is open or not."""
    with (
        Side("shm", 1, 4 * write_nbytes) as left,
        RemoteSide("shm", 2, pool_nbytes=4 * write_nbytes) as right,
    ):
        assert not left.fabric.info.close_fences_source
        post_to_a_stopped_peer(left, right, write_nbytes)
        left.fabric.link_close(1)
        drained = left.wait_one(OutDrained)
        assert drained.link_closed
        assert drained.completed < drained.posted, "an honest count: these writes have not ended"
        left.fill(B)
        right.signal(signal.SIGCONT)
        until(
            lambda: B in right.blocks(BLOCK),
            "the reused source never arrived: shm has changed, look at its fence again",
        )


def test_over_shm_the_source_is_free_when_the_peers_process_is_gone() -> None:
    with Side("shm", 1, 4 * MIB) as left, RemoteSide("shm", 2) as right:
        pid, start_time = process_of(right)
        assert left.fabric.watch_process(1, pid, start_time)
        post_to_a_stopped_peer(left, right, MIB)
        left.fabric.link_close(1)
        left.wait_one(LinkClosed)
        left.thread_sleeps()
        assert not [event for event in left.take() if isinstance(event, ProcessGone)], "stopped is not gone"
        right.signal(signal.SIGKILL)
        assert left.wait_one(ProcessGone).link == 1
        assert not left.fabric.watch_process(1, pid, start_time), "gone already"


def test_a_later_process_with_the_same_id_is_another_process() -> None:
    with Side("shm", 1) as left, RemoteSide("shm", 2) as right:
        pid, start_time = process_of(right)
        assert not left.fabric.watch_process(1, pid, start_time + 1)
        assert left.fabric.watch_process(1, pid, start_time)


@pytest.mark.parametrize("environment", [{}, {"FI_SHM_DISABLE_CMA": "1"}])
@pytest.mark.parametrize("provider", ["net", "shm"])
def test_nothing_lands_through_a_link_once_its_close_was_told(
    provider: str, environment: dict[str, str]
) -> None:
    """The destination's fence. A 64 MiB write gets as far as buffers take it, its sender is stopped, and
    goes on after the close.

    Only shm's single copy is never half in, because there the receiver itself copies, in one go.
    """
    nbytes = 64 * MIB
    with (
        RemoteSide(provider, 1, environment, pool_nbytes=nbytes) as sender,
        RemoteSide(provider, 2, environment, pool_nbytes=nbytes) as receiver,
    ):
        join(sender, receiver)
        write_and_count(sender, receiver, 1, slot=1, transfer=2)
        sender.fill(A)
        receiver.fabric.counter_arm(0, 1, 100)
        receiver.signal(signal.SIGSTOP)
        sender.begin(1, 1, nbytes)
        sender.post(1, [0] * 3)
        until(lambda: sender.fabric.stats().bytes_posted > nbytes, "the first write was not posted")
        sender.thread_sleeps()
        sender.signal(signal.SIGSTOP)
        receiver.signal(signal.SIGCONT)
        until(lambda: receiver.read(0, 1) == b"A", "nothing came")
        receiver.thread_sleeps()
        if provider == "net" or environment:
            assert receiver.read(nbytes - 1, 1) != b"A", "the write was to be half in"
        else:
            until(lambda: receiver.read(nbytes - 1, 1) == b"A", "the copy did not end")
        receiver.fabric.link_close(1)
        receiver.wait_one(LinkClosed)
        receiver.fill(0)
        count = receiver.fabric.counter_read(0, 1)
        sender.signal(signal.SIGCONT)
        settle(sender, receiver)
        assert receiver.blocks(BLOCK) == {0: nbytes // BLOCK - 1, A: 1}, (
            "the first block is the second link's"
        )
        assert receiver.fabric.counter_read(0, 1) == count
        sender.fabric.link_close(1)
        assert sender.wait_drained(1).posted > count


@pytest.mark.parametrize("provider", ["net", "shm"])
def test_closing_one_peers_link_disturbs_no_other(provider: str) -> None:
    pages, page_nbytes = 2000, 64 << 10
    with (
        Side(provider, 1, 4 * MIB) as receiver,
        RemoteSide(provider, 2, pool_nbytes=4 * MIB) as bad,
        RemoteSide(provider, 3, pool_nbytes=4 * MIB) as good,
    ):
        join(bad, receiver, 1)
        join(good, receiver, 2)
        bad.fill(B)
        good.fill(A)
        receiver.fabric.counter_arm(0, 1, 50 * pages)
        receiver.fabric.counter_arm(1, 1, pages)
        half = [page % 32 for page in range(pages)]
        bad.begin(1, 1, page_nbytes, slot=0)
        bad.post(1, half * 50)  # it is not done before the close
        good.begin(2, 1, page_nbytes, slot=1)
        good.post(1, [32 + page for page in half])
        until(
            lambda: receiver.fabric.counter_read(0, 1) > 20 and receiver.fabric.counter_read(1, 1) > 20,
            "not both were under way",
        )
        receiver.fabric.link_close(1)
        receiver.wait_one(LinkClosed)
        receiver.write(0, bytes(2 * MIB))  # the pages are free: they serve someone else
        reached = receiver.wait_one(CountReached)
        assert (reached.slot, reached.count) == (1, pages)
        assert good.wait_one(OutDrained).failed == 0
        assert receiver.blocks(page_nbytes, 0, 2 * MIB) == {0: 32}, "a write landed after the close"
        assert receiver.blocks(page_nbytes, 2 * MIB) == {A: 32}
        assert receiver.fabric.counter_read(0, 1) < 50 * pages


def test_a_writer_that_missed_the_close_cannot_write_through_the_ports_next_endpoint() -> None:
    """net reconnects by itself. With two ports, one of them the bootstrap endpoint's, the next link takes
    the closed one's port.
    """
    low = 21_500
    with RemoteSide("net", 2, {}, port_range=(low, low + 1)) as receiver, RemoteSide("net", 1, {}) as writer:
        address, regions = receiver.open(1)
        writer_address, writer_regions = writer.open(1)
        writer.connect(1, address, regions, True)
        receiver.connect(1, writer_address, writer_regions, False)
        write_and_count(writer, receiver, 1, slot=0, transfer=1)
        receiver.fabric.link_close(1)
        receiver.wait_one(LinkClosed)
        receiver.fill(0)
        again, new_regions = receiver.open(2)
        assert again == address, "the port was to be used again"
        assert new_regions[0][0] != regions[0][0]
        writer.fill(A)
        receiver.fabric.counter_arm(1, 1, 10)
        writer.begin(1, 2, 64, slot=1)
        writer.post(2, [0])
        drained = writer.wait_one(OutDrained)
        assert drained.failed == 1, "it did reach the endpoint, and was refused"
        assert receiver.fabric.counter_read(1, 1) == 0
        assert not any(receiver.read(0, 4 * MIB))


@pytest.mark.parametrize("provider", ["net", "shm"])
def test_a_failed_write_ends_its_transfer_and_is_not_repeated(provider: str) -> None:
    """The peer dies in the midst: over TCP the writes fail, over shm they never end until the link is
    closed.
    """
    with Side(provider, 1, 64 * MIB) as left, RemoteSide(provider, 2, pool_nbytes=64 * MIB) as right:
        join(left, right)
        right.fabric.counter_arm(0, 1, 1000)
        left.begin(1, 1, 8 * MIB)
        left.post(1, [page % 8 for page in range(1000)])
        until(lambda: left.fabric.stats().writes_completed > 2, "nothing moved")
        right.signal(signal.SIGKILL)
        if provider == "shm":
            left.thread_sleeps()
            left.fabric.link_close(1)
        drained = left.wait_one(OutDrained)
        assert drained.posted < 1000
        assert drained.link_closed == (provider == "shm")
        assert drained.completed + drained.failed == drained.posted or provider == "shm"
        left.thread_sleeps()
        assert left.fabric.stats().writes_posted == drained.posted
        if provider == "net":
            assert drained.failed > 0
            left.fabric.link_close(1)
        left.wait_one(LinkClosed)


def test_a_stopped_shm_peer_survives_one_that_leaves_before_it_looks() -> None:
    """1.17's shm crashes a receiver that finds an unseen sender's file gone: the core leaves it."""
    with RemoteSide("shm", 2) as right, Side("shm", 3) as friend:
        with Side("shm", 1) as left:
            right.signal(signal.SIGSTOP)
            left.fabric.bootstrap_send(right.fabric.bootstrap_address, b"never read")
            left.thread_sleeps()
        right.signal(signal.SIGCONT)
        friend.fabric.bootstrap_send(right.fabric.bootstrap_address, b"still there?")
        assert right.wait_one(BootstrapFrame).frame == b"still there?"
