"""Prometheus metrics: what this gateway counts itself, and the published state of every engine pool.

The engines' figures are read from a snapshot at scrape time; nothing here talks to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from noria.engine.wire.broker import ModelStatus
from noria.engine.wire.exposition import Page, engine_families
from noria.version import __version__

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, which nobody reads

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class _Pools(Collector):
    def __init__(self, snapshot: Callable[[], Iterable[ModelStatus]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        models = list(self._snapshot())
        depth = GaugeMetricFamily("noria_queue_depth", "Requests waiting in the store", labels=["model", "class"])
        tokens = GaugeMetricFamily("noria_queue_tokens", "Tokens of these, output at most", labels=["model"])
        engines = GaugeMetricFamily("noria_engines", "Engines with a live lease", labels=["model"])
        for status in models:
            engines.add_metric([status.card.id], len(status.engines))
            tokens.add_metric([status.card.id], status.queued_tokens)
            for service_class, queued in status.queued.items():
                depth.add_metric([status.card.id, service_class], queued)
        yield depth
        yield tokens
        yield engines
        yield from engine_families((status.card.id, status.engines) for status in models)


class GatewayMetrics:
    """One page of its own per app. Latencies are in seconds."""

    def __init__(self, snapshot: Callable[[], Iterable[ModelStatus]], *, vllm_names: bool = False) -> None:
        self._page = Page("gateway", __version__, vllm_names=vllm_names)
        registry = self._page.registry
        registry.register(_Pools(snapshot))
        self.requests = Counter(
            "noria_gateway_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self.store_up = Gauge("noria_gateway_store_up", "1 while the store answers", registry=registry)
        self.streams_open = Gauge("noria_gateway_streams_open", "Event streams being sent", registry=registry)
        self.prompt_tokens = Counter(
            "noria_gateway_prompt_tokens", "Prompt tokens of ended requests", ["model"], registry=registry
        )
        self.completion_tokens = Counter(
            "noria_gateway_completion_tokens", "Output tokens of ended requests", ["model"], registry=registry
        )
        self.limits_unavailable = Counter(
            "noria_gateway_limits_unavailable",
            "Requests whose limits could not be asked of the store",
            ["outcome"],
            registry=registry,
        )
        self.batches_running = Gauge("noria_gateway_batches_running", "Batches that run here", registry=registry)
        self.batch_lines = Counter(
            "noria_gateway_batch_lines", "Lines of batches that got their result", ["outcome"], registry=registry
        )
        self.choices = Counter(
            "noria_gateway_choices", "Choices that ended, by why they did", ["model", "finish"], registry=registry
        )
        latency = {
            "time_to_first_token": "From the queue to the first token of a choice",
            "time_between_tokens": "Time between two tokens of a choice, on average",
            "choice": "From the queue to the end of a choice",
            "latency_per_token": "Whole latency of a choice over its output tokens",
        }
        self._latency = {
            name: Histogram(f"noria_gateway_{name}_seconds", text, ["model"], buckets=_LATENCY, registry=registry)
            for name, text in latency.items()
        }

    def count_first_token(self, model: str, seconds: float) -> None:
        """`seconds` since the choice was queued."""
        self._latency["time_to_first_token"].labels(model).observe(seconds)

    def count_end(self, model: str, finish: str, seconds: float, since_first: float, num_tokens: int) -> None:
        """A choice ended `seconds` after it was queued and `since_first` after its first token, if it had any."""
        self.choices.labels(model, finish).inc()
        self._latency["choice"].labels(model).observe(seconds)
        if num_tokens:
            self._latency["latency_per_token"].labels(model).observe(seconds / num_tokens)
        if num_tokens > 1:
            self._latency["time_between_tokens"].labels(model).observe(since_first / (num_tokens - 1))

    def render(self) -> bytes:
        """The text exposition format."""
        return self._page.render()
