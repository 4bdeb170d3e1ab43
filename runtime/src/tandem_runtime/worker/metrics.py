"""The pod's one metrics registry, in the lead: vLLM's names where vLLM has them, `tandem_` for transfers.

Knows: names and meaning. Values come from the engine loop, from the server's reports, and at scrape time from
the sources given to `Metrics.observe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from ..ipc import Report

LATENCY_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """`engine` is the data-parallel rank's index, as in vLLM's labels."""

    def __init__(self, model_name: str, role: str, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": engine}
        names = list(labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, names, registry=self.registry).labels(**labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, names, registry=self.registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, names, registry=self.registry, buckets=buckets).labels(**labels)

        self.running = gauge("vllm:num_requests_running", "Requests in the running batch")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests without pages")
        self.blocked = gauge("tandem_requests_blocked", "Requests whose KV is on its way from prefill")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Used part of the page pool, 0 to 1")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens computed or received")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens sampled")
        self.preemptions = counter("vllm:num_preemptions", "Requests preempted")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix index")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix index")
        self._finished = Counter(
            "vllm:request_success",
            "Requests finished, by reason",
            [*names, "finished_reason"],
            registry=self.registry,
        )
        self._labels = labels
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token", LATENCY_S)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between tokens", LATENCY_S)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Request latency", LATENCY_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time without pages", LATENCY_S)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt length", TOKENS)
        self.request_generation = histogram("vllm:request_generation_tokens", "Output length", TOKENS)
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Tokens computed in a step", TOKENS)
        self._http = Counter(
            "tandem_http_requests",
            "HTTP requests by endpoint and status",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.step_overhead = histogram(
            "tandem_step_overhead_seconds",
            "Scheduling and batch building of a step, outside the forward pass",
            (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1),
        )
        self.forward = histogram("tandem_forward_seconds", "Forward pass", LATENCY_S)
        self.transfer_seconds = histogram(
            "tandem_kv_transfer_seconds", "First to last KV write of a request", LATENCY_S
        )
        self.exposed_seconds = histogram(
            "tandem_kv_transfer_exposed_seconds",
            "KV transfer left after the last layer was computed",
            LATENCY_S,
        )
        self.transfer_nbytes = counter("tandem_kv_transfer_bytes", "KV bytes received or sent")
        self.transfer_failures = Counter(
            "tandem_kv_transfer_failures",
            "Transfers that failed, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.local_prefills = counter(
            "tandem_local_prefills", "Prompts prefilled here because no prefill worker was ready"
        )
        self.fabric = Gauge("tandem_fabric", "The C core's counters", ["name"], registry=self.registry)
        self.pages = Gauge("tandem_pages", "Pages by state", ["state"], registry=self.registry)
        self.info = Gauge(
            "tandem_info",
            "Role, provider and libfabric of this worker",
            ["role", "provider", "libfabric"],
            registry=self.registry,
        )
        self.role = role
        # A prefill worker must never sample: the counter exists, and stays 0, so that this can be watched.
        self.generation_tokens.inc(0)

    def finished(self, reason: str) -> None:
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def report(self, report: Report) -> None:
        """One HTTP request as its client saw it."""
        self._http.labels(endpoint=report.endpoint, status=str(report.status)).inc()
        if report.ttft_s is not None:
            self.ttft.observe(report.ttft_s)
        for gap_s in report.itl_s:
            self.itl.observe(gap_s)
        if report.status == 200:
            self.e2e.observe(report.e2e_s)
            self.request_prompt.observe(report.prompt_tokens)
            self.request_generation.observe(report.output_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)
