"""The messenger's messages and their frames: bytes in, bytes out, no state.

Knows: header, bodies, fragments. Does not know: links, keys, time.

A message is a fixed header and a msgpack body, cut into frames of at most `FRAME_NBYTES` because efa-direct
carries about 8 KiB. Frames may arrive in any order, twice, or never: every message is idempotent and
carries ids. The 16-byte MAC behind each frame of a link is the C core's (it must check PING without
Python); HELLO and its answers travel unsealed on the bootstrap endpoint and carry their own proof in the
body.

Header, 40 bytes little-endian:
    magic u32 | version u8 | type u8 | flags u16 | node u64 | incarnation u32 | epoch u32 | seq u32 |
    length u32 | index u16 | count u16 | floor u32
`length` counts the whole body, `index`/`count` number the fragments. `seq` names a transfer: every message
about it carries the number of its DISPATCH, a resend too; messages about none carry 0. `floor` says, in
frames from decode, that every transfer with a smaller seq has ended there, so prefill may forget it; prefill
sends 0.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import msgspec

MAGIC = 0x4D444E54  # "TNDM"
VERSION = 1
HEADER = struct.Struct("<IBBHQIIIIHHI")
FRAME_NBYTES = 8192 - 16  # the core appends the MAC
FRAGMENT_NBYTES = FRAME_NBYTES - HEADER.size

PING_BODY = struct.Struct("<Q")  # sender's CLOCK_MONOTONIC, ns
PONG_PREFIX = struct.Struct("<QQ")  # the PING's time, ns; age of the body the lead published, ns

SLOT_BITS, GEN_BITS = 14, 16
IMM_PAGE, IMM_TAIL, IMM_PROBE = 0, 1, 2


class MessageType(enum.IntEnum):
    HELLO = 1  # D -> P, bootstrap
    HELLO_ACK = 2  # P -> D, bootstrap
    HELLO_REJECT = 3  # P -> D, bootstrap
    ATTACH = 4  # D -> P, first frame on the link: proves the session key, hands over the memory regions
    DISPATCH = 5  # D -> P
    ACCEPT = 6  # P -> D
    REJECT = 7  # P -> D
    SENT = 8  # P -> D, diagnostic
    FAIL = 9  # P -> D
    CANCEL = 10  # D -> P
    CANCEL_ACK = 11  # P -> D
    PING = 12  # both ways; answered by the C core
    PONG = 13
    GOODBYE = 14  # both ways


class Reject(enum.StrEnum):
    """Why P does not take a transfer, or a HELLO."""

    BUSY = "busy"
    DRAINING = "draining"
    LAYOUT = "layout"
    TOO_LONG = "too_long"
    BAD_PAGES = "bad_pages"
    COUNT = "count"
    AUTH = "auth"
    VERSION = "version"


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One rank's KV pool as a peer may write it: MR key, base to add to an offset, bytes."""

    key: int
    base: int
    nbytes: int


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Opens an epoch. `proof` is the keyed BLAKE2s, with the peer key, of the sender's node, incarnation
    and epoch and of everything else in the body (`authentication.py`).
    """

    nonce: bytes  # 16 bytes
    pod: str
    pid: int
    start_time: int  # field 22 of /proc/PID/stat
    boot_id: str  # equal: the two sides share clock and, perhaps, processes
    manifest: dict[str, object]
    link_address: bytes
    reply_address: bytes  # D's bootstrap endpoint
    proof: bytes = b""


class HelloAck(msgspec.Struct, frozen=True, kw_only=True):
    """`proof` covers the HELLO's bytes and this body, so both nonces."""

    nonce: bytes
    hello_nonce: bytes
    pod: str
    pid: int
    start_time: int
    boot_id: str
    manifest: dict[str, object]
    link_address: bytes
    credits: int
    proof: bytes = b""


class HelloReject(msgspec.Struct, frozen=True, kw_only=True):
    hello_nonce: bytes
    reason: str  # a Reject value
    field: str = ""
    mine: str = ""
    yours: str = ""
    proof: bytes = b""


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    regions: list[Region]  # index = rank


