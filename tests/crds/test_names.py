from __future__ import annotations

import re

from tandem_crds import names
from tandem_crds.model import NAME_MAX_LENGTH
from tandem_crds.role_config import Role

LONGEST = "a" * NAME_MAX_LENGTH


def test_every_derived_name_is_a_dns_label_even_for_the_longest_model() -> None:
    derived = [
        *(names.role_name(LONGEST, role, "0123456789abcdef") for role in (Role.PREFILL, Role.DECODE)),
        *(names.disruption_budget(LONGEST, role) for role in (Role.PREFILL, Role.DECODE)),
        names.router(LONGEST),
        names.worker_account(LONGEST),
        names.peer_secret(LONGEST),
        names.network_policy(LONGEST),
        names.inspect_job(LONGEST, "0123456789abcdef"),
    ]
    assert len(set(derived)) == len(derived)
    for name in derived:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name


def test_the_longest_name_uses_all_the_room_that_the_limit_leaves() -> None:
    assert len(names.role_name(LONGEST, Role.PREFILL, "0123456789abcdef")) <= 59


def test_the_decode_selector_matches_decode_pods_of_every_revision_and_no_others() -> None:
    terms = dict(term.split("=") for term in names.decode_selector("m").split(","))
    for revision in ("r1", "r2"):
        assert terms.items() <= names.role_labels("m", Role.DECODE, revision, "0" * 16).items()
    assert not terms.items() <= names.role_labels("m", Role.PREFILL, "r1", "0" * 16).items()


def test_labels_are_valid_values() -> None:
    for value in names.role_labels(LONGEST, Role.PREFILL, "0123456789", "0" * 16).values():
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)
