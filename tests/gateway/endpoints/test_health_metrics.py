"""/healthz, /readyz and /metrics."""

from __future__ import annotations

import re


def samples(text):
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"([a-z_]+)(\{.*\})?\s+(\S+)$", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[3])
    return found


def test_health_needs_no_key(gateway):
    with gateway.client(key=None) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").json() == client.get("/health").json() == {"status": "ready", "models": ["tiny"]}
        assert client.head("/healthz").status_code == 200


def test_engines_that_drain_make_nobody_ready(launch, own_port):
    launch.store(own_port)
    url = f"redis://127.0.0.1:{own_port}/0"
    first = launch.engine(url)
    with launch.gateway(url).client() as client:

        def ready() -> bool:
            return client.get("/readyz").status_code == 200

        launch.eventually(ready)
        first.draining = True
        launch.eventually(lambda: not ready())
        assert client.get("/readyz").json()["reason"] == "no engine serves a model"
        assert client.get("/v1/models").json()["data"] == []
        assert client.get("/v1/models/tiny").json()["status"] == "unavailable"
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "abc"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        launch.engine(url)
        launch.eventually(ready)
        assert client.get("/v1/models/tiny").json()["status"] == "ready"
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "abc"}).status_code == 200


def test_token_counters_grow_by_the_usage_and_gauges_settle(client, engine, launch):
    before = samples(client.get("/metrics").text)
    usage = client.post("/v1/completions", json={"model": "tiny", "prompt": "abc", "max_tokens": 7}).json()["usage"]
    after = samples(client.get("/metrics").text)
    for name, field in (("prompt_tokens", 3), ("completion_tokens", usage["completion_tokens"])):
        assert after[f"noria_gateway_{name}_total"] - before.get(f"noria_gateway_{name}_total", 0) == field
    count = "noria_gateway_time_to_first_token_seconds_count"
    assert after[count] - before.get(count, 0) == 1

    def idle():
        now = samples(client.get("/metrics").text)
        gauges = ("noria_engine_requests_running", "noria_engine_requests_waiting", "noria_queue_depth")
        return all(now[name] == 0 for name in (*gauges, "noria_gateway_streams_open"))

    launch.eventually(idle, 5)


def test_engine_figures_are_shown_per_engine(client, engine, launch):
    client.post("/v1/completions", json={"model": "tiny", "prompt": "abc", "max_tokens": 7})
    launch.eventually(
        lambda: samples(client.get("/metrics").text)["noria_engine_generation_tokens_total"] == engine.generated, 5
    )
    text = client.get("/metrics").text
    assert re.search(r'noria_engine_kv_blocks\{engine="\w+",model="tiny"\} 99.0', text)
    assert 'noria_queue_depth{class="flex",model="tiny"} 0.0' in text
    assert 'noria_gateway_requests_total{endpoint="completions",status="200"}' in text


def test_metrics_can_be_closed(launch, store_url):
    gateway = launch.gateway(store_url, open_metrics=False)
    with gateway.client(key=None) as anonymous, gateway.client() as client:
        assert anonymous.get("/metrics").status_code == 401
        assert client.get("/metrics").status_code == 200
