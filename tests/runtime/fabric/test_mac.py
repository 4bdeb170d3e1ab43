"""The core's keyed BLAKE2s against hashlib's."""

import hashlib
import random

from tandem_runtime.fabric import _core


def mac(key: bytes, data: bytes) -> bytes:
    out = _core.ffi.new("uint8_t[16]")
    _core.lib.tdm_mac(key, data, len(data), out)
    return bytes(out)


def test_it_equals_hashlib_at_every_length_around_the_block_size() -> None:
    chance = random.Random(7)
    for nbytes in [*range(200), 255, 256, 257, 4095, 4096, 8176, 8192]:
        key, data = chance.randbytes(32), chance.randbytes(nbytes)
        assert mac(key, data) == hashlib.blake2s(data, key=key, digest_size=16).digest(), nbytes


def test_it_equals_hashlib_on_random_inputs() -> None:
    chance = random.Random(11)
    for _ in range(500):
        key, data = chance.randbytes(32), chance.randbytes(chance.randrange(3000))
        assert mac(key, data) == hashlib.blake2s(data, key=key, digest_size=16).digest()