class TailSlot(msgspec.Struct, frozen=True, array_like=True):
    """Where one tail buffer of a rank goes: region, byte offset, bytes."""

    region: int
    offset: int
    nbytes: int


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Asks P to prefill `tokens[:-1]` and to write the pages from token `cached_tokens` on into `pages`.

    `tokens` is little-endian u32 (4 bytes a token), `pages` likewise: page `i` takes the tokens from
    `cached_tokens + i·page_tokens`.
    """

    transfer: int  # slot | gen << SLOT_BITS
    request_id: str
    tokens: bytes
    cached_tokens: int
    pages: bytes
    expected: int  # D's count of immediates, all ranks together
    tails: list[TailSlot] = []
    replica_seed: int = 0
    priority: int = 0
    salt: bytes = b""


class Accept(msgspec.Struct, frozen=True, kw_only=True):
    transfer: int
    expected: int  # P's own count: must equal D's
    credits: int


class RejectBody(msgspec.Struct, frozen=True, kw_only=True):
    transfer: int
    reason: str
    detail: str = ""
    retry_ms: int = 0


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """After the last post. Diagnostic: readiness never waits for it. Times are P's, in ns; `last_layer_ns`
    is CLOCK_MONOTONIC.
    """

    transfer: int
    posted: int
    nbytes: int
    hidden_nbytes: int  # of writes that had completed when the last layer was done
    queue_ns: int
    prefill_ns: int
    last_layer_ns: int
    transfer_ns: int  # first post to last local completion


class Fail(msgspec.Struct, frozen=True, kw_only=True):
    """P will not finish. With `drained` it also proves that `posted` writes are all there will ever be."""

    transfer: int
    posted: int
    drained: bool
    reason: str
    retryable: bool


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    transfer: int
    reason: str


class CancelAck(msgspec.Struct, frozen=True, kw_only=True):
    """Sent when P has stopped posting and its posted writes have ended. `unknown`: never seen, and a
    tombstone now refuses it.
    """

    transfer: int
    posted: int
    unknown: bool


class Pong(msgspec.Struct, frozen=True, array_like=True):
    """What the lead published last. On the wire `PONG_PREFIX` stands before it, filled in by the C core."""

    credits: int
    draining: bool
    alive: list[int]  # transfers of this link that P still works on


class Goodbye(msgspec.Struct, frozen=True, kw_only=True):
    """Draining: no new DISPATCH; what runs is finished or failed within `finish_s`."""

    finish_s: float


BODIES: dict[MessageType, type[msgspec.Struct]] = {
    MessageType.HELLO: Hello,
    MessageType.HELLO_ACK: HelloAck,
    MessageType.HELLO_REJECT: HelloReject,
    MessageType.ATTACH: Attach,
    MessageType.DISPATCH: Dispatch,
    MessageType.ACCEPT: Accept,
    MessageType.REJECT: RejectBody,
    MessageType.SENT: Sent,
    MessageType.FAIL: Fail,
    MessageType.CANCEL: Cancel,
    MessageType.CANCEL_ACK: CancelAck,
    MessageType.GOODBYE: Goodbye,
}


@dataclass(frozen=True, slots=True)
class Header:
    type: MessageType
    node: int
    incarnation: int
    epoch: int
    seq: int
    length: int
    index: int
    count: int
    floor: int = 0


class WireError(ValueError):
    """A frame that is not ours, is cut short, or contradicts its own header."""


def immediate(kind: int, transfer: int) -> int:
    """`kind:2 | gen:16 | slot:14` of a transfer id (`gen << 14 | slot`)."""
    return kind << (SLOT_BITS + GEN_BITS) | transfer


def transfer_id(slot: int, gen: int) -> int:
    assert 0 <= slot < 1 << SLOT_BITS
    assert 1 <= gen < 1 << GEN_BITS
    return gen << SLOT_BITS | slot


def check_transfer(transfer: int) -> None:
    """Raises WireError for a number that is no slot and generation."""
    if not 0 < transfer < 1 << (SLOT_BITS + GEN_BITS) or gen_of(transfer) == 0:
        raise WireError(f"transfer {transfer} is no slot and generation")


def slot_of(transfer: int) -> int:
    return transfer & ((1 << SLOT_BITS) - 1)


def gen_of(transfer: int) -> int:
    return transfer >> SLOT_BITS


_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}


def encode_body(body: msgspec.Struct) -> bytes:
    return _encoder.encode(body)


def decode_body(kind: MessageType, data: bytes) -> msgspec.Struct:
    """Raises WireError when the bytes are not that message."""
    try:
        return _decoders[kind].decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise WireError(f"{kind.name}: {error}") from error


def encode_ping(now_ns: int) -> bytes:
    return PING_BODY.pack(now_ns)


_pong_decoder = msgspec.msgpack.Decoder(Pong)


def decode_pong(body: bytes) -> tuple[int, int, Pong]:
    """`(sent_ns of the PING, age_ns of what the peer's lead published, what it published)`. Raises
    WireError.
    """
    if len(body) < PONG_PREFIX.size:
        raise WireError(f"PONG of {len(body)} bytes")
    sent_ns, age_ns = PONG_PREFIX.unpack_from(body)
    try:
        return sent_ns, age_ns, _pong_decoder.decode(body[PONG_PREFIX.size :])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise WireError(f"PONG: {error}") from error


def frames(
    kind: MessageType, node: int, incarnation: int, epoch: int, seq: int, body: bytes, floor: int = 0
) -> list[bytes]:
    """The frames of one message, each at most FRAME_NBYTES long."""
    count = max(1, -(-len(body) // FRAGMENT_NBYTES))
    out = []
    for index in range(count):
        part = body[index * FRAGMENT_NBYTES : (index + 1) * FRAGMENT_NBYTES]
        header = HEADER.pack(
            MAGIC, VERSION, kind, 0, node, incarnation, epoch, seq, len(body), index, count, floor
        )
        out.append(header + part)
    return out


def parse(frame: bytes) -> tuple[Header, bytes]:
    """Header and fragment of one frame. Raises WireError."""
    if len(frame) < HEADER.size:
        raise WireError(f"frame of {len(frame)} bytes; a header has {HEADER.size}")
    magic, version, kind, _flags, node, incarnation, epoch, seq, length, index, count, floor = (
        HEADER.unpack_from(frame)
    )
    if magic != MAGIC:
        raise WireError(f"magic {magic:#010x}; ours is {MAGIC:#010x}")
    if version != VERSION:
        raise WireError(f"wire version {version}; ours is {VERSION}")
    try:
        message_type = MessageType(kind)
    except ValueError:
        raise WireError(f"unknown message type {kind}") from None
    part = frame[HEADER.size :]
    expected_count = max(1, -(-length // FRAGMENT_NBYTES))
    if count != expected_count or index >= count:
        raise WireError(f"fragment {index} of {count} for a body of {length} bytes")
    begin = index * FRAGMENT_NBYTES
    if len(part) != min(FRAGMENT_NBYTES, length - begin):
        raise WireError(f"fragment {index} has {len(part)} bytes")
    return Header(message_type, node, incarnation, epoch, seq, length, index, count, floor), part
