"""Frames on real endpoints: seals, PING, order, and what happens to a flood."""

from __future__ import annotations

import time

import pytest
from fabric_sides import (
    FROM_INITIATOR,
    FROM_RESPONDER,
    KEY,
    RemoteSide,
    Side,
    frame,
    join,
    peer,
    ping,
    seal,
    until,
)

from tandem_runtime.fabric.events import BootstrapFrame, Frame, LinkClosed
from tandem_runtime.fabric.fabric import BOOTSTRAP_FRAME_NBYTES_MAX, FRAME_NBYTES_MAX, FabricError
from tandem_runtime.messenger import wire

providers = pytest.mark.parametrize("provider", ["net", "shm"])


@providers
def test_bootstrap_frames_cross_unsealed_in_both_directions(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        big = bytes(BOOTSTRAP_FRAME_NBYTES_MAX)
        left.fabric.bootstrap_send(right.fabric.bootstrap_address, b"hello")
        assert right.wait_one(BootstrapFrame).frame == b"hello"
        right.fabric.bootstrap_send(left.fabric.bootstrap_address, big)
        assert left.wait_one(BootstrapFrame).frame == big


@providers
def test_frames_of_a_link_arrive_whole_and_in_order(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        sent = [frame(seq, bytes([seq]) * (seq * 40)) for seq in range(1, 200)]
        assert len(max(sent, key=len)) <= FRAME_NBYTES_MAX
        for one in sent:
            assert left.fabric.link_send(1, one)
        received = right.wait(Frame, len(sent))
        assert [event.frame for event in received] == sent
        assert {event.link for event in received} == {1}


@providers
def test_only_frames_sealed_by_this_links_peer_pass(provider: str) -> None:
    """Raw bytes reach a link's endpoint from anyone; what they carry decides."""
    other_key = bytes(32)
    with Side(provider, 1) as left, peer(provider, 2) as right, peer(provider, 3) as stranger:
        right_address, regions = right.open(1)
        left_address, left_regions = left.open(1)
        left.connect(1, right_address, regions, True)
        right.connect(1, left_address, left_regions, False)
        good = seal(FROM_INITIATOR, frame(1))
        bad = {
            "one bit of the body changed": good[:-20] + bytes([good[-20] ^ 1]) + good[-19:],
            "one bit of the MAC changed": good[:-1] + bytes([good[-1] ^ 1]),
            "cut short": good[:-1],
            "too short for a header": good[:30],
            "reflected: sealed in our own direction": seal(FROM_RESPONDER, frame(2)),
            "replayed from another link": seal(FROM_INITIATOR, frame(3), other_key),
            "no magic": seal(FROM_INITIATOR, b"\0" * 40),
        }
        for number, data in enumerate(bad.values(), 1):
            stranger.fabric.bootstrap_send(right_address, data)
            until(
                lambda number=number: right.fabric.stats().frames_rejected == number,
                f"bad frame {number} was not counted",
            )
        stranger.fabric.bootstrap_send(right_address, good)
        assert right.wait_one(Frame).frame == frame(1)
        assert not [event for event in right.take() if isinstance(event, Frame)]
        assert right.fabric.stats().frames_rejected == len(bad)


@providers
def test_a_flood_of_bad_frames_leaves_nothing_behind_and_the_link_works(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right, peer(provider, 3) as stranger:
        address, regions = right.open(1)
        left_address, left_regions = left.open(1)
        left.connect(1, address, regions, True)
        right.connect(1, left_address, left_regions, False)
        flood = 2000
        for sent in range(flood):
            stranger.fabric.bootstrap_send(address, b"\0" * 100)
            if sent % 500 == 499:
                until(
                    lambda sent=sent: right.fabric.stats().frames_rejected > sent - 500,
                    f"after {sent} bad frames the endpoint took no more",
                )
        until(lambda: right.fabric.stats().frames_rejected == flood, "bad frames were lost")
        assert not right.take()
        left.fabric.link_send(1, frame())
        right.wait_one(Frame)


@providers
def test_a_reader_that_does_not_read_holds_back_the_sender_and_loses_nothing(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        sent = 0

        def queue_full() -> bool:
            nonlocal sent
            while left.fabric.link_send(1, frame(sent, bytes(4000))):
                sent += 1
                assert sent < 20_000, "the sender is never held back"
            before = left.fabric.stats().frames_sent
            left.thread_sleeps()
            return left.fabric.stats().frames_sent == before

        until(queue_full, "the sender's queue never fills")
        seen = [wire.parse(event.frame)[0].seq for event in right.wait(Frame, sent)]
        assert seen == list(range(sent))


@providers
def test_ping_is_answered_while_pythons_side_does_nothing(provider: str) -> None:
    with Side(provider, 1) as left, RemoteSide(provider, 2) as right:
        join(left, right)
        right.fabric.link_set_pong(1, wire.encode_body(wire.Pong(5, True, [11, 12])))
        for seq in (41, 42):
            left.fabric.link_send(1, ping(seq))
            header, body = wire.parse(left.wait_one(Frame).frame)
            sent_ns, age_ns, pong = wire.decode_pong(body)
            assert header.type is wire.MessageType.PONG
            assert (header.node, header.incarnation, header.epoch, header.seq) == (2, 2, 3, seq)
            assert pong == wire.Pong(5, True, [11, 12])
            assert 0 < age_ns < 10e9
            assert sent_ns <= time.monotonic_ns()
        assert right.take() == [], "a PING is no business of Python's"
        heard_ns, rtt_ns = left.fabric.link_health(1)
        assert 0 < rtt_ns < 10e9
        assert 0 < time.monotonic_ns() - heard_ns < 10e9


@providers
def test_a_pong_tells_how_old_its_body_is(provider: str) -> None:
    """A lead that is stuck differs from one that is dead."""
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        left.fabric.link_send(1, ping())
        _, age_ns, _ = split_pong(left.wait_one(Frame).frame)
        assert age_ns == 2**64 - 1, "nothing was published yet"
        began_ns = time.monotonic_ns()
        right.fabric.link_set_pong(1, b"x")
        ages = []
        for _ in range(2):
            left.fabric.link_send(1, ping())
            ages.append(split_pong(left.wait_one(Frame).frame)[1])
        assert 0 < ages[0] < ages[1] < time.monotonic_ns() - began_ns


def split_pong(data: bytes) -> tuple[int, int, bytes]:
    sent_ns, age_ns = wire.PONG_PREFIX.unpack_from(data, wire.HEADER.size)
    return sent_ns, age_ns, data[wire.HEADER.size + wire.PONG_PREFIX.size :]


@providers
def test_a_ping_behind_more_frames_than_the_core_keeps_is_not_lost(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        join(left, right)
        for seq in range(600):  # more than the core keeps for one link
            until(lambda seq=seq: left.fabric.link_send(1, frame(seq)), "the queue stays full")
        left.thread_sleeps()
        answered = right.fabric.stats().pings_answered
        left.fabric.link_send(1, ping())
        # 512 frames wait for Python, the rest in receive buffers: the PING has not been reached yet
        assert len(right.wait(Frame, 600)) == 600
        until(lambda: right.fabric.stats().pings_answered == answered + 1, "the PING was lost")


@providers
def test_a_call_on_a_link_in_the_wrong_state_says_so(provider: str) -> None:
    with Side(provider, 1) as left, peer(provider, 2) as right:
        with pytest.raises(FabricError, match=r"link_send.*no such link") as caught:
            left.fabric.link_send(1, frame())
        assert caught.value.provider == provider
        left.open(1)
        with pytest.raises(FabricError, match=r"link_send.*connect the link"):
            left.fabric.link_send(1, frame())
        with pytest.raises(FabricError, match=r"link_open.*taken"):
            left.fabric.link_open(1)
        address, regions = right.open(1)
        left.connect(1, address, regions, True)
        with pytest.raises(FabricError, match="link_connect"):
            left.fabric.link_connect(1, address, KEY, True)
        with pytest.raises(FabricError, match=r"link_send.*bytes"):
            left.fabric.link_send(1, bytes(FRAME_NBYTES_MAX + 1))
        with pytest.raises(ValueError, match="32 bytes"):
            left.fabric.link_connect(1, address, b"short", True)
        left.fabric.link_close(1)
        with pytest.raises(FabricError, match="link_send"):
            left.fabric.link_send(1, frame())
        left.wait_one(LinkClosed)
        with pytest.raises(FabricError, match="no such link"):
            left.fabric.link_close(1)
    with pytest.raises(FabricError, match="closed"):
        left.fabric.link_open(2)
