"""Decode replicas from arrivals, with routers that say what a test wants; periods and windows are of seconds.

Rates stand a little below a whole number of pods, since a measured rate trembles.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from e2e.fake_pods import ROUTER_PORT, FakeContainer

from .conftest import manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.kubectl import Kubectl

SCALING = {"mode": "QPS", "targetQPS": "2", "minReplicas": 1, "maxReplicas": 5}


class Traffic:
    """Counts up at `rate` per second in the routers of a model."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self.kubectl, self.name, self.rate = kubectl, name, 0.0
        self.routers: list[FakeContainer] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(0.05):
            now = time.monotonic()
            for one in self.routers:
                if one.arrivals is not None:
                    one.arrivals += self.rate * (now - last)
            last = now

    def listen(self) -> None:
        """At the address of the router's pod."""
        pods = self.kubectl.find("pods", f"tandem.dev/model={self.name},app.kubernetes.io/component=router")
        addresses = {pod["status"]["podIP"] for pod in pods} - {one.address for one in self.routers}
        self.routers += [FakeContainer(address, ROUTER_PORT, arrivals=0.0) for address in addresses]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for one in self.routers:
            one.close()


@pytest.fixture
def traffic(models: Kubectl, name: str) -> Iterator[Traffic]:
    models.apply(
        [
            manifest(
                name, prefill={"replicas": None}, scaling={**SCALING, "ratio": {"prefill": 1, "decode": 2}}
            )
        ]
    )
    models.until_condition(name, "Ready", "True")
    traffic = Traffic(models, name)
    yield traffic
    traffic.close()


def until(traffic: Traffic, reason: str, replicas: int, seconds: float = 20) -> float:
    """How long it took, in seconds."""
    began = time.monotonic()

    def satisfied() -> object:
        document = traffic.kubectl.get("dm", traffic.name)
        scaling = document["status"].get("scaling", {})
        found = (scaling.get("reason"), document["spec"]["decode"]["replicas"])
        return found == (reason, replicas) or f"{found}: {scaling.get('message')}"

    traffic.kubectl.until(f"{reason} at {replicas}", satisfied, seconds, pause=0.1)
    return time.monotonic() - began


def test_arrivals_decide(traffic: Traffic, models: Kubectl, name: str) -> None:
    """Up within two periods of being known, down after the window only, prefill by ratio, held in silence."""
    until(traffic, "NoMetrics", 1)
    assert models.condition(name, "ScalingActive")["status"] == "Unknown"
    traffic.listen()
    until(traffic, "NoTraffic", 1)
    traffic.rate = 5.5
    until(traffic, "WithinTolerance", 3)
    assert models.condition(name, "ScalingActive")["status"] == "True"
    models.until("prefill by ratio", lambda: len(models.pods(name, "prefill")) == 2)
    assert len(models.pods(name, "decode")) == 3
    traffic.rate = 40.0
    until(traffic, "AtMaximum", 5)
    traffic.rate = 5.5
    until(traffic, "Stabilizing", 5)
    assert until(traffic, "ScaledDown", 3, 30) > 4, "not before the window of 8 s has passed"
    # Silence: nothing moves, and it is said.
    for one in traffic.routers:
        one.arrivals = None
    until(traffic, "StaleMetrics", 3)
    assert models.condition(name, "ScalingActive")["status"] == "Unknown"
    events = models("get", "events", "-o", "custom-columns=R:.reason,N:.message")
    assert "decode from 5 to 3 replicas" in events


def test_what_holds_a_decision_back(traffic: Traffic, models: Kubectl, name: str) -> None:
    traffic.listen()
    traffic.rate = 5.5
    until(traffic, "WithinTolerance", 3)
    # A second router that does not answer: nothing is scaled down on half of the arrivals.
    models("patch", "dm", name, "--type=merge", "-p", '{"spec": {"router": {"replicas": 2}}}')
    routers = f"tandem.dev/model={name},app.kubernetes.io/component=router"
    models.until("two routers", lambda: len(models.find("pods", routers)) == 2)
    traffic.rate = 1.0
    until(traffic, "IncompleteMetrics", 3)
    models("patch", "dm", name, "--type=merge", "-p", '{"spec": {"router": {"replicas": 1}}}')
    # minReplicas and 0 requests differ from few requests.
    models("patch", "dm", name, "--type=merge", "-p", '{"spec": {"scaling": {"minReplicas": 3}}}')
    traffic.listen()
    until(traffic, "AtMinimum", 3)
    # Pods that find no node: nothing grows on top of them.
    patch = '{"spec": {"scaling": {"maxReplicas": 20}}}'
    models("patch", "dm", name, "--type=merge", "-p", patch)
    models("cordon", "-l", "kubernetes.io/os=linux")
    try:
        traffic.rate = 9.5
        until(traffic, "WithinTolerance", 5)
        traffic.rate = 19.0
        until(traffic, "Unschedulable", 5)
    finally:
        models("uncordon", "-l", "kubernetes.io/os=linux")
    until(traffic, "WithinTolerance", 10)
    models("scale", f"dm/{name}", "--replicas=0")
    until(traffic, "Parked", 0)
