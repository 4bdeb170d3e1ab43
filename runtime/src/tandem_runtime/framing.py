"""Length-prefixed msgpack over a stream socket: 4 bytes little-endian, then the message."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Bytes in, whole payloads out."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        out, begin = [], 0
        while len(self._data) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data, begin)
            end = begin + LENGTH.size + length
            if len(self._data) < end:
                break
            out.append(bytes(self._data[begin + LENGTH.size : end]))
            begin = end
        del self._data[:begin]
        return out
