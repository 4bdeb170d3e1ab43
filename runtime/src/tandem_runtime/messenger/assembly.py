"""Puts the fragments of one link's messages together again.

Knows: headers and fragments. Does not know: what messages mean. Fragments of one message are named by
(type, seq), so that those of a resend complete those of the first send. What is kept of incomplete messages
is bounded; the oldest gives way, and its sender asks again.
"""

from __future__ import annotations

from . import wire

MESSAGE_MAX_NBYTES = 16 << 20  # two million tokens and their pages
PENDING_MAX = 64


class Assembly:
    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: dict[tuple[wire.MessageType, int], tuple[int, dict[int, bytes]]] = {}

    def take(self, frame: bytes) -> tuple[wire.Header, bytes] | None:
        """Header and whole body once the last fragment has come. Raises WireError."""
        header, part = wire.parse(frame)
        if header.length > MESSAGE_MAX_NBYTES:
            raise wire.WireError(
                f"{header.type.name} of {header.length} bytes; at most {MESSAGE_MAX_NBYTES} are taken"
            )
        if header.count == 1:
            return header, part
        name = (header.type, header.seq)
        length, parts = self._pending.pop(name, (header.length, {}))
        if length != header.length:
            parts = {}
        parts[header.index] = part
        if len(parts) == header.count:
            return header, b"".join(parts[index] for index in range(header.count))
        self._pending[name] = (header.length, parts)
        if len(self._pending) > PENDING_MAX:
            del self._pending[next(iter(self._pending))]
        return None
