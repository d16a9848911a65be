"""Adapters under tenants' rules: allow lists, limits, prices and usage go by their names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from noria.engine.wire.adapters import EngineAdapterList
from noria.engine.wire.messages import AdapterRef
from tests.gateway.conftest import ScriptedEngine, eventually
from tests.gateway.tenancy.books import Store
from tests.gateway.tenancy.conftest import Tenants


@pytest.fixture
def adapter(store_url: str, tenants: Tenants, engine: ScriptedEngine) -> Iterator[str]:
    """Listed for the scripted engine, which answers for it as for its model."""
    pool = EngineAdapterList(store_url, "tiny", "nobody")
    pool.enter([AdapterRef("sql", "/sql", "digest")])
    pool.close()
    with tenants.client("sk-static") as client:
        eventually(lambda: client.get("/v1/models/sql").status_code == 200)
    yield "sql"
    assert tenants.admin.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200


def test_a_key_for_the_model_alone_is_none_for_its_adapter(tenants: Tenants, adapter: str) -> None:
    keys = {allowed: tenants.key(models=[allowed])[2] for allowed in ("tiny", "sql")}
    assert tenants.chat(keys["sql"], model="sql").status_code == tenants.chat(keys["tiny"]).status_code == 200
    for allowed, other in (("tiny", "sql"), ("sql", "tiny")):
        refused = tenants.chat(keys[allowed], model=other)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "model_not_found"
        with tenants.client(keys[allowed]) as client:
            assert {model["id"] for model in client.get("/v1/models").json()["data"]} & {"tiny", "sql"} == {allowed}
            body = {"lora_name": "n", "lora_path": "/n"}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 403
    with tenants.client("sk-static") as client:  # a key of the settings is right, but no admin key
        refused = client.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 403 and "noria keys bootstrap" in refused.json()["error"]["message"]


def test_limits_prices_and_usage_go_by_the_adapter(tenants: Tenants, adapter: str, store_url: str) -> None:
    project = tenants.project(limits={"models": {"sql": {"requests_per_minute": 3}}})
    _, _, key = tenants.key(project)
    tenants.post("/organization/prices/tiny", {"input": 2.0, "output": 4.0})
    try:
        answers = [tenants.chat(key, model="sql") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert tenants.chat(key).status_code == 200
        books = Store(store_url)
        eventually(lambda: len(books.ledger(project)) == 4)
    finally:
        tenants.admin.delete("/v1/organization/prices/tiny")
    entries = books.ledger(project)
    assert sorted(entry["model"] for entry in entries) == ["sql", "sql", "sql", "tiny"]
    assert all(int(entry["cost"]) > 0 for entry in entries)
