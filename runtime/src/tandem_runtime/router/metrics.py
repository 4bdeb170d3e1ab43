"""The router's metrics, in a registry of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from .workers import Workers


class WorkerGauges(Collector):
    """Read when asked, so that a worker that is gone leaves no series behind."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        outstanding = GaugeMetricFamily(
            "tandem_router_outstanding", "Requests that this router has open", labels=["worker"]
        )
        usable = GaugeMetricFamily(
            "tandem_router_worker_usable", "1 when the worker is ready and paired", labels=["worker"]
        )
        for worker in self._workers:
            outstanding.add_metric([worker.addresses.pod], worker.outstanding)
            usable.add_metric([worker.addresses.pod], worker.usable)
        yield outstanding
        yield usable


class RouterMetrics:
    def __init__(self, workers: Workers) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(WorkerGauges(workers))
        self.arrivals = Counter(
            "tandem_router_arrivals",
            "Authorized requests, counted when they arrive, whether served or rejected",
            registry=self.registry,
        )
        self.requests = Counter(
            "tandem_router_requests",
            "Requests by the status told to the client; 499: it left before there was one",
            ["code"],
            registry=self.registry,
        )
        self.upstream_errors = Counter(
            "tandem_router_upstream_errors",
            "Workers that failed a request, by when: connect, before_first_byte, after_first_byte",
            ["when"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)
