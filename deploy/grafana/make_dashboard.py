"""Writes dashboards/noria.json: `python deploy/grafana/make_dashboard.py`. A test holds the file against this script,
and every metric that it asks for against the pages of a real gateway and a real engine.

Engines' figures stand on every gateway's page and on the engine's own, so queries take one of them: `max by (engine)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parent / "dashboards" / "noria.json"
MODEL = 'model=~"$model"'
WIDTH, HEIGHT = 8, 7  # of the 24 columns; three panels in a row

Query = tuple[str, str]  # expression, legend


def engine(metric: str) -> str:
    return f"max by (model, engine) (noria_engine_{metric}{{{MODEL}}})"


def engine_rate(metric: str) -> str:
    return f"max by (model, engine) (rate(noria_engine_{metric}_total{{{MODEL}}}[$__rate_interval]))"


def quantiles(metric: str, by: str = "model") -> list[Query]:
    bucket = f"rate({metric}_bucket{{{MODEL}}}[$__rate_interval])"
    return [
        (f"histogram_quantile({q}, sum by ({by}, le) ({bucket}))", f"p{round(100 * q)} {{{{{by}}}}}")
        for q in (0.5, 0.95, 0.99)
    ]


def share(part: str, whole: str) -> str:
    return f"{engine_rate(part)} / {engine_rate(whole)}"


def gateway_rate(metric: str, by: str, label: str = "") -> str:
    return f"sum by ({by}) (rate(noria_gateway_{metric}_total{{{label}}}[$__rate_interval]))"


E, M = "{{engine}}", "{{model}}"
ROWS: dict[str, list[tuple[str, str, list[Query]]]] = {
    "What clients see": [
        ("Time to first token", "s", quantiles("noria_gateway_time_to_first_token_seconds")),
        ("Time between tokens", "s", quantiles("noria_gateway_time_between_tokens_seconds")),
        ("Whole answers", "s", quantiles("noria_gateway_choice_seconds")),
        ("Requests by status", "reqps", [(gateway_rate("requests", "status"), "{{status}}")]),
        ("Output tokens", "short", [(gateway_rate("completion_tokens", "model", MODEL), M)]),
        ("Choices by end", "short", [(gateway_rate("choices", "finish", MODEL), "{{finish}}")]),
        ("Open streams", "short", [("sum by (instance) (noria_gateway_streams_open)", "{{instance}}")]),
        ("Per output token", "s", quantiles("noria_gateway_latency_per_token_seconds")),
        ("Batch lines", "short", [(gateway_rate("batch_lines", "outcome"), "{{outcome}}")]),
    ],
    "Queue": [
        ("Waiting, by class", "short", [(f"max by (model, class) (noria_queue_depth{{{MODEL}}})", M + " {{class}}")]),
        ("Waiting, tokens at most", "short", [(f"max by (model) (noria_queue_tokens{{{MODEL}}})", M)]),
        ("Engines with a lease", "short", [(f"max by (model) (noria_engines{{{MODEL}}})", M)]),
        ("Store reached", "bool", [("noria_gateway_store_up", "{{instance}}")]),
    ],
    "Batch": [
        ("Requests running", "short", [(engine("requests_running"), E), (engine("requests_waiting"), E + " waiting")]),
        ("Rows of an iteration", "short", [(engine("batch_size"), E)]),
        ("Tokens of an iteration", "short", [(engine("batch_tokens"), E)]),
        ("Iteration", "s", quantiles("noria_engine_iteration_seconds", "engine")),
        ("Iterations", "ops", [(engine_rate("iterations"), E)]),
        ("Tokens sampled", "short", [(engine_rate("generation_tokens"), E)]),
        ("Prompt tokens", "short", [(engine_rate("prompt_tokens"), E)]),
        ("Scheduling and exchange, share of time", "percentunit",
         [(engine_rate("select_seconds"), E + " select"), (engine_rate("exchange_seconds"), E + " exchange")]),
        ("Guesses that were right", "percentunit", [(share("accepted_tokens", "drafted_tokens"), E)]),
    ],
    "Memory": [
        ("KV memory in use", "percentunit", [(engine("kv_usage_ratio"), E)]),
        ("Prompt tokens found in the cache", "percentunit", [(share("cached_tokens", "prompt_tokens"), E)]),
        ("Preemptions", "ops",
         [(engine_rate("memory_preemptions"), E + " memory"), (engine_rate("class_preemptions"), E + " class")]),
        ("Resident memory", "bytes", [('process_resident_memory_bytes{job=~"noria-.*"}', "{{job}} {{instance}}")]),
        ("Open files", "short", [('process_open_fds{job=~"noria-.*"}', "{{job}} {{instance}}")]),
        ("Requests failed", "ops", [(engine_rate("requests_failed"), E)]),
    ],
}  # fmt: skip


def panel(number: int, title: str, unit: str, queries: list[Query], x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": heading, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y += 1
        for place, (title, unit, queries) in enumerate(row):
            x = place % 3 * WIDTH
            panels.append(panel(len(panels) + 1, title, unit, queries, x, y + place // 3 * HEIGHT))
        y += -(-len(row) // 3) * HEIGHT
    models = {
        "name": "model", "label": "Model", "type": "query", "query": "label_values(noria_engines, model)",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "refresh": 2, "multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    return {
        "uid": "noria", "title": "Noria", "schemaVersion": 39, "version": 1, "editable": True, "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"}, "templating": {"list": [models]}, "panels": panels,
    }  # fmt: skip


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PLACE.write_text(text())
