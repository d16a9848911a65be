"""The dashboard and the alert rules against the pages of a real gateway and a real engine: every name exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from bench.store import running_store
from noria.engine.status import StatusPages
from noria.engine.wire.exposition import VLLM_NAMES
from noria.gateway.config import GatewaySettings
from tests.engine.small_engine import RunningEngine
from tests.gateway.conftest import RunningGateway, eventually, free_port

DEPLOY = Path(__file__).parents[1] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


@dataclass(frozen=True)
class Pages:
    """Where the pages of a gateway and of an engine are that have answered something."""

    client: httpx.Client
    gateway_port: int
    engine_port: int

    def ask(self) -> None:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5}
        assert self.client.post("/v1/completions", json=body).status_code == 200

    def texts(self) -> dict[str, str]:
        engine = httpx.get(f"http://127.0.0.1:{self.engine_port}/metrics")
        return {"gateway": self.client.get("/metrics").text, "engine": engine.text}


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with running_store() as store:
        engine = RunningEngine(store.url)
        status = StatusPages("127.0.0.1", 0, 60.0, vllm_names=True)
        status.watch(engine.engine, "tiny", "e1")
        gateway = RunningGateway(GatewaySettings(redis_url=store.url, api_key=SecretStr("sk"), vllm_metrics=True))
        with gateway.client("sk") as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            running = Pages(client, gateway.port, status.port)
            running.ask()
            yield running
        gateway.stop()
        status.close()
        engine.stop()


@pytest.fixture(scope="module")
def texts(pages: Pages) -> dict[str, str]:
    return pages.texts()


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
        assert re.match(r"(noria_(gateway|engine|queue)|process)_|noria_(build_info|engines)$|vllm:", family.name)
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


class Prometheus:
    """A real one with our rules, which looks at our pages ten times a second."""

    def __init__(self, folder: Path, pages: Pages) -> None:
        jobs = {"noria-gateway": pages.gateway_port, "noria-engine": pages.engine_port}
        places = {job: [{"targets": [f"127.0.0.1:{port}"]}] for job, port in jobs.items()}
        looking = {
            "global": {"scrape_interval": "100ms", "scrape_timeout": "100ms", "evaluation_interval": "500ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": job, "static_configs": static} for job, static in places.items()],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(looking))
        port = free_port()
        command = ["prometheus", f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder}/data"]
        command.append(f"--config.file={folder}/prometheus.yml")
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10)

    def ask(self, path: str, **query: str) -> Any:
        """What it says. Raises httpx.HTTPError: it is not there yet, or does not take the query."""
        answer = self._client.get(path, params=query)
        return answer.raise_for_status().json()["data"]

    def sees(self, what: str, *, at_least: float) -> bool:
        try:
            found = self.ask("/query", query=what)["result"]
        except httpx.HTTPError:
            return False
        return bool(found) and float(found[0]["value"][1]) >= at_least

    def stop(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture(scope="module")
def prometheus(pages: Pages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), pages)
    try:
        eventually(lambda: running.sees("sum(up)", at_least=2), 30)
        pages.ask()
        pages.client.get("/v1/nothing")
        eventually(lambda: running.sees("max(increase(noria_engine_iterations_total[10s]))", at_least=1), 30)
        yield running
    finally:
        running.stop()


SHOWN_ONCE_IT_HAPPENS = {"noria_gateway_batch_lines_total", "noria_gateway_limits_unavailable_total"}


def test_every_query_of_the_dashboard_finds_something(prometheus: Prometheus) -> None:
    filled = {"$__rate_interval": "10s", "$model": ".+"}
    for expression in expressions():
        query = re.sub("|".join(map(re.escape, filled)), lambda found: filled[found[0]], expression)
        found = prometheus.ask("/query", query=query)["result"]
        assert found or asked_for(expression) <= SHOWN_ONCE_IT_HAPPENS, query


def test_every_rule_can_be_evaluated_and_none_fires_where_all_is_well(prometheus: Prometheus) -> None:
    def states() -> list[tuple[str, str, str]]:
        groups = prometheus.ask("/rules")["groups"]
        return [(rule["name"], rule["health"], rule["state"]) for group in groups for rule in group["rules"]]

    eventually(lambda: all(health != "unknown" for _, health, _ in states()), 30)
    assert states() == [(rule["alert"], "ok", "inactive") for rule in rules()]
