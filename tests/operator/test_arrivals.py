from __future__ import annotations

from tandem_operator.arrivals import ArrivalSamples


def test_a_router_sampled_once_has_not_answered() -> None:
    samples = ArrivalSamples()
    samples.add("r", 0.0, 1000.0)
    assert samples.arrivals(["r"], 1.0) is None


def test_rates_of_routers_add_up_over_their_own_spans() -> None:
    samples = ArrivalSamples()
    for at, a, b in ((0.0, 100, 5), (15.0, 130, 5), (30.0, 160, 20)):
        samples.add("a", at, a)
        samples.add("b", at, b)
    found = samples.arrivals(["a", "b"], 33.0)
    assert found is not None
    assert (found.rate_per_s, found.window_s, found.age_s) == (2.5, 30.0, 3.0)
    assert (found.routers_asked, found.routers) == (2, 2)


def test_a_counter_that_went_backwards_starts_anew() -> None:
    samples = ArrivalSamples()
    for at, count in ((0.0, 500), (15.0, 600), (30.0, 10)):
        samples.add("r", at, count)
    assert samples.arrivals(["r"], 30.0) is None
    samples.add("r", 45.0, 40)
    found = samples.arrivals(["r"], 45.0)
    assert found is not None
    assert found.rate_per_s == 2.0


def test_a_router_that_is_gone_is_forgotten_and_one_that_is_silent_makes_it_stale() -> None:
    samples = ArrivalSamples()
    for at in (0.0, 15.0):
        samples.add("gone", at, at)
        samples.add("silent", at, at)
    samples.add("new", 60.0, 0)
    samples.add("new", 75.0, 30)
    found = samples.arrivals(["silent", "new", "unheard"], 75.0)
    assert found is not None
    assert found.age_s == 60.0
    assert (found.routers_asked, found.routers) == (2, 3)
    assert found.rate_per_s == 3.0


def test_the_window_slides() -> None:
    samples = ArrivalSamples()
    for step in range(20):
        samples.add("r", 15.0 * step, 0 if step < 10 else 150.0 * (step - 9))
    found = samples.arrivals(["r"], 285.0)
    assert found is not None
    assert found.window_s <= 75.0
    assert found.rate_per_s == 10.0
