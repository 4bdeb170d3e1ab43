"""The layer counter: rank 0 says how many layers it has finished, the lead's progress thread sends them.

Knows: one 64-bit word in shared memory and an eventfd. Does not know: passes, pages.

The value is monotonic over passes: passes x layers + layers done. The store has release order, so whoever
reads the new value also sees the KV that was written before it. On a CPU the writer also signals the eventfd,
so that the reader may sleep.
"""

from __future__ import annotations

import mmap
import os

from .fabric import _core

COUNTER_NBYTES = 4096


class LayerCounter:
    """Rank 0's end. `memfd` and `eventfd` go to the lead, which maps the word and hands both to the C
    core.
    """

    def __init__(self) -> None:
        self.memfd = os.memfd_create("tandem-layer-counter", os.MFD_CLOEXEC)
        os.ftruncate(self.memfd, COUNTER_NBYTES)
        self._map = mmap.mmap(self.memfd, COUNTER_NBYTES)
        self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._word = _core.ffi.cast("uint64_t *", _core.ffi.from_buffer(self._map))
        self.value = 0

    def store(self, value: int) -> None:
        """Publish `value`; never smaller than before."""
        assert value >= self.value, (value, self.value)
        self.value = value
        _core.lib.tdm_store_release(self._word, value)
        os.eventfd_write(self.eventfd, 1)

    def bump(self) -> None:
        """One more layer is done: call after its output projection's all-reduce."""
        self.store(self.value + 1)
