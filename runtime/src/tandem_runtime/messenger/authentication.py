"""Who may talk to us: the peer key, the proofs in HELLO and its answers, the session key, and `/peer`.

Knows: keys, transcripts, digests. Does not know: links, epochs' meaning, HTTP servers.

Every worker of a deployment holds the same peer key. HELLO and HELLO_ACK carry a nonce each and a keyed
BLAKE2s over the transcript so far, so that neither side can be talked to by a replay; the session key of
the link is derived from both and seals every frame of it (in the C core). Two keys are accepted, `current`
and `previous`, so that the Secret can be rotated without a pause.

The trust boundary: a holder of the peer key can write the whole KV pool of every worker that holds it. The
key keeps others out; it does not keep its holders apart.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from . import wire

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NONCE_NBYTES = 16
KEY_MIN_NBYTES = 16
REQUEST_HEADER = "Tandem-Peer-Request"  # hex nonce, then hex proof, one space between
ANSWER_HEADER = "Tandem-Peer-Answer"  # hex proof
_SENDER = struct.Struct("<QII")  # node, incarnation, epoch: in the frame's header, so outside the body

_HELLO, _ACK, _REJECT, _SESSION = b"tdmHELLO", b"tdmH_ACK", b"tdmH_REJ", b"tdmSESSN"

Greeting = wire.Hello | wire.HelloAck | wire.HelloReject


@dataclass(frozen=True, slots=True)
class Sender:
    """Who a frame's header says it is from."""

    node: int
    incarnation: int
    epoch: int

    def pack(self) -> bytes:
        return _SENDER.pack(self.node, self.incarnation, self.epoch)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_NBYTES)


def _digest(key: bytes, person: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2s(key=key, person=person)
    for part in parts:
        state.update(len(part).to_bytes(4, "little"))
        state.update(part)
    return state.digest()


def _bare(body: Greeting) -> bytes:
    return wire.encode_body(msgspec.structs.replace(body, proof=b""))


def hello_proof(key: bytes, sender: Sender, hello: wire.Hello) -> bytes:
    return _digest(key, _HELLO, sender.pack(), _bare(hello))


def ack_proof(key: bytes, hello: wire.Hello, sender: Sender, ack: wire.HelloAck) -> bytes:
    """Covers the whole HELLO, its proof included, so that an answer fits one HELLO only."""
    return _digest(key, _ACK, wire.encode_body(hello), sender.pack(), _bare(ack))


def reject_proof(key: bytes, hello: wire.Hello, sender: Sender, reject: wire.HelloReject) -> bytes:
    return _digest(key, _REJECT, wire.encode_body(hello), sender.pack(), _bare(reject))


def session_key(key: bytes, hello: wire.Hello, ack: wire.HelloAck) -> bytes:
    """The 32 bytes that seal the frames of one link."""
    return _digest(key, _SESSION, wire.encode_body(hello), wire.encode_body(ack))


def equal(mine: bytes, yours: bytes) -> bool:
    """Comparison whose time says nothing of where the two differ."""
    return hmac.compare_digest(mine, yours)


class PeerKeyError(ValueError):
    """A peer key that is missing or too short."""


class PeerKeys:
    """The deployment's peer key and its predecessor, each 32 bytes derived from its file's content."""

    __slots__ = ("_path", "_stamp", "accepted")

    def __init__(self, accepted: tuple[bytes, ...], path: Path | None = None) -> None:
        self.accepted = accepted  # current first
        self._path = path
        self._stamp: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: Path) -> PeerKeys:
        """`path` is a directory with the files `current` and, perhaps, `previous`, as a Secret is mounted;
        or one file, the current key.
        """
        keys = cls((), path)
        keys.refresh()
        return keys

    @classmethod
    def of(cls, current: bytes, previous: bytes | None = None) -> PeerKeys:
        return cls(tuple(_derive(secret) for secret in (current, previous) if secret is not None))

    def refresh(self) -> None:
        """Reads the files again if they changed: the kubelet replaces them in place when the Secret is
        rotated.
        """
        if self._path is None:
            return
        names = ("current", "previous") if self._path.is_dir() else ("",)
        files = [self._path / name for name in names if (self._path / name).is_file()]
        stamp = tuple(file.stat().st_mtime_ns for file in files)
        if stamp == self._stamp and self.accepted:
            return
        if not files or (names[0] and files[0].name != names[0]):
            raise PeerKeyError(
                f"{self._path}: no peer key; expected a file, or a directory with the file 'current'"
            )
        accepted = []
        for file in files:
            secret = file.read_bytes().strip()
            if len(secret) < KEY_MIN_NBYTES:
                raise PeerKeyError(
                    f"{file}: the peer key has {len(secret)} bytes; it needs at least {KEY_MIN_NBYTES}"
                )
            accepted.append(_derive(secret))
        self.accepted, self._stamp = tuple(accepted), stamp

    @property
    def current(self) -> bytes:
        return self.accepted[0]

    # --- /peer ------------------------------------------------------------------------------------

    def peer_request(self) -> tuple[dict[str, str], bytes]:
        """Headers for `GET /peer`, and the nonce that its answer must be bound to."""
        nonce = new_nonce()
        return {REQUEST_HEADER: f"{nonce.hex()} {_http_proof(self.current, b'request', nonce).hex()}"}, nonce

    def peer_answer(self, headers: Mapping[str, str], body: bytes) -> tuple[bytes, dict[str, str]] | None:
        """The answer and its headers, or None if the request does not prove a key of ours."""
        nonce, _, proof = headers.get(REQUEST_HEADER, "").partition(" ")
        try:
            asked, proven = bytes.fromhex(nonce), bytes.fromhex(proof)
        except ValueError:
            return None
        if len(asked) != NONCE_NBYTES:
            return None
        for key in self.accepted:
            if equal(_http_proof(key, b"request", asked), proven):
                return body, {ANSWER_HEADER: _http_proof(key, b"answer", asked + body).hex()}
        return None

    def verify_peer_answer(self, nonce: bytes, body: bytes, headers: Mapping[str, str]) -> bool:
        try:
            proven = bytes.fromhex(headers.get(ANSWER_HEADER, ""))
        except ValueError:
            return False
        return any(equal(_http_proof(key, b"answer", nonce + body), proven) for key in self.accepted)


def _derive(secret: bytes) -> bytes:
    return hashlib.blake2s(secret, person=b"tdmPEERK").digest()


def _http_proof(key: bytes, direction: bytes, message: bytes) -> bytes:
    return hmac.new(key, direction + message, hashlib.sha256).digest()
