"""The protocol's machines, explored exhaustively against an adversary: every invariant in every reachable
state.

Sizes and seconds are printed (`pytest -s`). `TANDEM_DEEP_CHECK=1` adds the deep bounds, which take many
minutes: give `--timeout 1200`.
"""

from __future__ import annotations

import os

import pytest
from model_explorer import Together, explore
from model_world import Bounds, Model

CALM = {"losses": False, "refusals": False, "engine_failures": False}
ALONE = [
    pytest.param(Bounds(epochs=2), id="one transfer of two pages, every fault, two epochs"),
    pytest.param(Bounds(epochs=2, shm=True), id="the same over shm, where the target reads"),
    pytest.param(Bounds(one_endpoint=True), id="one endpoint for all, as on EFA: pages stay out of use"),
    pytest.param(Bounds(pages=1, epochs=2, attempts=2), id="asking twice before asking otherwise"),
    pytest.param(Bounds(memories=2), id="prefill forgets decode, and hears from it again"),
    pytest.param(Bounds(decode_incarnations=2, prefill_incarnations=2), id="both crash and come back"),
    pytest.param(Bounds(transfers=2, pages=1, **CALM), id="1 prefill, 1 decode, 2 transfers"),
    pytest.param(
        Bounds(transfers=2, pages=1, shm=True, **CALM), id="1 prefill, 1 decode, 2 transfers, over shm"
    ),
]
TOGETHER = [
    pytest.param(Bounds(**CALM), "decode", id="2 prefills, 1 decode, 1 transfer each"),
    pytest.param(
        Bounds(pages=1, prefill_incarnations=2, **CALM),
        "prefill",
        id="1 prefill that crashes, 2 decodes, 1 transfer each",
    ),
]
CRASHES = {"epochs": 2, "decode_incarnations": 2, "prefill_incarnations": 2}
DEEP = [
    pytest.param(Bounds(**CRASHES), id="crashes and epochs"),
    pytest.param(
        Bounds(shm=True, decode_incarnations=2, prefill_incarnations=2),
        id="both crash and come back, over shm",
    ),
    pytest.param(Bounds(transfers=2, pages=1, epochs=2, **CALM), id="two transfers, two epochs"),
    pytest.param(Bounds(transfers=2, **CALM), id="two transfers of two pages"),
]
MAX_STATES = 20_000_000
if "TANDEM_DEEP_CHECK" in os.environ:
    ALONE += DEEP


@pytest.mark.parametrize("bounds", ALONE)
def test_one_pair_keeps_every_invariant(bounds: Bounds) -> None:
    finding = explore(Model(bounds), MAX_STATES)
    print(finding)
    assert finding.broken is None, finding


@pytest.mark.parametrize(("bounds", "shared"), TOGETHER)
def test_two_pairs_keep_every_invariant(bounds: Bounds, shared: str) -> None:
    finding = explore(Together(Model(bounds), 2, shared), MAX_STATES)
    print(finding)
    assert finding.broken is None, finding
