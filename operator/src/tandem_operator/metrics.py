"""What the operator tells Prometheus about itself.

Knows: names and labels of the metrics. Does not know: who counts.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One registry of our own, so that nothing of the client libraries slips in."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Counter(
            "tandem_operator_passes",
            "Passes over a model, by result (ok, retry, conflict, forbidden, gone, bug)",
            ["result"],
            registry=self.registry,
        )
        self.pass_seconds = Histogram(
            "tandem_operator_pass_seconds",
            "Duration of a pass",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.calls = Counter(
            "tandem_operator_api_calls",
            "Calls to the API server",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.applied = Counter(
            "tandem_operator_applied", "Children applied, by kind", ["kind"], registry=self.registry
        )
        self.unchanged = Counter(
            "tandem_operator_unchanged",
            "Children found as wanted and not written, by kind",
            ["kind"],
            registry=self.registry,
        )
        self.events_failed = Counter(
            "tandem_operator_events_failed", "Events that could not be written", registry=self.registry
        )
        self.worker_errors = Counter(
            "tandem_operator_worker_errors",
            "Workers and routers that did not answer, by endpoint (state, metrics)",
            ["endpoint"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "tandem_operator_queue_depth", "Models that wait for a pass", registry=self.registry
        )
        self.queue_oldest_seconds = Gauge(
            "tandem_operator_queue_oldest_seconds",
            "How long the longest-waiting model has waited",
            registry=self.registry,
        )
        self.watch_mute_seconds = Gauge(
            "tandem_operator_watch_mute_seconds",
            "How long the watch has owed a change that a list has shown; 0 when it owes none",
            registry=self.registry,
        )
        self.leading = Gauge(
            "tandem_operator_leading", "1 while this replica holds the Lease", registry=self.registry
        )
        self.models = Gauge("tandem_operator_models", "Models in scope", registry=self.registry)
        self.permissions_missing = Gauge(
            "tandem_operator_permissions_missing",
            "Verbs that RBAC refuses to the operator, found at its start",
            registry=self.registry,
        )
