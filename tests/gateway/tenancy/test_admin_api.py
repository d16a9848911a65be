"""The admin API: shapes as OpenAI's, changes with their audit entries, and what it refuses."""

from __future__ import annotations

import time
from typing import get_args

import openai
import pytest

from noria.gateway.app import _NOUNS
from noria.gateway.tenancy.given import MAX_USD
from noria.gateway.tenancy.limits import amount
from noria.gateway.tenancy.principal import endpoint_of
from noria.gateway.tenancy.records import Endpoint, Project
from tests.gateway.tenancy.conftest import Tenants


def test_projects_are_made_listed_changed_and_archived(tenants: Tenants):
    made = tenants.post("/organization/projects", {"name": "made", "weight": 2, "labels": {"team": "a"}})
    assert made["object"] == "organization.project" and made["status"] == "active" and made["labels"] == {"team": "a"}
    limits = {"requests_per_minute": 5, "models": {"tiny": {"tokens_per_day": 9}}}
    changed = tenants.post(f"/organization/projects/{made['id']}", {"limits": limits, "models": ["tiny"]})
    assert changed["limits"] == limits and changed["models"] == ["tiny"] and changed["name"] == "made"
    assert tenants.post(f"/organization/projects/{made['id']}", {"models": [], "limits": {}})["models"] is None
    first = tenants.admin.get("/v1/organization/projects", params={"limit": 1}).json()
    assert first["has_more"] and len(first["data"]) == 1
    rest = tenants.admin.get("/v1/organization/projects", params={"after": first["last_id"], "limit": 100}).json()
    pages = first["data"] + rest["data"]  # in one second, the ids decide which page a project is on
    assert [project["id"] for project in pages].count(made["id"]) == 1
    assert tenants.post(f"/organization/projects/{made['id']}/archive")["status"] == "archived"
    listed = tenants.admin.get("/v1/organization/projects", params={"limit": 100}).json()["data"]
    assert made["id"] not in [project["id"] for project in listed]
    refused = tenants.admin.post(f"/v1/organization/projects/{made['id']}", json={"name": "x"})
    assert refused.status_code == 409


def test_a_key_is_shown_whole_once(tenants: Tenants):
    project, key_id, value = tenants.key(labels={"for": "ci"}, service_tiers=["flex"])
    path = f"/v1/organization/projects/{project}/api_keys"
    found = tenants.admin.get(f"{path}/{key_id}").json()
    assert found["redacted_value"].endswith(value[-4:]) and found["status"] == "active"
    assert value not in tenants.admin.get(path).text and "digest" not in found and "value" not in found
    assert tenants.admin.post(f"{path}/{key_id}", json={"name": "renamed"}).json()["service_tiers"] == ["flex"]
    assert tenants.admin.delete(f"{path}/{key_id}").json() == {
        "object": "organization.project.api_key.deleted", "id": key_id, "deleted": True,
    }  # fmt: skip
    assert tenants.admin.get(f"{path}/{key_id}").status_code == 404


def test_every_change_is_in_the_audit_log(tenants: Tenants):
    project, key_id, value = tenants.key()
    tenants.post(f"/organization/projects/{project}", {"name": "after"})
    listed = tenants.admin.get("/v1/organization/audit_logs", params={"limit": 3})
    renamed, key_made, project_made = listed.json()["data"]
    assert [e["type"] for e in (renamed, key_made, project_made)] == [
        "project.updated", "api_key.created", "project.created",
    ]  # fmt: skip
    assert renamed["before"]["name"] == "p" and renamed["after"]["name"] == "after"
    assert key_made["api_key.created"] == {"id": key_id} and key_made["project"] == {"id": project}
    assert renamed["actor"]["api_key"]["id"].startswith("key_") and renamed["actor"]["ip_address"] == "127.0.0.1"
    assert value not in listed.text and "digest" not in listed.text
    page = tenants.admin.get("/v1/organization/audit_logs", params={"limit": 1, "after": renamed["id"]}).json()
    assert page["data"][0]["id"] == key_made["id"]


def test_a_change_that_changes_nothing_leaves_no_entry(tenants: Tenants):
    project = tenants.project(name="same")
    last = tenants.admin.get("/v1/organization/audit_logs", params={"limit": 1}).json()["first_id"]
    tenants.post(f"/organization/projects/{project}", {"name": "same"})
    assert tenants.admin.get("/v1/organization/audit_logs", params={"limit": 1}).json()["first_id"] == last


