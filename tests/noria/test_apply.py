"""`noria apply` plans, applies and comes to rest; a file that is wrong anywhere changes nothing. And `noria usage`."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections.abc import Iterator

import pyarrow.parquet
import pytest
import redis

from bench.store import Store, running_store
from noria.engine.wire import keys
from noria.gateway.tenancy.credentials import Pepper, is_well_formed
from noria.gateway.tenancy.tenancy import Tenancy, TenancyOptions
from tests.noria.conftest import PEPPER

FILE = """
prices:
  tiny: {input: 1, output: 2.5}
organizations:
  - id: org-acme
    name: Acme
    limits: {requests_per_minute: 600}
    projects:
      - id: proj_search
        name: search
        weight: 2
        budgets: [{period: month, unit: usd, limit: 50}]
        keys:
          - {id: key_ci, name: ci, endpoints: [chat, models], labels: {team: a}}
          - {id: key_web, name: web}
"""


@pytest.fixture
def store() -> Iterator[Store]:
    with running_store("valkey") as found:
        yield found


def applied(noria, path, text, *options):
    path.write_text(text)
    code, out = noria("apply", str(path), "--json", *options)
    assert code == 0, out
    return json.loads(out)


def verbs(found):
    return [(step["verb"], step["id"]) for step in found["steps"]]


def test_a_file_is_planned_applied_and_then_there_is_nothing_to_do(noria, tmp_path):
    path = tmp_path / "tenants.yaml"
    planned = applied(noria, path, FILE, "--plan")
    assert not planned["applied"] and planned["keys"] == {}
    done = applied(noria, path, FILE)
    assert verbs(done) == verbs(planned) == [
        ("create", "tiny"), ("create", "org-acme"), ("create", "proj_search"), ("create", "key_ci"),
        ("create", "key_web"),
    ]  # fmt: skip
    assert set(done["keys"]) == {"key_ci", "key_web"} and all(map(is_well_formed, done["keys"].values()))
    assert applied(noria, path, FILE)["steps"] == []
    code, said = noria("apply", str(path))
    assert code == 0 and "Nothing to do" in said
    changed = applied(noria, path, FILE.replace("weight: 2", "weight: 3").replace(", labels: {team: a}", ""))
    assert [(s["id"], s["before"], s["after"]) for s in changed["steps"]] == [
        ("proj_search", {"weight": 2.0}, {"weight": 3.0}), ("key_ci", {"labels": {"team": "a"}}, {}),
    ]  # fmt: skip
    applied(noria, path, FILE)
    fewer = FILE.replace("          - {id: key_web, name: web}\n", "")
    assert applied(noria, path, fewer)["steps"] == []
    pruned = applied(noria, path, fewer, "--prune")
    assert verbs(pruned) == [("revoke", "key_web")]
    assert [key["id"] for key in json.loads(noria("keys", "list", "--org", "org-acme", "--json")[1])] == ["key_ci"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (FILE.replace("weight: 2", "wieght: 2"), "organizations[0].projects[0].wieght"),
        (FILE.replace("output: 2.5", "output: -1"), "prices.tiny.output"),
        (FILE.replace("key_web", "key_ci"), "declared twice"),
        (FILE.replace("proj_search", "search"), "organizations[0].projects[0].id"),
        ("organizations: [", "no YAML"),
        ("- 1", "declares nothing"),
    ],
)
def test_a_file_that_is_wrong_anywhere_changes_nothing(noria, tmp_path, wrong, says):
    path = tmp_path / "tenants.yaml"
    path.write_text(wrong)
    code, said = noria("apply", str(path), "--yes")
    assert code == 2 and says in said and "Traceback" not in said, said
    assert json.loads(noria("orgs", "list", "--json")[1]) == []


def test_usage_is_shown_and_exported(noria, store, tmp_path):
    made = applied(noria, tmp_path / "t.yaml", FILE)
    assert made["applied"]
    client = redis.Redis.from_url(store.url)
    for n in range(3):  # as the script that ends a request writes it
        fields = {"id": f"r{n}-0", "account": "org-acme/proj_search/key_ci", "class": "default",
                  "at": int(time.time() * 1000), "prompt": 10, "cached": 4, "output": n, "reason": "stop",
                  "engine": "e", "queue_ms": 1, "prefill_ms": 2, "decode_ms": 3}  # fmt: skip
        client.xadd(keys.ledger("tiny"), fields)

    async def post() -> int:
        tenancy = Tenancy(store.url, Pepper(PEPPER), TenancyOptions())
        try:
            return await tenancy.books.post(["tiny"]) + await tenancy.books.post(["tiny"])
        finally:
            await tenancy.close()

    assert asyncio.run(post()) == 3
    code, out = noria("usage", "--org", "org-acme", "--by", "project,model", "--json")
    (row,) = json.loads(out)
    assert code == 0 and row["project"] == "proj_search" and row["model"] == "tiny"
    assert (row["requests"], row["input_tokens"], row["cached_tokens"], row["output_tokens"]) == (3, 30, 12, 3)
    assert row["usd"] == pytest.approx((30 * 1 + 3 * 2.5) / 1e6)
    assert "proj_search" in noria("usage", "--org", "org-acme")[1]
    lines = [json.loads(line) for line in noria("usage", "export")[1].splitlines()]
    assert [line["output"] for line in lines] == [0, 1, 2] and lines[0]["organization"] == "org-acme"
    rows = list(csv.DictReader(io.StringIO(noria("usage", "export", "--format", "csv")[1])))
    assert [row["output"] for row in rows] == ["0", "1", "2"]
    path = tmp_path / "ledger.parquet"
    assert noria("usage", "export", "--format", "parquet", "--output", str(path))[0] == 0
    assert pyarrow.parquet.read_table(path).to_pylist() == lines
    assert noria("usage", "export", "--format", "parquet")[0] == 2
    assert noria("usage", "export", "--since", "yesterday")[0] == 2
    assert noria("usage", "export", "--until", "2020-01-01")[1] == ""


def test_an_entry_that_cannot_be_posted_holds_up_no_other(noria, store, tmp_path):
    applied(noria, tmp_path / "t.yaml", FILE)
    client = redis.Redis.from_url(store.url)
    client.xadd(keys.ledger("tiny"), {"id": "x", "account": "nonsense"})

    async def post() -> int:
        tenancy = Tenancy(store.url, Pepper(PEPPER), TenancyOptions())
        try:
            return await tenancy.books.post(["tiny"])
        finally:
            await tenancy.close()

    assert asyncio.run(post()) == 0
    assert client.xlen(keys.ledger("tiny")) == 0
