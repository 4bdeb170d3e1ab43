"""Keys, proofs, and what changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tandem_runtime.messenger import authentication, wire
from tandem_runtime.messenger.authentication import PeerKeyError, PeerKeys, Sender

if TYPE_CHECKING:
    from pathlib import Path

KEY, OTHER = b"k" * 32, b"o" * 32
SENDER = Sender(1, 2, 3)
HELLO = wire.Hello(
    nonce=b"n" * 16,
    pod="decode-0",
    pid=7,
    start_time=8,
    boot_id="boot",
    manifest={"layers": 2},
    link_address=b"link",
    reply_address=b"reply",
)
ACK = wire.HelloAck(
    nonce=b"m" * 16,
    hello_nonce=HELLO.nonce,
    pod="prefill-0",
    pid=9,
    start_time=10,
    boot_id="boot",
    manifest={"layers": 2},
    link_address=b"link",
    credits=3,
)


def test_a_proof_changes_with_the_key_the_sender_and_every_field() -> None:
    changes = {
        "nonce": b"N" * 16,
        "pod": "x",
        "pid": 1,
        "start_time": 1,
        "boot_id": "x",
        "manifest": {},
        "link_address": b"x",
        "reply_address": b"x",
    }
    proofs = [
        authentication.hello_proof(KEY, SENDER, HELLO),
        authentication.hello_proof(OTHER, SENDER, HELLO),
        *(
            authentication.hello_proof(KEY, sender, HELLO)
            for sender in (Sender(9, 2, 3), Sender(1, 9, 3), Sender(1, 2, 9))
        ),
        *(
            authentication.hello_proof(KEY, SENDER, replace(HELLO, **{name: value}))
            for name, value in changes.items()
        ),
    ]
    assert len(set(proofs)) == len(proofs)


def test_a_proof_does_not_cover_itself() -> None:
    proof = authentication.hello_proof(KEY, SENDER, HELLO)
    assert authentication.hello_proof(KEY, SENDER, replace(HELLO, proof=proof)) == proof


def test_an_answer_fits_one_hello_only() -> None:
    fresh = replace(HELLO, nonce=b"N" * 16)
    assert authentication.ack_proof(KEY, HELLO, SENDER, ACK) != authentication.ack_proof(
        KEY, fresh, SENDER, ACK
    )


def test_both_nonces_make_the_session_key() -> None:
    keys = {
        authentication.session_key(KEY, hello, ack)
        for hello in (HELLO, replace(HELLO, nonce=b"N" * 16))
        for ack in (ACK, replace(ACK, nonce=b"M" * 16))
    }
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


def test_a_proof_for_one_message_is_none_for_another() -> None:
    """The same bytes under another person string."""
    reject = wire.HelloReject(hello_nonce=HELLO.nonce, reason="layout")
    assert authentication.reject_proof(KEY, HELLO, SENDER, reject) != authentication.ack_proof(
        KEY, HELLO, SENDER, ACK
    )


def test_keys_come_from_a_mounted_secret_and_follow_its_rotation(tmp_path: Path) -> None:
    (tmp_path / "current").write_text("first-secret-of-many-bytes\n")
    keys = PeerKeys.load(tmp_path)
    assert keys.accepted == PeerKeys.of(b"first-secret-of-many-bytes").accepted
    (tmp_path / "previous").write_text("first-secret-of-many-bytes\n")
    (tmp_path / "current").write_text("second-secret-of-many-bytes")
    keys.refresh()
    assert (
        keys.accepted == PeerKeys.of(b"second-secret-of-many-bytes", b"first-secret-of-many-bytes").accepted
    )


def test_one_file_is_the_current_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 20)
    assert PeerKeys.load(tmp_path / "key").accepted == PeerKeys.of(b"k" * 20).accepted


def test_a_missing_or_short_key_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PeerKeyError, match="no peer key"):
        PeerKeys.load(tmp_path / "nothing")
    (tmp_path / "previous").write_bytes(b"k" * 20)
    with pytest.raises(PeerKeyError, match="no peer key"):
        PeerKeys.load(tmp_path)
    (tmp_path / "current").write_bytes(b"short")
    with pytest.raises(PeerKeyError, match="has 5 bytes; it needs at least 16"):
        PeerKeys.load(tmp_path)


def test_peer_answers_only_who_holds_a_key() -> None:
    prefill = PeerKeys.of(KEY, OTHER)
    for keys in (PeerKeys.of(KEY), PeerKeys.of(OTHER)):
        headers, nonce = keys.peer_request()
        answer = prefill.peer_answer(headers, b"body")
        assert answer is not None
        body, proof = answer
        assert keys.verify_peer_answer(nonce, body, proof)
        assert not keys.verify_peer_answer(nonce, b"other body", proof)
        assert not keys.verify_peer_answer(b"n" * 16, body, proof)
        assert not keys.verify_peer_answer(nonce, body, {})
        assert not keys.verify_peer_answer(nonce, body, {authentication.ANSWER_HEADER: "zz"})


@pytest.mark.parametrize("value", ["", "zz zz", "00 00", "00" * 16 + " " + "00" * 32, "00" * 16])
def test_peer_refuses_a_request_without_proof(value: str) -> None:
    assert PeerKeys.of(KEY).peer_answer({authentication.REQUEST_HEADER: value}, b"body") is None
    assert PeerKeys.of(KEY).peer_answer({}, b"body") is None