def test_organizations_are_kept_apart(tenants: Tenants):
    other = tenants.post("/organizations", {"name": "other"})["id"]
    tenants.admin.headers["openai-organization"] = other
    try:
        project = tenants.project(name="theirs")
        admin = tenants.post("/organization/admin_api_keys", {"name": "theirs"})
    finally:
        del tenants.admin.headers["openai-organization"]
    assert tenants.admin.get(f"/v1/organization/projects/{project}").status_code == 404
    with tenants.gateway.client(admin["value"]) as theirs:
        assert theirs.get("/v1/organization").json()["id"] == other
        assert [o["id"] for o in theirs.get("/v1/organizations").json()["data"]] == [other]
        assert theirs.get(f"/v1/organization/projects/{project}").status_code == 200
        assert theirs.get("/v1/organization", headers={"openai-organization": "org-default"}).status_code == 401
        assert theirs.post("/v1/organizations", json={"name": "x"}).status_code == 403
        refused = theirs.post("/v1/organization/admin_api_keys", json={"name": "x", "scope": "instance"})
        assert refused.status_code == 403
        last = theirs.delete(f"/v1/organization/admin_api_keys/{admin['id']}")
        assert last.status_code == 409
    with tenants.gateway.client(tenants.key()[2]) as client:
        assert client.get("/v1/organization").status_code == 403


