"""Health and choice: tables. Silence is not age."""

from __future__ import annotations

import pytest

from tandem_runtime.messenger import decode, patience
from tandem_runtime.messenger.peers import Candidate, Health, choose, health


@pytest.mark.parametrize(
    ("silence_s", "age_s", "expected"),
    [
        (0.0, 0.0, Health.HEALTHY),
        (2.9, 2.9, Health.HEALTHY),
        (0.1, 3.0, Health.WEDGED),  # its core answers, its loop does not move
        (0.1, 3600.0, Health.WEDGED),
        (3.0, 0.0, Health.SUSPECT),
        (4.9, 9.0, Health.SUSPECT),
        (5.0, 0.0, Health.DEAD),
    ],
)
def test_health(silence_s: float, age_s: float, expected: Health) -> None:
    assert health(silence_s, age_s) is expected


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([], None),
        ([Candidate("a", True, 0, 0)], None),
        ([Candidate("a", False, 9, 0), Candidate("b", True, 1, 5)], "b"),  # the same zone first
        ([Candidate("a", True, 0, 0), Candidate("b", False, 1, 5)], "b"),  # if it has a credit
        ([Candidate("a", True, 1, 0), Candidate("b", True, 2, 5)], "b"),  # then most credits
        ([Candidate("a", True, 2, 6), Candidate("b", True, 2, 5)], "b"),  # then the fewest so far
    ],
)
def test_choice(candidates: list[Candidate], chosen: str | None) -> None:
    best = choose(candidates)
    assert (best.uid if best else None) == chosen


def test_an_unanswered_dispatch_is_asked_for_five_seconds() -> None:
    assert patience.UNANSWERED_S * decode.DISPATCHES == 5


def test_an_unanswered_cancel_is_asked_for_three_times_two_seconds() -> None:
    assert (patience.CANCEL_S, decode.CANCELS) == (2, 3)


def test_a_transfer_that_pongs_list_waits_for_ever_and_one_they_do_not_list_waits_little() -> None:
    accepted = decode.Transfer(1, 1, 4, decode.Phase.ACCEPTED)
    assert patience.decode_transfer_s(accepted, listed=False) == patience.NOT_LISTED_S
    assert patience.decode_transfer_s(accepted, listed=None) == patience.NO_LIFE_S


def test_nothing_but_the_fabric_ends_the_wait_for_a_closing_link() -> None:
    for link in (decode.Link.OPENING, decode.Link.CLOSING):
        assert patience.decode_link_s(decode.Peer(link=link)) == float("inf")
    for phase in (decode.Phase.FENCED, decode.Phase.QUARANTINED):
        assert patience.decode_transfer_s(decode.Transfer(1, 1, 4, phase), listed=False) == float("inf")
