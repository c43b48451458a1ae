"""Prometheus collectors on a registry of their own. Shell; takes what the core found and decided.

Labels are closed sets: routes, reasons, causes, actions; never text, ids or models.
"""

from collections.abc import Callable
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from proxy.api import Api
from proxy.unscorable import Findings, Reason

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
OTHER = "other"


class Metrics:
    """One per app."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every series, and nothing here needs it
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Replies by route and status code.", "route", "code")
        self._seconds = self._histogram("request_seconds", "From a request's head to its reply's last byte.", _SECONDS)
        self._overhead = self._histogram("overhead_seconds", "The sidecar's own share of it.", _OVERHEAD)
        self._inflight = Gauge("logprob_sidecar_inflight", "Requests being served.", registry=self.registry)
        self._sampled = self._counter("sampled_tokens", "Sampled tokens whose logprob was judged.", "route")
        self._unscorable = self._counter("unscorable_tokens", "Tokens marked.", "route", "reason")
        self._responses = self._counter("unscorable_responses", "Replies with something unscorable.", "route")
        self._recoveries = self._counter("recoveries", "Repeats and streams after a failed reply.", "action", "outcome")
        self._errors = self._counter("upstream_errors", "Attempts that brought no usable reply.", "kind")
        self.runaway_aborts = self._counter("runaway_aborts", "Generations cut after a run of unscorable tokens.")
        self._breaker_state = Gauge(
            "logprob_sidecar_breaker_state", "0 closed, 1 probing, 2 open.", registry=self.registry
        )
        self.client_disconnects = self._counter("client_disconnects", "Clients that left before their reply was whole.")
        build = Gauge("logprob_sidecar_build_info", "Always 1.", ["version"], registry=self.registry)
        build.labels(version("logprob-sidecar")).set(1)
        for api in Api:  # so that rates can be taken from the first event on
            for reason in Reason:
                self._unscorable.labels(api.value, reason.value)
        self._sampled_by_route = {api.value: self._sampled.labels(api.value) for api in Api}
        self._of_request: dict[tuple[str, int], tuple[Counter, Histogram, Histogram]] = {}

    def watch(self, inflight: Callable[[], float], breaker_state: Callable[[], float]) -> None:
        """These are asked when metrics are, so that no request has to tell them."""
        self._inflight.set_function(inflight)
        self._breaker_state.set_function(breaker_state)

    def request(self, route: str, code: int, seconds: float, overhead: float) -> None:
        # Looking a child up by its labels costs more than counting; routes and codes are few.
        children = self._of_request.get((route, code))
        if children is None:
            children = self._requests.labels(route, code), self._seconds.labels(route), self._overhead.labels(route)
            self._of_request[route, code] = children
        requests, request_seconds, overhead_seconds = children
        requests.inc()
        request_seconds.observe(seconds)
        overhead_seconds.observe(overhead)

    def found(self, route: str, findings: Findings) -> None:
        if findings.sampled:
            self._sampled_by_route[route].inc(findings.sampled)
        if not (findings.marked or findings.unmarkable):
            return
        for reason, count in findings.by_reason().items():
            self._unscorable.labels(route, reason.value).inc(count)
        self._responses.labels(route).inc()

    def recovery(self, action: str, outcome: str) -> None:
        self._recoveries.labels(action, outcome).inc()

    def upstream_error(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def totals(self) -> dict[str, float]:
        """Every counter, labels in its name: for the status page."""
        return {
            ",".join([sample.name.removeprefix("logprob_sidecar_"), *sample.labels.values()]): sample.value
            for metric in self.registry.collect()
            if metric.type == "counter"
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter("logprob_sidecar_" + name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram("logprob_sidecar_" + name, help, ["route"], buckets=buckets, registry=self.registry)
