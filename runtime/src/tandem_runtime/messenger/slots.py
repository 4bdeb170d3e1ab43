"""The slots of the immediate: 14 bits of place, 16 bits of generation.

Slots are reused first in, first out, and each use has the next generation, so a (slot, generation) pair
comes back after 2^30 transfers. A late immediate of an ended transfer therefore names a pair that nobody
counts any more. Generation 0 is never used: no immediate is 0.
"""

from __future__ import annotations

from collections import deque

from . import wire


class Slots:
    __slots__ = ("_free", "_gen")

    def __init__(self, count: int = 1 << wire.SLOT_BITS) -> None:
        self._free = deque(range(count))
        self._gen = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The id of a new transfer. Raises IndexError when all slots are taken."""
        slot = self._free.popleft()
        self._gen[slot] = self._gen[slot] % ((1 << wire.GEN_BITS) - 1) + 1
        return wire.transfer_id(slot, self._gen[slot])

    def give_back(self, transfer: int) -> None:
        """Only when no write of the transfer can land any more."""
        slot = wire.slot_of(transfer)
        assert self._gen[slot] == wire.gen_of(transfer), transfer
        self._free.append(slot)
