"""The exposition of engines' figures: nothing that an engine publishes is left out, and every name is in style."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from noria.engine.wire.broker import ModelStatus
from noria.engine.wire.messages import ITERATION_ROWS, EngineStats, ModelCard
from noria.gateway.metrics import GatewayMetrics

CARD = ModelCard("tiny", (), 1, 512, 1000, 1024, 16, (0,), False, "paged", "fp")


def stats_of_distinct_figures() -> EngineStats:
    values: dict[str, Any] = {}
    for place, field in enumerate(msgspec.structs.fields(EngineStats), 101):
        if isinstance(field.default, tuple):
            values[field.name] = tuple(range(place, place + len(field.default)))
        else:
            values[field.name] = place
    return EngineStats(**values)


def test_every_figure_of_an_engine_is_shown_under_a_name_in_style() -> None:
    stats = stats_of_distinct_figures()
    metrics = GatewayMetrics(lambda: [ModelStatus(CARD, {"e1": stats}, {"default": 3}, 700)])
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    assert families["noria_queue_tokens"].samples[0].value == 700
    ours = {name: family for name, family in families.items() if name.startswith("noria_engine_")}
    for name, family in ours.items():
        assert family.documentation and all(s.labels["engine"] == "e1" for s in family.samples)
        assert not name.endswith("_total"), "a counter's suffix is on its sample alone"
        assert family.type != "counter" or [s.name for s in family.samples] == [f"{name}_total"]
    shown = [sample.value for family in ours.values() for sample in family.samples]
    for field in msgspec.structs.fields(EngineStats):
        value = getattr(stats, field.name)
        assert sum(value) in shown if isinstance(value, tuple) else float(value) in shown, field.name


def test_a_histogram_is_cumulative_and_an_engine_of_another_version_is_left_out() -> None:
    stats = EngineStats(iteration_rows=(1, 0, 2, *[0] * (len(ITERATION_ROWS) - 2)), iteration_rows_sum=9)
    other = EngineStats(iteration_rows=(1, 2), iteration_rows_sum=3)
    metrics = GatewayMetrics(lambda: [ModelStatus(CARD, {"e1": stats, "e2": other}, {})])
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    samples = families["noria_engine_iteration_rows"].samples
    assert {s.labels["engine"] for s in samples} == {"e1"}
    assert [s.value for s in samples if s.labels.get("le") in ("1.0", "2.0", "4.0", "512.0", "+Inf")] == [1, 1, 3, 3, 3]
    assert {s.name: s.value for s in samples if "le" not in s.labels} == {
        "noria_engine_iteration_rows_count": 3,
        "noria_engine_iteration_rows_sum": 9,
    }
