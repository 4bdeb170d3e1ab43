"""HELLO and its answers: made, proven, checked.

Knows: identity, manifest, peer keys, transcripts. Does not know: links, epochs' order, when to greet.

HELLO travels on the bootstrap endpoint, where anybody can send. So prefill uses no address out of it, and
answers nothing, before its proof holds; and decode believes only an answer that is bound to the HELLO it
sent. A peer with another key therefore looks like a silent one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from . import authentication, wire
from .authentication import Sender, equal
from .manifest import Difference, difference

if TYPE_CHECKING:
    from .authentication import PeerKeys
    from .manifest import Manifest
    from .ports import Identity


@dataclass(frozen=True, slots=True)
class Heard:
    """A HELLO whose proof holds, and the key that proved it."""

    sender: Sender
    hello: wire.Hello
    key: bytes


class Greeter:
    def __init__(self, identity: Identity, manifest: Manifest, keys: PeerKeys) -> None:
        self._identity = identity
        self._manifest = manifest
        self._keys = keys

    def _sender(self, epoch: int) -> Sender:
        return Sender(self._identity.node_id, self._identity.incarnation, epoch)

    def differs(self, yours: Manifest) -> Difference | None:
        return difference(self._manifest, yours)

    # --- decode -----------------------------------------------------------------------------------

    def key(self, attempt: int) -> bytes:
        """The key for an attempt: an unanswered HELLO may mean that the peer has the other one, so they
        take turns.
        """
        self._keys.refresh()
        return self._keys.accepted[attempt % len(self._keys.accepted)]

    def hello(self, key: bytes, epoch: int, link_address: bytes, reply_address: bytes) -> wire.Hello:
        identity = self._identity
        hello = wire.Hello(
            nonce=authentication.new_nonce(),
            pod=identity.pod,
            pid=identity.pid,
            start_time=identity.start_time,
            boot_id=identity.boot_id,
            manifest=self._manifest,
            link_address=link_address,
            reply_address=reply_address,
        )
        return replace(hello, proof=authentication.hello_proof(key, self._sender(epoch), hello))

    def check_answer(
        self, key: bytes, hello: wire.Hello, header: wire.Header, answer: wire.HelloAck | wire.HelloReject
    ) -> None:
        """Raises WireError."""
        sender = Sender(header.node, header.incarnation, header.epoch)
        if isinstance(answer, wire.HelloAck):
            proof = authentication.ack_proof(key, hello, sender, answer)
        else:
            proof = authentication.reject_proof(key, hello, sender, answer)
        if not equal(proof, answer.proof):
            raise wire.WireError(f"{header.type.name} without a good proof")

    # --- prefill ----------------------------------------------------------------------------------

    def hear(self, frame: bytes) -> Heard:
        """Raises WireError."""
        header, data = wire.parse(frame)
        hello = wire.decode_body(header.type, data)
        if not isinstance(hello, wire.Hello):
            raise wire.WireError(f"{header.type.name} on prefill's bootstrap endpoint")
        self._keys.refresh()
        sender = Sender(header.node, header.incarnation, header.epoch)
        for key in self._keys.accepted:
            if equal(authentication.hello_proof(key, sender, hello), hello.proof):
                return Heard(sender, hello, key)
        raise wire.WireError("HELLO without a good proof")

    def ack(self, heard: Heard, link_address: bytes, credits: int) -> wire.HelloAck:
        identity = self._identity
        ack = wire.HelloAck(
            nonce=authentication.new_nonce(),
            hello_nonce=heard.hello.nonce,
            pod=identity.pod,
            pid=identity.pid,
            start_time=identity.start_time,
            boot_id=identity.boot_id,
            manifest=self._manifest,
            link_address=link_address,
            credits=credits,
        )
        sender = self._sender(heard.sender.epoch)
        return replace(ack, proof=authentication.ack_proof(heard.key, heard.hello, sender, ack))

    def reject(self, heard: Heard, reason: wire.Reject, what: Difference) -> wire.HelloReject:
        reject = wire.HelloReject(
            hello_nonce=heard.hello.nonce, reason=reason, field=what.field, mine=what.mine, yours=what.yours
        )
        sender = self._sender(heard.sender.epoch)
        return replace(reject, proof=authentication.reject_proof(heard.key, heard.hello, sender, reject))
