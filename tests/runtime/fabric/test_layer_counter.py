"""Rank 0's end of the layer counter."""

import mmap
import os
import struct

import pytest

from tandem_runtime.layer_counter import LayerCounter


def test_each_layer_is_stored_and_signalled() -> None:
    counter = LayerCounter()
    word = mmap.mmap(counter.memfd, 8, prot=mmap.PROT_READ)
    counter.store(28)
    counter.bump()
    counter.bump()
    assert struct.unpack_from("<Q", word) == (30,)
    assert os.eventfd_read(counter.eventfd) == 3
    with pytest.raises(BlockingIOError):
        os.eventfd_read(counter.eventfd)


def test_the_counter_never_goes_back() -> None:
    counter = LayerCounter()
    counter.store(5)
    with pytest.raises(AssertionError):
        counter.store(4)
    counter.store(5)
