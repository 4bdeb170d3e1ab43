"""The page pool against a naive model, and the promises its callers build on."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem_runtime.engine.pages import PagePool
from tandem_runtime.engine.prefix import extend_names

KEY = b"0123456789abcdef"


def names_of(tokens: list[int], page_tokens: int = 4, key: bytes = KEY) -> list[bytes]:
    names: list[bytes] = []
    extend_names(names, tokens, page_tokens, key)
    return names


def filled(pool: PagePool, count: int, names: list[bytes]) -> list[int]:
    pages = pool.allocate(count)
    for page, name in zip(pages, names, strict=False):
        pool.cache(page, name)
    return pages


def test_only_full_pages_have_names() -> None:
    assert [len(names_of(list(range(n)))) for n in (0, 3, 4, 5, 7, 8)] == [0, 0, 1, 1, 1, 2]


def test_names_grow_as_tokens_come_and_equal_those_computed_at_once() -> None:
    tokens = list(range(40))
    names: list[bytes] = []
    extend_names(names, tokens[:8], 4, KEY)
    extend_names(names, tokens[8:], 4, KEY)
    assert names == names_of(tokens)


def test_a_name_depends_on_every_token_before_it_and_on_the_key() -> None:
    tokens = list(range(12))
    other = [99, *tokens[1:]]
    assert not set(names_of(tokens)) & set(names_of(other))
    assert not set(names_of(tokens)) & set(names_of(tokens, key=b"another key"))
    assert names_of([*tokens[:8], 7, 7, 7, 7])[:2] == names_of(tokens)[:2]


def test_a_cached_prefix_is_found_again_and_taken_out_of_the_middle_of_the_eviction_order() -> None:
    pool = PagePool(4, 4)
    a, b = names_of([1] * 4), names_of([2] * 4)
    (page_a,) = filled(pool, 1, a)
    (page_b,) = filled(pool, 1, b)
    pool.release([page_a])
    pool.release([page_b])
    assert pool.match(b) == [page_b]
    pool.take([page_b])
    taken = pool.allocate(3)
    assert page_b not in taken
    assert pool.match(a) == []
    assert pool.match(b) == [page_b]
    pool.check()


def test_free_pages_are_given_before_any_prefix_is_evicted() -> None:
    pool = PagePool(3, 4)
    names = names_of([1] * 4)
    pool.release(filled(pool, 1, names))
    pool.allocate(2)
    assert pool.match(names)
    pool.allocate(1)
    assert not pool.match(names)


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    pool = PagePool(3, 4)
    names = names_of(list(range(12)))
    pages = filled(pool, 3, names)
    pool.release(pages)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.match(names) == pages[:left]


def test_of_equal_pages_the_first_stays_indexed_and_the_others_become_free() -> None:
    pool = PagePool(4, 4)
    names = names_of([5] * 4)
    first, second = filled(pool, 1, names), filled(pool, 1, names)
    pool.release(first)
    pool.release(second)
    counts = pool.counts()
    assert (counts.free, counts.cached) == (3, 1)
    assert pool.match(names) == first


def test_a_pinned_page_outlives_its_request_and_returns_with_the_pin() -> None:
    pool = PagePool(2, 4)
    pages = filled(pool, 2, names_of(list(range(8))))
    pool.pin("ticket", pages)
    pool.release(pages)
    assert (pool.available, pool.pinned, pool.counts().cached) == (0, 2, 0)
    pool.unpin("ticket")
    assert (pool.available, pool.pinned, pool.counts().cached) == (2, 0, 2)
    pool.check()


def test_a_page_with_two_pins_counts_once_and_returns_with_the_last() -> None:
    pool = PagePool(1, 4)
    page = pool.allocate(1)
    pool.pin("old ticket", page)
    pool.pin("new ticket", page)
    pool.release(page)
    pool.unpin("old ticket")
    assert (pool.pinned, pool.available) == (1, 0)
    pool.unpin("new ticket")
    assert (pool.pinned, pool.available) == (0, 1)


def test_a_forgotten_page_is_not_found_and_is_free_after_its_release() -> None:
    pool = PagePool(2, 4)
    names = names_of(list(range(8)))
    pages = filled(pool, 2, names)
    pool.forget(pages[1:])
    assert pool.match(names) == pages[:1]
    pool.release(pages)
    assert (pool.counts().free, pool.counts().cached) == (1, 1)
    pool.check()


MISUSES = {
    "release twice": lambda pool, pages: pool.release(pages),
    "pin what nobody holds": lambda pool, pages: pool.pin("ticket", pages),
    "cache what nobody holds": lambda pool, pages: pool.cache(pages[0], b"name"),
    "allocate more than there is": lambda pool, pages: pool.allocate(3),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_caught_where_it_happens(misuse: str) -> None:
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError):
        MISUSES[misuse](pool, pages)


def test_a_request_cannot_release_what_only_a_ticket_holds() -> None:
    pool = PagePool(1, 4)
    page = pool.allocate(1)
    pool.pin("ticket", page)
    pool.release(page)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(page)


def test_the_check_sees_a_lost_page() -> None:
    pool = PagePool(2, 4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


class NaivePool:
    """The same promises, kept by looking at everything each time."""

    def __init__(self, pages: int) -> None:
        self.holders: dict[int, Counter[str]] = {page: Counter() for page in range(pages)}
        self.name: dict[int, bytes] = {}
        self.let_go: list[int] = []  # in order; a page stands where it was let go last

    def held(self, page: int) -> bool:
        return self.holders[page].total() > 0

    def find(self, name: bytes) -> int | None:
        return next((page for page, other in self.name.items() if other == name), None)

    def hold(self, page: int, holder: str) -> None:
        self.holders[page][holder] += 1

    def drop(self, page: int, holder: str) -> None:
        self.holders[page][holder] -= 1
        if not self.held(page):
            if page in self.let_go:
                self.let_go.remove(page)
            self.let_go.append(page)

    def cached(self) -> list[int]:
        return [page for page in self.let_go if page in self.name and not self.held(page)]

    def counts(self) -> tuple[int, int, int]:
        unheld = [page for page in self.holders if not self.held(page)]
        cached = [page for page in unheld if page in self.name]
        pinned = [
            page for page, by in self.holders.items() if any(n and h != "request" for h, n in by.items())
        ]
        return len(unheld) - len(cached), len(cached), len(pinned)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_a_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    total, page_tokens = rng.randint(1, 24), 4
    pool, naive = PagePool(total, page_tokens), NaivePool(total)
    requests: list[tuple[list[int], list[bytes]]] = []
    pins: dict[str, list[int]] = {}

    for op in range(600):
        match rng.choice(("start", "start", "finish", "pin", "unpin", "forget")):
            case "start":
                # Few different tokens, so that prefixes meet.
                names = names_of([t for _ in range(rng.randint(1, 6)) for t in [rng.randint(0, 1)] * 4])
                matched = pool.match(names)
                expected = []
                for name in names:
                    page = naive.find(name)
                    if page is None:
                        break
                    expected.append(page)
                assert matched == expected
                fresh = len(names) - len(matched)
                if fresh > pool.available - pool.unheld(matched):
                    continue
                pool.take(matched)
                for page in matched:
                    naive.hold(page, "request")
                blank = sum(not naive.held(page) and page not in naive.name for page in naive.holders)
                evicted = naive.cached()[: max(0, fresh - blank)]
                allocated = pool.allocate(fresh)
                assert {page for page in allocated if page in naive.name} == set(evicted)
                for page in allocated:
                    assert not naive.held(page)
                    naive.name.pop(page, None)
                    naive.hold(page, "request")
                computed = rng.randint(0, len(names))
                pages = matched + allocated
                for page, name in zip(pages[:computed], names, strict=False):
                    pool.cache(page, name)
                    if page not in naive.name and naive.find(name) is None:
                        naive.name[page] = name
                requests.append((pages, names))
            case "finish" if requests:
                pages, _ = requests.pop(rng.randrange(len(requests)))
                pool.release(pages)
                for page in reversed(pages):
                    naive.drop(page, "request")
            case "pin" if requests:
                pages, _ = rng.choice(requests)
                part = pages[rng.randrange(len(pages)) :]
                owner = f"ticket {op}"
                pool.pin(owner, part)
                pins[owner] = part
                for page in part:
                    naive.hold(page, owner)
            case "unpin" if pins:
                owner = rng.choice(sorted(pins))
                pool.unpin(owner)
                for page in reversed(pins.pop(owner)):
                    naive.drop(page, owner)
            case "forget" if requests and rng.random() < 0.2:
                pages, _ = rng.choice(requests)
                pool.forget(pages)
                for page in pages:
                    naive.name.pop(page, None)
        pool.check()
        counts = pool.counts()
        assert (counts.free, counts.cached, counts.pinned) == naive.counts()
        used = sum(naive.held(page) for page in naive.holders)
        assert counts.free + counts.cached + used == counts.total

    for owner in list(pins):
        pool.unpin(owner)
    for pages, _ in requests:
        pool.release(pages)
    counts = pool.counts()
    assert counts.free + counts.cached == counts.total
    assert counts.pinned == 0
