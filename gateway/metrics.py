"""Prometheus metrics: what this gateway counts itself, and the published state of every engine pool.

The engines' figures are read from a snapshot at scrape time; nothing here talks to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from noria.engine.wire.broker import ModelStatus
from noria.engine.wire.messages import ITERATION_ROWS, ITERATION_SECONDS

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, which nobody reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HELP = {
    "running": ("requests_running", "Requests that an engine has admitted"),
    "waiting": ("requests_waiting", "Requests that an engine holds but has not admitted, or has preempted"),
    "batch_size": ("batch_size", "Rows of the last iteration"),
    "batch_tokens": ("batch_tokens", "Tokens of the last iteration"),
    "kv_blocks_total": ("kv_blocks", "KV blocks of the pool"),
    "kv_blocks_used": ("kv_blocks_used", "KV blocks held by requests"),
    "kv_blocks_cached": ("kv_blocks_cached", "Free KV blocks that hold a reusable prefix"),
    "iterations_total": ("iterations", "Iterations run"),
    "prompt_tokens_total": ("prompt_tokens", "Prompt tokens taken in"),
    "generation_tokens_total": ("generation_tokens", "Output tokens sampled"),
    "cached_tokens_total": ("cached_tokens", "Prompt tokens found in the prefix cache"),
    "memory_preemptions_total": ("memory_preemptions", "Requests preempted for lack of KV blocks"),
    "class_preemptions_total": ("class_preemptions", "Requests preempted by one of a higher class"),
    "recomputed_tokens_total": ("recomputed_tokens", "Tokens computed again after a preemption"),
    "drafted_tokens_total": ("drafted_tokens", "Tokens guessed by speculation"),
    "accepted_tokens_total": (
        "accepted_tokens",
        "Of these, tokens that were right: their share is the acceptance rate",
    ),
    "requests_finished_total": ("requests_finished", "Requests that ended"),
    "requests_failed_total": ("requests_failed", "Requests that ended in an error"),
    "select_seconds_total": ("select_seconds", "Time in which the scheduler chose rows"),
    "exchange_seconds_total": ("exchange_seconds", "Time of the exchanges with the store, waiting for work left out"),
    "grammars_compiled_total": ("grammars_compiled", "Grammars of structured outputs compiled"),
    "grammars_failed_total": ("grammars_failed", "Grammars that could not be compiled, or not within the limits"),
    "grammar_cache_hits_total": (
        "grammar_cache_hits",
        "Requests whose grammar was there already, or on its way",
    ),
    "grammar_seconds_total": ("grammar_seconds", "Time spent compiling grammars"),
    "draining": ("draining", "1 while the engine claims nothing more and ends what it has"),
}
_GAUGES = frozenset(
    (
        "running",
        "waiting",
        "batch_size",
        "batch_tokens",
        "kv_blocks_total",
        "kv_blocks_used",
        "kv_blocks_cached",
        "draining",
    )
)
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "iteration_seconds": (ITERATION_SECONDS, "Time of an iteration, from its plan to its tokens"),
    "iteration_rows": (ITERATION_ROWS, "Rows of an iteration"),
}
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class _Pools(Collector):
    def __init__(self, snapshot: Callable[[], Iterable[ModelStatus]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        models = list(self._snapshot())
        depth = GaugeMetricFamily("noria_queue_depth", "Requests waiting in the store", labels=["model", "class"])
        engines = GaugeMetricFamily("noria_engines", "Engines with a live lease", labels=["model"])
        for status in models:
            engines.add_metric([status.card.id], len(status.engines))
            for service_class, queued in status.queued.items():
                depth.add_metric([status.card.id, service_class], queued)
        yield depth
        yield engines
        for field, (name, text) in _HELP.items():
            kind = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
            family = kind(f"noria_engine_{name}", text, labels=["model", "engine"])
            for status in models:
                for engine_id, stats in status.engines.items():
                    family.add_metric([status.card.id, engine_id], getattr(stats, field))
            yield family
        for name, (bounds, text) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"noria_engine_{name}", text, labels=["model", "engine"])
            for status in models:
                for engine_id, stats in status.engines.items():
                    counts = getattr(stats, name)
                    if len(counts) != len(bounds) + 1:  # an engine of another version
                        continue
                    steps = zip((*map(float, bounds), "+Inf"), accumulate(counts), strict=True)
                    histogram.add_metric(
                        [status.card.id, engine_id],
                        [(str(bound), count) for bound, count in steps],
                        getattr(stats, f"{name}_sum"),
                    )
            yield histogram


class GatewayMetrics:
    """One registry of its own per app. Latencies are in seconds."""

    def __init__(self, snapshot: Callable[[], Iterable[ModelStatus]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Pools(snapshot))
        self.requests = Counter(
            "noria_gateway_requests", "HTTP requests answered", ["endpoint", "status"], registry=self._registry
        )
        self.streams_open = Gauge("noria_gateway_streams_open", "Event streams being sent", registry=self._registry)
        self.prompt_tokens = Counter(
            "noria_gateway_prompt_tokens", "Prompt tokens of ended requests", ["model"], registry=self._registry
        )
        self.completion_tokens = Counter(
            "noria_gateway_completion_tokens", "Output tokens of ended requests", ["model"], registry=self._registry
        )
        self.limits_unavailable = Counter(
            "noria_gateway_limits_unavailable", "Requests whose limits could not be asked of the store",
            ["outcome"], registry=self._registry,
        )  # fmt: skip
        self.batches_running = Gauge(
            "noria_gateway_batches_running", "Batches that this gateway runs", registry=self._registry
        )
        self.batch_lines = Counter(
            "noria_gateway_batch_lines", "Lines of batches that got their result", ["outcome"], registry=self._registry
        )
        self.first_token = Histogram(
            "noria_gateway_time_to_first_token_seconds", "From the queue to the first token of a choice",
            buckets=_LATENCY, registry=self._registry,
        )  # fmt: skip
        self.token_latency = Histogram(
            "noria_gateway_latency_per_token_seconds", "Whole latency of a choice over its output tokens",
            buckets=_LATENCY, registry=self._registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