USD = {"period": "month", "unit": "usd"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/organization/projects", {}, "name"),
        ("/organization/projects", {"name": "x", "limits": {"requests_per_second": 1}}, "limits.requests_per_second"),
        ("/organization/projects", {"name": "x", "limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ("/organization/projects", {"name": "x", "service_tiers": ["best"]}, "service_tiers[0]"),
        ("/organization/projects", {"name": "x", "budgets": [{"period": "year"}]}, "budgets[0].period"),
        ("/organization/projects/proj_default/api_keys", {"name": "x", "ip_allow_list": ["home"]}, "ip_allow_list"),
        ("/organization/projects/proj_default/api_keys", {"name": "x", "endpoints": ["all"]}, "endpoints[0]"),
        ("/organization/prices/tiny", {"input": 1}, "output"),
        ("/organization/prices/tiny", {"input": 2e6, "output": 1}, "input"),
        ("/organization/prices/" + "x" * 201, {"input": 1, "output": 1}, "model"),
        ("/organization/prices/a%07b", {"input": 1, "output": 1}, "model"),
        ("/organization/prices/a%FFb", {"input": 1, "output": 1}, "model"),
        ("/organization/projects", {"name": "x", "limits": {"models": {"x" * 201: {}}}}, "limits.models"),
        ("/organization/projects", {"name": "x", "limits": {"models": {"a\ufffd": {}}}}, "limits.models"),
        ("/organization/projects", {"name": "x", "limits": {"tokens_per_day": 2**53}}, "limits.tokens_per_day"),
        ("/organization/projects", {"name": "x", "budgets": [{**USD, "limit": 9_000_001}]}, "budgets[0].limit"),
        ("/organization/projects/proj_default/api_keys", {"name": "x", "budgets": [{**USD, "limit": 1e15}]},
         "budgets[0].limit"),
        ("/organization/projects", {"name": "x", "budgets": [{**USD, "unit": "tokens", "limit": 2.0**53}]},
         "budgets[0].limit"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(tenants: Tenants, path, body, param):
    refused = tenants.admin.post(f"/v1{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


@pytest.mark.parametrize("unit", ["usd", "tokens"])
def test_the_largest_budget_lets_in(tenants: Tenants, unit):
    limit = MAX_USD if unit == "usd" else 10**15
    _, _, key = tenants.key(budgets=[{"period": "day", "unit": unit, "limit": limit}])
    assert tenants.chat(key).status_code == 200


def test_a_budget_from_before_the_bound_is_counted_as_far_as_numbers_go():
    stored = Project.model_validate({"id": "p", "name": "p", "created_at": 1, "budgets": [{**USD, "limit": 1e15}]})
    assert amount(stored.budgets[0]) == 2**53 - 1


def test_a_key_may_be_for_every_endpoint_that_there_is():
    """Those for admin keys alone left out."""
    words = {endpoint_of(route.path) for noun in _NOUNS for route in noun.router.routes}
    assert set(get_args(Endpoint)) == words - {
        "admin",
        "organization",
        "organizations",
        "load_lora_adapter",
        "unload_lora_adapter",
    }


def test_a_service_account_that_is_not_there_is_called_so(tenants: Tenants):
    path = f"/v1/organization/projects/{tenants.project()}/service_accounts/svc_acct_X"
    for answer in (tenants.admin.get(path), tenants.admin.post(path, json={"name": "n"}), tenants.admin.delete(path)):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (404, "service_account_id")
        assert error["message"] == "No service account found with id 'svc_acct_X'."


def test_prices_are_set_and_taken_away_and_each_time_written_down(tenants: Tenants):
    assert tenants.post("/organization/prices/org/model-7", {"input": 0.5, "output": 2})["id"] == "org/model-7"
    (listed,) = tenants.admin.get("/v1/organization/prices").json()["data"]
    assert (listed["input"], listed["cached_input"], listed["output"]) == (0.5, None, 2)
    assert tenants.admin.delete("/v1/organization/prices/org/model-7").json()["deleted"]
    assert tenants.admin.get("/v1/organization/prices").json()["data"] == []
    tenants.admin.delete("/v1/organization/prices/org/model-7")  # it is not there any more: no change
    entries = tenants.admin.get("/v1/organization/audit_logs", params={"limit": 2}).json()["data"]
    assert [(entry["type"], entry[entry["type"]]) for entry in entries] == [
        ("price.deleted", {"id": "org/model-7"}), ("price.created", {"id": "org/model-7"}),
    ]  # fmt: skip
    assert entries[0]["before"]["price"] == entries[1]["after"]["price"] and entries[0]["after"] is None
    assert entries[1]["after"]["price"]["output"] == 2 and entries[1]["before"] is None


def test_openai_s_admin_client_finds_service_accounts_and_rate_limits(tenants: Tenants):
    sdk = openai.OpenAI(base_url=f"{tenants.gateway.url}/v1", admin_api_key=tenants.admin_key, api_key="none")
    projects, project = sdk.admin.organization.projects, tenants.project()
    made = projects.service_accounts.create(project, name="of a tool")
    assert made.api_key is not None and made.object == "organization.project.service_account"
    assert tenants.chat(made.api_key.value).status_code == 200
    (listed,) = projects.service_accounts.list(project)
    assert (listed.id, listed.name, listed.role) == (made.id, "of a tool", "member")
    (key,) = projects.api_keys.list(project)
    assert key.owner.type == "service_account" and key.owner.service_account.id == made.id
    renamed = projects.service_accounts.update(made.id, project_id=project, name="renamed")
    assert renamed.name == "renamed" == projects.api_keys.retrieve(made.api_key.id, project_id=project).name

    limits = {limit.model: limit for limit in projects.rate_limits.list_rate_limits(project)}
    assert limits["tiny"].id == "rl-tiny" and limits["tiny"].max_requests_per_1_minute is None
    update = projects.rate_limits.update_rate_limit
    update("rl-tiny", project_id=project, max_tokens_per_1_minute=900)
    changed = update("rl-tiny", project_id=project, max_requests_per_1_minute=7)
    assert (changed.max_requests_per_1_minute, changed.max_tokens_per_1_minute) == (7, 900)
    found = tenants.admin.get(f"/v1/organization/projects/{project}").json()["limits"]
    assert found == {"models": {"tiny": {"requests_per_minute": 7, "tokens_per_minute": 900}}}
    time.sleep(0.6)  # a key without limits is known for half a second
    assert tenants.chat(made.api_key.value).headers["x-ratelimit-limit-requests"] == "7"
    with pytest.raises(openai.BadRequestError, match="max_images_per_1_minute"):
        update("rl-tiny", project_id=project, max_images_per_1_minute=1)
    with pytest.raises(openai.NotFoundError):
        update("rl-other", project_id=project, max_requests_per_1_minute=1)

    assert projects.service_accounts.delete(made.id, project_id=project).deleted
    with pytest.raises(openai.NotFoundError):
        projects.service_accounts.retrieve(made.id, project_id=project)
    with pytest.raises(openai.NotFoundError):
        projects.service_accounts.retrieve("user_1", project_id=project)


def test_without_a_pepper_there_is_no_admin_api(gateway, client):
    answer = client.get("/v1/organization/projects")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "admin_api_off")
