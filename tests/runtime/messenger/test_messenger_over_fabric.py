"""The two messengers over real libfabric, both ends in this process: what each engine is told, which bytes
land.

Over TCP only: with both ends in one process, libfabric 1.17's shm lets them share a mapping that the first
close takes from both. `test_messenger_shm.py` has two processes.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from messenger_pair import Pair, manifest, until

from tandem_runtime.messenger import wire
from tandem_runtime.messenger.authentication import PeerKeys

PAGES = [3, 5, 9, 1, 2, 4, 6, 8]


async def finished(pair: Pair) -> None:
    await until(lambda: pair.prefill.messenger.live() == 0, "source pages back")
    assert sorted(pair.prefill.free) == list(range(pair.layout.pages))


def writes(pair: Pair) -> object:
    counters = pair.prefill.messenger.snapshot()["counters"]
    assert isinstance(counters, dict)
    return counters["writes"]


async def test_pages_land_and_both_sides_let_go() -> None:
    async with Pair("net", ranks=2) as pair:
        await pair.attached()
        ticket = pair.dispatch(7, 30, PAGES)
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["ready", "released"]
        pair.assert_landed(7, PAGES)
        await finished(pair)
        assert pair.prefill.story(1) == ["dispatched", "released"]
        assert writes(pair) == 2 * 2 * 8
        await until(lambda: ticket in pair.decode.timings, "SENT")
        timing = pair.decode.timings[ticket]
        assert timing.exposed_s is not None
        assert timing.nbytes == 2 * 2 * 8 * pair.layout.page_nbytes


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5, 16, 100])
@pytest.mark.parametrize(("cached", "hit"), [(0, 0), (8, 0), (0, 8), (8, 16), (16, 8), (28, 28)], ids=str)
async def test_each_page_of_each_layer_is_written_once(chunk_tokens: int, cached: int, hit: int) -> None:
    """Whatever the chunks, and whatever either side has cached."""
    async with Pair("net", layers=3) as pair:
        await pair.attached()
        pair.prefill.chunk_tokens, pair.prefill.hit_tokens = chunk_tokens, hit
        first = cached // 4
        ticket = pair.dispatch(7, 31, PAGES[first:], cached_tokens=cached)
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["ready", "released"]
        pair.assert_landed(7, PAGES[first:], first)
        await finished(pair)
        assert writes(pair) == 3 * (8 - first)


async def test_many_transfers_at_once_keep_their_pages_apart() -> None:
    async with Pair("net", pages=64) as pair:
        await pair.attached()
        tickets = {tag: pair.dispatch(tag, 30, [8 * tag + i for i in range(8)]) for tag in range(8)}
        await pair.decode.released_all(*tickets.values())
        for tag, ticket in tickets.items():
            assert pair.decode.story(ticket) == ["ready", "released"]
            pair.assert_landed(tag, [8 * tag + i for i in range(8)])
        await finished(pair)


async def test_a_cancel_before_prefill_begins_returns_the_pages() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        pair.prefill.auto = False
        ticket = pair.dispatch(7, 30, PAGES)
        await until(lambda: pair.prefill.jobs != {}, "dispatched")
        pair.decode.messenger.cancel(ticket, "the client left")
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["released"]
        await until(lambda: "released" in pair.prefill.story(1), "released")
        assert pair.prefill.story(1) == ["dispatched", "cancelled", "released"]
        pair.prefill.messenger.admitted(1, [0] * 8, 0)  # the engine had not heard yet: nothing comes of it
        pair.prefill.messenger.fail(1, "late", retryable=True)


async def test_a_cancel_in_the_middle_returns_the_pages_of_both_sides() -> None:
    async with Pair("net", layers=4) as pair:
        await pair.attached()
        pair.prefill.auto = False
        ticket = pair.dispatch(7, 30, PAGES)
        await until(lambda: pair.prefill.jobs != {}, "dispatched")
        pair.prefill.admit(1)
        chunks = pair.prefill.chunks(1)
        base = pair.prefill.step(1, chunks[0], layers=2)
        await until(lambda: writes(pair) == 2 * 4, "two layers are posted")
        pair.decode.messenger.cancel(ticket, "the client left")
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["released"]
        pair.prefill.counter.store(base + 4)  # the pass goes on, and nobody sends it
        pair.prefill.messenger.computed(base)
        await finished(pair)
        assert writes(pair) == 2 * 4


async def test_a_failed_pass_fails_its_transfers_and_the_next_succeeds() -> None:
    async with Pair("net", layers=4) as pair:
        await pair.attached()
        pair.prefill.auto = False
        ticket = pair.dispatch(7, 30, PAGES)
        await until(lambda: pair.prefill.jobs != {}, "dispatched")
        pair.prefill.admit(1)
        base = pair.prefill.step(1, pair.prefill.chunks(1)[0], layers=1)
        pair.prefill.messenger.aborted(base)
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["failed", "released"]
        assert pair.decode.failures[ticket] == ("the forward pass failed", "the forward pass failed", True)
        await finished(pair)
        pair.prefill.auto = True
        again = pair.dispatch(8, 30, PAGES)
        await pair.decode.released_all(again)
        assert pair.decode.story(again) == ["ready", "released"]
        pair.assert_landed(8, PAGES)


async def test_what_the_engine_refuses_fails_with_its_reason() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        pair.prefill.auto = False
        ticket = pair.dispatch(7, 30, PAGES)
        await until(lambda: pair.prefill.jobs != {}, "dispatched")
        pair.prefill.messenger.fail(1, "token 7 is out of range", retryable=False)
        await pair.decode.released_all(ticket)
        assert pair.decode.failures[ticket] == ("token 7 is out of range", "token 7 is out of range", False)


async def test_a_prompt_that_prefill_cannot_hold_is_refused() -> None:
    async with Pair("net", pages=64) as pair:
        await pair.attached()
        pair.prefill.messenger._layout = replace(pair.layout, pages=4)  # a smaller pool than decode's
        ticket = pair.dispatch(7, 30, PAGES)
        await pair.decode.released_all(ticket)
        assert pair.decode.failures[ticket] == ("too_long", "30 tokens; the pool holds 16", False)


async def test_credits_bound_what_is_under_way() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        pair.prefill.auto = False
        pair.prefill.messenger.set_credits(2)
        await until(lambda: pair.decode.messenger._peers["uid-0"].credits == 2, "two credits")
        tickets = [pair.dispatch(tag, 5, [tag]) for tag in range(2)]
        assert not pair.decode.messenger.can_dispatch()
        for ticket in tickets:
            pair.decode.messenger.cancel(ticket, "enough")
        await pair.decode.released_all(*tickets)
        assert pair.decode.messenger.can_dispatch()
        assert not pair.decode.messenger.can_dispatch(frozenset({"prefill-0"}))


async def test_a_draining_prefill_finishes_and_takes_nothing_new() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        pair.prefill.auto = False
        ticket = pair.dispatch(7, 30, PAGES)
        await until(lambda: pair.prefill.jobs != {}, "dispatched")
        pair.prefill.messenger.drain()
        await until(lambda: not pair.decode.messenger.can_dispatch(), "nothing new")
        pair.prefill.run(1)
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["ready", "released"]


async def test_a_prefill_that_leaves_fails_its_transfers_and_returns_their_pages() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        pair.prefill.auto = False
        ticket = pair.dispatch(7, 30, PAGES)
        await until(lambda: pair.prefill.jobs != {}, "dispatched")
        await pair.prefill.messenger.close()
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["failed", "released"]
        assert pair.decode.failures[ticket][2]


async def test_a_decode_that_leaves_ends_every_ticket() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        pair.prefill.auto = False
        ticket = pair.dispatch(7, 30, PAGES)
        await until(lambda: pair.prefill.jobs != {}, "dispatched")
        pair.prefill.admit(1)
        await pair.decode.messenger.close()
        assert pair.decode.story(ticket) == ["failed", "released"]
        await finished(pair)
        assert pair.prefill.story(1) == ["dispatched", "cancelled", "released"]


async def test_a_peer_that_is_listed_again_is_attached_again_in_a_later_epoch() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        for epoch in (2, 3):
            pair.decode.messenger.set_peers([])
            assert not pair.decode.messenger.paired
            pair.decode.messenger.set_peers([pair.address])
            await pair.attached()
            peers = pair.decode.messenger.snapshot()["peers"]
            assert isinstance(peers, dict)
            assert peers["prefill-0"]["epoch"] == epoch
            ticket = pair.dispatch(epoch, 30, PAGES)
            await pair.decode.released_all(ticket)
            pair.assert_landed(epoch, PAGES)


async def test_different_manifests_stay_apart_naming_the_field_and_both_values() -> None:
    async with Pair("net", kv_dtype="bfloat16") as pair:
        await until(lambda: pair.decode.messenger._peers["uid-0"].refusal != "", "refused")
        peers = pair.decode.messenger.snapshot()["peers"]
        assert isinstance(peers, dict)
        assert peers["prefill-0"]["refusal"] == "layout: kv_dtype is same here and bfloat16 there"
        assert not pair.decode.messenger.paired


async def test_a_wrong_key_is_not_answered() -> None:
    pair = Pair("net")
    pair.decode.messenger._greeter._keys = PeerKeys.of(b"x" * 32)
    async with pair:
        await until(lambda: pair.prefill.messenger._courier.tally.malformed > 0, "HELLO was heard")
        assert pair.prefill.messenger.snapshot()["peers"] == {}
        assert not pair.decode.messenger.paired


async def test_the_previous_key_still_pairs() -> None:
    """While the Secret is changed some have the new one and some do not: both ways they meet."""
    for decode, prefill in (("old", "both"), ("both", "old")):
        pair = Pair("net")
        sets = {"old": PeerKeys.of(b"o" * 32), "both": PeerKeys.of(b"n" * 32, b"o" * 32)}
        pair.decode.messenger._greeter._keys = sets[decode]
        pair.prefill.messenger._greeter._keys = sets[prefill]
        async with pair:
            await pair.attached()


async def test_garbage_on_the_bootstrap_endpoint_is_counted_and_dropped() -> None:
    async with Pair("net") as pair:
        await pair.attached()
        hello = wire.Hello(
            nonce=b"n" * 16,
            pod="evil",
            pid=1,
            start_time=1,
            boot_id="",
            manifest=manifest(pair.layout),
            link_address=b"a",
            reply_address=b"b",
            proof=b"p" * 32,
        )
        body = wire.encode_body(hello)
        garbage = [
            b"x",
            b"y" * 200,
            wire.frames(wire.MessageType.HELLO, 9, 1, 1, 0, body)[0],
            wire.frames(wire.MessageType.HELLO, 9, 1, 1, 0, b"\xc1" * 40)[0],
            wire.frames(
                wire.MessageType.CANCEL, 9, 1, 1, 0, wire.encode_body(wire.Cancel(transfer=1, reason=""))
            )[0],
        ]
        for frame in garbage:
            pair.decode_side.fabric.bootstrap_send(pair.prefill_side.fabric.bootstrap_address, frame)
        tally = pair.prefill.messenger._courier.tally
        await until(lambda: tally.malformed == len(garbage), "counted")
        ticket = pair.dispatch(7, 30, PAGES)
        await pair.decode.released_all(ticket)
        assert pair.decode.story(ticket) == ["ready", "released"]


async def test_a_hostile_frame_on_the_link_changes_nothing() -> None:
    """Its sender has the session key, so it is a peer of ours gone wrong."""
    async with Pair("net") as pair:
        await pair.attached()
        link = pair.decode.messenger._peers["uid-0"].link
        dispatch = wire.Dispatch(
            transfer=1 << 14,
            request_id="r",
            tokens=b"12345678",
            cached_tokens=0,
            pages=b"\xff" * 4,
            expected=2,
        )
        bodies = [
            (wire.MessageType.DISPATCH, msgspec.structs.replace(dispatch, transfer=0)),
            (wire.MessageType.DISPATCH, msgspec.structs.replace(dispatch, transfer=1 << 40)),
            (wire.MessageType.ACCEPT, wire.Accept(transfer=1, expected=1, credits=1)),
        ]
        for seq, (kind, body) in enumerate(bodies, start=900):
            pair.decode.messenger._courier.send(link, kind, 1, seq, body)
        tally = pair.prefill.messenger._courier.tally
        await until(lambda: tally.malformed == len(bodies), "counted")
        refused = [
            dispatch,  # page 2^32 - 1
            msgspec.structs.replace(dispatch, pages=b"123"),
            msgspec.structs.replace(dispatch, cached_tokens=4),
            msgspec.structs.replace(dispatch, cached_tokens=-4),
            msgspec.structs.replace(dispatch, tokens=b""),
            msgspec.structs.replace(dispatch, pages=bytes(4), expected=3),
        ]
        for seq, body in enumerate(refused, start=950):
            pair.decode.messenger._courier.send(link, wire.MessageType.DISPATCH, 1, seq, body)
        peer = pair.prefill.messenger._peers[pair.decode_side.identity.node_id]
        await until(lambda: len(peer.state.transfers) == len(refused), "refused")
        assert pair.prefill.log == []
        ticket = pair.dispatch(7, 30, PAGES)
        await pair.decode.released_all(ticket)
        pair.assert_landed(7, PAGES)
