"""Figures as Prometheus families: the same names on a gateway's page and on an engine's own, and vLLM's for them.

Knows every field of `EngineStats`; reads none from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from noria.engine.wire.messages import ITERATION_ROWS, ITERATION_SECONDS, EngineStats

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
    "kernel_compiles_total": ("kernel_compiles", "GPU kernels compiled after the warm-up: there should be none"),
    "adapters": ("adapters", "LoRA adapters that are loaded"),
    "adapter_bytes": ("adapter_bytes", "Memory of the loaded adapters"),
    "adapter_loads_total": ("adapter_loads", "Adapters loaded"),
    "adapter_load_failures_total": ("adapter_load_failures", "Adapters that could not be loaded"),
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
        "adapters",
        "adapter_bytes",
    )
)
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "iteration_seconds": (ITERATION_SECONDS, "Time of an iteration, from its plan to its tokens"),
    "iteration_rows": (ITERATION_ROWS, "Rows of an iteration"),
}

VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "noria_engine_requests_running": ("num_requests_running",),
    "noria_engine_requests_waiting": ("num_requests_waiting",),
    "noria_engine_kv_usage_ratio": ("kv_cache_usage_perc",),
    "noria_engine_prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "noria_engine_cached_tokens": ("prefix_cache_hits",),
    "noria_engine_generation_tokens": ("generation_tokens",),
    "noria_engine_memory_preemptions": ("num_preemptions",),
    "noria_engine_drafted_tokens": ("spec_decode_num_draft_tokens",),
    "noria_engine_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "noria_gateway_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "noria_gateway_time_between_tokens_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "noria_gateway_choice_seconds": ("e2e_request_latency_seconds",),
    "noria_gateway_choices": ("request_success",),
}
"""Ours -> what dashboards made for vLLM ask for, each with `vllm:` before it."""
_VLLM_LABELS = {"model": "model_name", "finish": "finished_reason"}


def engine_families(pools: Iterable[tuple[str, Mapping[str, EngineStats]]]) -> Iterator[Metric]:
    """One family per figure. `pools`: model id -> engine id -> figures."""
    engines = [(model, engine, stats) for model, pool in pools for engine, stats in pool.items()]
    for field, (name, text) in _HELP.items():
        kind = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
        family = kind(f"noria_engine_{name}", text, labels=["model", "engine"])
        for model, engine, stats in engines:
            family.add_metric([model, engine], getattr(stats, field))
        yield family
    usage = GaugeMetricFamily(
        "noria_engine_kv_usage_ratio", "Share of the KV blocks that requests hold", labels=["model", "engine"]
    )
    for model, engine, stats in engines:
        usage.add_metric([model, engine], stats.kv_blocks_used / max(stats.kv_blocks_total, 1))
    yield usage
    for name, (bounds, text) in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"noria_engine_{name}", text, labels=["model", "engine"])
        for model, engine, stats in engines:
            counts = getattr(stats, name)
            if len(counts) != len(bounds) + 1:  # an engine of another version
                continue
            steps = zip((*map(float, bounds), "+Inf"), accumulate(counts), strict=True)
            buckets = [(str(bound), count) for bound, count in steps]
            histogram.add_metric([model, engine], buckets, getattr(stats, f"{name}_sum"))
        yield histogram


class Page:
    """One process' page: `registry` takes what is to be on it, beside the process' memory, descriptors and version."""

    def __init__(self, role: str, version: str, *, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Build(role, version))
        self._vllm_names = vllm_names

    def render(self) -> bytes:
        """The text exposition format."""
        text = generate_latest(self.registry)
        return text + generate_latest(_VllmNames(self.registry)) if self._vllm_names else text


class _Build(Collector):
    def __init__(self, role: str, version: str) -> None:
        self._labels = {"role": role, "version": version}

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("noria_build", "What runs here", self._labels)


class _VllmNames(Collector):
    """Copies of families under vLLM's names and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            for name in VLLM_NAMES.get(family.name, ()):
                copy = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
                    copy.add_sample(copy.name + sample.name.removeprefix(family.name), labels, sample.value)
                yield copy
