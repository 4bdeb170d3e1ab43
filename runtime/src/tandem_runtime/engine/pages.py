"""Who holds which page of the KV pool, and which unheld pages still carry a prefix worth finding again.

Knows: references, pins, names of prefixes. Does not know: requests, transfers, memory.

A page is in exactly one of three states:

    used    somebody holds a reference: requests, and tickets by their pins
    cached  nobody holds it, but its prefix is indexed: it can be taken again by name, or evicted
    free    nobody holds it and nothing finds it

    free + cached + used == total

`allocate` prefers free pages and then evicts cached ones in the order in which they were let go. A request
lets go of its pages tail first, so the head of a prompt, which more prompts share, outlives its tail.

A pin is a second reference, held by a ticket: after the request that held a page is gone, a peer may still
write it (a destination) or read it (a source). Pins end by proof only, and the proof is the messenger's
business.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


@dataclass(frozen=True, slots=True)
class PageCounts:
    """`pinned` pages are among the used ones."""

    total: int
    free: int
    cached: int
    pinned: int


class PagePool:
    def __init__(self, pages: int, page_tokens: int) -> None:
        if pages < 1 or page_tokens < 1:
            raise ValueError(f"page pool of {pages} pages of {page_tokens} tokens; both must be at least 1")
        self.total = pages
        self.page_tokens = page_tokens
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: low page ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self._name: list[bytes | None] = [None] * pages
        self._index: dict[bytes, int] = {}
        self._pins: dict[Hashable, tuple[int, ...]] = {}
        self._pinned: Counter[int] = Counter()  # page -> tickets that pin it

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now."""
        return len(self._free) + len(self._cached)

    @property
    def pinned(self) -> int:
        """Distinct pages that no release can bring back before their ticket ends."""
        return len(self._pinned)

    def counts(self) -> PageCounts:
        return PageCounts(self.total, len(self._free), len(self._cached), len(self._pinned))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """The pages of the longest indexed prefix. `take` them before anything is allocated."""
        pages: list[int] = []
        for name in names:
            page = self._index.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def unheld(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds: by so many `take` shrinks `available`."""
        return sum(1 for page in pages if not self._references[page])

    def unpinned(self, pages: Iterable[int]) -> int:
        return sum(1 for page in pages if page not in self._pinned)

    def take(self, pages: Iterable[int]) -> None:
        """Hold matched pages: one more reference each."""
        for page in pages:
            if not self._references[page]:
                del self._cached[page]
            self._references[page] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each; where free pages do not suffice, cached ones are evicted."""
        assert count <= self.available, (count, self.available)
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference of each of `pages`, which stand in the order of their tokens."""
        for page in reversed(pages):
            references = self._references[page] - 1
            assert references >= self._pinned.get(page, 0), f"page {page} was released more often than taken"
            self._drop_to(page, references)

    def pin(self, owner: Hashable, pages: Iterable[int]) -> None:
        """Hold `pages`, which somebody holds now, for `owner` too. An owner pins once."""
        assert owner not in self._pins, f"{owner!r} holds a pin already"
        self._pins[owner] = held = tuple(pages)
        for page in held:
            assert self._references[page], f"page {page} is pinned by {owner!r} but nobody holds it"
            self._references[page] += 1
            self._pinned[page] += 1

    def unpin(self, owner: Hashable) -> None:
        for page in reversed(self._pins.pop(owner)):
            self._pinned[page] -= 1
            if not self._pinned[page]:
                del self._pinned[page]
            self._drop_to(page, self._references[page] - 1)

    def cache(self, page: int, name: bytes) -> None:
        """Index a full page that the caller holds, once the pass or the transfer that filled it has
        succeeded.

        Of several pages with one content (equal prompts at the same time) the first stays indexed.
        """
        assert self._references[page], f"page {page} is indexed but nobody holds it"
        if self._name[page] is None and name not in self._index:
            self._name[page] = name
            self._index[name] = page

    def forget(self, pages: Iterable[int]) -> None:
        """Held pages whose content is not to be trusted any more: nobody finds them again."""
        for page in pages:
            assert self._references[page], f"page {page} is to be forgotten but nobody holds it"
            self._forget(page)

    def _forget(self, page: int) -> None:
        name = self._name[page]
        if name is not None:
            del self._index[name]
            self._name[page] = None

    def _drop_to(self, page: int, references: int) -> None:
        self._references[page] = references
        if references:
            return
        if self._name[page] is None:
            self._free.append(page)
        else:
            self._cached[page] = None

    @property
    def references(self) -> int:
        """All references together, pins included: what the holders' own books must add up to."""
        return sum(self._references)

    @property
    def pins(self) -> int:
        return sum(len(pages) for pages in self._pins.values())

    def check(self) -> None:
        """Assert that the books agree: linear in the pool's size, for idle moments and tests."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is both free and cached"
        unheld = {page for page, references in enumerate(self._references) if references == 0}
        assert min(self._references) >= 0, "a page has less than no reference"
        assert free | cached == unheld, "a page without holder is lost, or a held one is on offer"
        assert all(self._name[page] is None for page in free), "a free page is still indexed"
        assert all(self._name[page] is not None for page in cached), "a cached page is not indexed"
        named = {name: page for page, name in enumerate(self._name) if name is not None}
        assert named == self._index, "names and index disagree"
        pinned = Counter(page for pages in self._pins.values() for page in pages)
        assert pinned == self._pinned, "pins and their counts disagree"
        assert all(self._references[page] >= count for page, count in pinned.items()), "a pin holds nothing"
