"""The dashboard and the alert rules against the pages of a real gateway and a real engine: every name exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from bench.store import running_store
from noria.engine.status import StatusPages
from noria.engine.wire.exposition import VLLM_NAMES
from noria.gateway.config import GatewaySettings
from tests.engine.small_engine import RunningEngine
from tests.gateway.conftest import RunningGateway, eventually

DEPLOY = Path(__file__).parents[1] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


@pytest.fixture(scope="module")
def texts() -> Iterator[dict[str, str]]:
    """The pages of a gateway and of an engine that has answered something."""
    with running_store() as store:
        engine = RunningEngine(store.url)
        pages = StatusPages("127.0.0.1", 0, 60.0, vllm_names=True)
        pages.watch(engine.engine, "tiny", "e1")
        settings = GatewaySettings(redis_url=store.url, api_key=SecretStr("sk"), vllm_metrics=True)
        gateway = RunningGateway(settings)
        with gateway.client("sk") as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5}
            assert client.post("/v1/completions", json=body).status_code == 200
            yield {"gateway": client.get("/metrics").text, "engine": pages.metrics().decode()}
        gateway.stop()
        pages.close()
        engine.stop()


@pytest.fixture(scope="module")
def names(texts: dict[str, str]) -> set[str]:
    """Every series that some page gives."""
    families = [family for text in texts.values() for family in text_string_to_metric_families(text)]
    return {family.name + suffix for family in families for suffix in SAMPLES.get(family.type, ("",))}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "grafana" / "make_dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked_for(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(?:noria|process|vllm)[a-zA-Z0-9_:]+\b", bare))


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / "noria.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_the_dashboard_is_what_its_script_makes() -> None:
    assert script().PLACE.read_text() == script().text()
    assert len(expressions()) > 30


def test_every_figure_that_is_asked_for_exists(names: set[str]) -> None:
    scaled = yaml.safe_load((DEPLOY / "kubernetes" / "overlays" / "keda" / "scaled-object.yaml").read_text())
    scaling = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    for expression in (*expressions(), *(rule["expr"] for rule in rules()), *scaling):
        assert asked_for(expression) or expression.startswith("up{"), expression
        assert asked_for(expression) <= names, expression


def test_gateway_and_engine_name_the_same_things_alike(texts: dict[str, str]) -> None:
    families = {page: list(text_string_to_metric_families(text)) for page, text in texts.items()}
    engine = {f.name: f.type for page in ("gateway", "engine") for f in families[page] if "noria_engine_" in f.name}
    for page in ("gateway", "engine"):
        assert {f.name: f.type for f in families[page] if f.name.startswith("noria_engine_")} == engine
    for family in (*families["gateway"], *families["engine"]):
        assert re.match(r"noria_(gateway|engine)_|noria_(build_info|engines|queue_depth)$|process_|vllm:", family.name)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= {
            "model", "engine", "class", "endpoint", "status", "finish", "outcome", "role", "version",
            "model_name", "finished_reason",
        }, family.name  # fmt: skip


def test_every_name_of_vllm_that_is_promised_is_there(texts: dict[str, str]) -> None:
    text = "".join(texts.values())
    for ours, theirs in VLLM_NAMES.items():
        assert f"# TYPE {ours}" in text
        assert all(f"# TYPE vllm:{name}" in text for name in theirs)


def test_each_alert_says_what_is_wrong_and_the_runbook_has_it() -> None:
    runbook = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for rule in rules():
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "warn")
        assert f"### {rule['alert']}\n" in runbook


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_pages_and_rules(texts: dict[str, str]) -> None:
    checked = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for page, text in texts.items():
        linted = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        problems = [line for line in linted.stderr.splitlines() if not line.startswith("vllm:")]  # names of others
        assert not problems, (page, problems)
