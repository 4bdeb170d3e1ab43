"""Frames, fragments, slots: bytes in, bytes out."""

from __future__ import annotations

import random

import pytest

from tandem_runtime.messenger import assembly, wire
from tandem_runtime.messenger.assembly import Assembly
from tandem_runtime.messenger.slots import Slots
from tandem_runtime.messenger.wire import MessageType, WireError

LONG = bytes(random.Random(1).randbytes(50_000))


def test_a_long_message_is_put_together_in_any_order_and_with_repeats() -> None:
    frames = wire.frames(MessageType.DISPATCH, 1, 2, 3, 4, LONG, floor=5)
    assert len(frames) > 5
    assert max(map(len, frames)) <= wire.FRAME_NBYTES
    shuffled = [*frames, *frames[:2]]
    random.Random(2).shuffle(shuffled)
    whole = Assembly()
    taken = [message for frame in shuffled if (message := whole.take(frame)) is not None]
    assert taken[0] == (
        wire.Header(MessageType.DISPATCH, 1, 2, 3, 4, len(LONG), taken[0][0].index, len(frames), 5),
        LONG,
    )


def test_fragments_of_a_resend_complete_those_of_the_first_send() -> None:
    whole = Assembly()
    frames = wire.frames(MessageType.DISPATCH, 1, 2, 3, 4, LONG)
    assert all(whole.take(frame) is None for frame in frames[:-1])
    again = wire.frames(MessageType.DISPATCH, 1, 2, 3, 4, LONG, floor=4)
    message = whole.take(again[-1])
    assert message is not None
    assert message[1] == LONG


def test_messages_with_other_numbers_are_other_messages() -> None:
    whole = Assembly()
    one = wire.frames(MessageType.DISPATCH, 1, 2, 3, 4, LONG)
    two = wire.frames(MessageType.DISPATCH, 1, 2, 3, 5, LONG[::-1])
    got = [
        m[1] for pair in zip(one, two, strict=True) for frame in pair if (m := whole.take(frame)) is not None
    ]
    assert got == [LONG, LONG[::-1]]


def test_incomplete_messages_are_bounded() -> None:
    whole = Assembly()
    for seq in range(1000):
        whole.take(wire.frames(MessageType.DISPATCH, 1, 2, 3, seq, LONG)[0])
    assert len(whole._pending) == assembly.PENDING_MAX


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "frame of 0 bytes"),
        (bytes(40), "magic"),
        (wire.HEADER.pack(wire.MAGIC, 2, 5, 0, 1, 1, 1, 1, 0, 0, 1, 0), "wire version 2"),
        (wire.HEADER.pack(wire.MAGIC, 1, 99, 0, 1, 1, 1, 1, 0, 0, 1, 0), "unknown message type 99"),
        (wire.HEADER.pack(wire.MAGIC, 1, 5, 0, 1, 1, 1, 1, 0, 1, 1, 0), "fragment 1 of 1"),
        (wire.HEADER.pack(wire.MAGIC, 1, 5, 0, 1, 1, 1, 1, 9, 0, 1, 0), "fragment 0 has 0 bytes"),
        (wire.HEADER.pack(wire.MAGIC, 1, 5, 0, 1, 1, 1, 1, 0, 0, 2, 0), "fragment 0 of 2"),
    ],
)
def test_a_frame_that_contradicts_itself_is_refused(frame: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        Assembly().take(frame)


def test_an_endless_message_is_refused_at_its_first_fragment() -> None:
    nbytes = assembly.MESSAGE_MAX_NBYTES + 1
    count = -(-nbytes // wire.FRAGMENT_NBYTES)
    header = wire.HEADER.pack(wire.MAGIC, 1, 5, 0, 1, 1, 1, 1, nbytes, 0, count, 0)
    with pytest.raises(WireError, match="at most"):
        Assembly().take(header + bytes(wire.FRAGMENT_NBYTES))


def test_a_slot_comes_back_last_and_in_its_next_generation() -> None:
    slots = Slots(3)
    taken = [slots.take() for _ in range(3)]
    assert [(wire.slot_of(t), wire.gen_of(t)) for t in taken] == [(0, 1), (1, 1), (2, 1)]
    assert slots.free == 0
    with pytest.raises(IndexError):
        slots.take()
    for transfer in (taken[2], taken[0]):
        slots.give_back(transfer)
    assert [wire.slot_of(slots.take()) for _ in range(2)] == [2, 0]


def test_generations_wrap_past_zero_and_no_immediate_is_zero() -> None:
    slots = Slots(1)
    gens = []
    for _ in range((1 << wire.GEN_BITS) + 1):
        transfer = slots.take()
        gens.append(wire.gen_of(transfer))
        assert wire.immediate(wire.IMM_PAGE, transfer) != 0
        slots.give_back(transfer)
    assert min(gens) == 1
    assert gens[-3:] == [65535, 1, 2]


def test_a_slot_is_not_given_back_twice() -> None:
    slots = Slots(1)
    first = slots.take()
    slots.give_back(first)
    slots.take()
    with pytest.raises(AssertionError):
        slots.give_back(first)


@pytest.mark.parametrize("transfer", [0, 1, -1, 1 << 30, (1 << 14) - 1])
def test_a_transfer_without_generation_or_with_too_many_bits_is_refused(transfer: int) -> None:
    with pytest.raises(WireError):
        wire.check_transfer(transfer)
