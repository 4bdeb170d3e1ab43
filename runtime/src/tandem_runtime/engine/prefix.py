"""Name full pages by what they hold: a hash of the page's tokens chained to the hash of the page before it.

Knows: token ids and a key. Does not know: pages of memory.

Equal names mean equal prefixes from position 0, so a page may be shared by its name alone. The hash is keyed
with a secret of this process, so that no client can forge another's prefix, and 128 bits long, so that
nothing needs to compare tokens on a hit.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Request

NAME_NBYTES = 16


def extend_names(names: list[bytes], tokens: Sequence[int], page_tokens: int, key: bytes) -> None:
    """Append the names of the full pages in `tokens`, which continue where the pages named in `names` end.

    A partly filled last page gets no name: its content would still change.
    """
    ids = array("I", tokens)
    data = memoryview(ids.tobytes())
    page_nbytes = page_tokens * ids.itemsize
    parent = names[-1] if names else b""
    for start in range(0, len(data) - page_nbytes + 1, page_nbytes):
        digest = hashlib.blake2b(parent, digest_size=NAME_NBYTES, key=key)
        digest.update(data[start : start + page_nbytes])
        parent = digest.digest()
        names.append(parent)


class PrefixNames:
    """Names of requests' pages, computed once and only as far as they are asked for."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._key = secrets.token_bytes(16)

    def of(self, request: Request, pages: int) -> list[bytes]:
        """At least the first `pages` names; the request has tokens for so many full pages."""
        names = request.page_names
        if len(names) < pages:
            tokens = request.tokens(len(names) * self._page_tokens, pages * self._page_tokens)
            extend_names(names, tokens, self._page_tokens, self._key)
        return names
