"""Keys over HTTP: what they open, when they cease to, and what is said then."""

from __future__ import annotations

import time

import openai
import pytest

from tests.gateway.tenancy.conftest import Tenants, ask


def code(response):
    return response.json()["error"]["code"]


def test_a_key_opens_both_gateways_and_names_its_organization(tenants: Tenants):
    _, _, key = tenants.key()
    for place in (0, 1):
        answer = tenants.chat(key, place)
        assert answer.status_code == 200, answer.text
        assert answer.headers["openai-organization"] == "org-default"
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_keys_of_the_settings_go_on(tenants: Tenants):
    assert tenants.chat("sk-static").status_code == 200


@pytest.mark.parametrize("key", ["sk-wrong", "sk-noria-" + "0" * 49])
def test_wrong_keys_are_401(tenants: Tenants, key):
    answer = tenants.chat(key)
    assert (answer.status_code, code(answer)) == (401, "invalid_api_key")


def test_a_revoked_key_is_refused_at_every_gateway_within_a_second(tenants: Tenants):
    project, key_id, key = tenants.key()
    with tenants.client(key, 0) as near, tenants.client(key, 1) as far:
        assert near.get("/v1/models").status_code == far.get("/v1/models").status_code == 200
        assert tenants.admin.delete(f"/v1/organization/projects/{project}/api_keys/{key_id}").status_code == 200
        began = time.monotonic()
        open_at = dict.fromkeys((near, far), True)
        while any(open_at.values()):
            open_at = {client: client.get("/v1/models").status_code == 200 for client in open_at}
            assert time.monotonic() - began < 1.0
        assert code(ask(far)) == "invalid_api_key"


def test_a_rotated_key_has_its_grace_and_no_more(tenants: Tenants):
    project, key_id, old = tenants.key()
    path = f"/organization/projects/{project}/api_keys/{key_id}/rotate"
    rotated = tenants.post(path, {"grace_seconds": 2})
    assert rotated["id"] == key_id and rotated["value"] != old and rotated["grace_until"]
    assert tenants.chat(old).status_code == tenants.chat(rotated["value"]).status_code == 200
    time.sleep(2.6)
    assert tenants.chat(old).status_code == 401
    newest = tenants.post(path, {})
    time.sleep(0.6)
    assert tenants.chat(rotated["value"]).status_code == 401
    assert tenants.chat(newest["value"]).status_code == 200


def test_an_expired_key_is_told_so(tenants: Tenants):
    _, _, key = tenants.key(expires_at=int(time.time()) + 1)
    time.sleep(1.6)
    answer = tenants.chat(key)
    assert (answer.status_code, code(answer)) == (401, "expired_api_key")


def test_scopes_name_endpoints(tenants: Tenants):
    _, _, key = tenants.key(endpoints=["models"])
    with tenants.client(key) as client:
        assert client.get("/v1/models").status_code == client.get("/models").status_code == 200
        answer = ask(client)
    assert (answer.status_code, code(answer)) == (403, "insufficient_permissions")


def test_addresses_are_checked(tenants: Tenants):
    _, _, inside = tenants.key(ip_allow_list=["127.0.0.0/8"])
    _, _, outside = tenants.key(ip_allow_list=["192.0.2.0/24", "2001:db8::/32"])
    assert tenants.chat(inside).status_code == 200
    answer = tenants.chat(outside)
    assert (answer.status_code, code(answer)) == (401, "ip_not_authorized")


def test_organization_and_project_headers_are_checked(tenants: Tenants):
    project, _, key = tenants.key()
    with tenants.client(key) as client:
        client.headers["openai-project"] = project
        client.headers["openai-organization"] = "org-default"
        assert ask(client).status_code == 200
        client.headers["openai-project"] = "proj_other"
        assert code(ask(client)) == "mismatched_project"
        client.headers["openai-organization"] = "org-other"
        assert code(ask(client)) == "mismatched_organization"


def test_an_archived_project_has_no_keys(tenants: Tenants):
    project, _, key = tenants.key()
    assert tenants.chat(key).status_code == 200
    tenants.post(f"/organization/projects/{project}/archive")
    time.sleep(0.6)
    answer = tenants.chat(key)
    assert (answer.status_code, code(answer)) == (401, "project_archived")


def test_admin_keys_and_others_do_not_mix(tenants: Tenants):
    _, _, key = tenants.key()
    answer = tenants.chat(tenants.admin_key)
    assert (answer.status_code, code(answer)) == (403, "insufficient_permissions")
    with tenants.client(key) as client:
        answer = client.get("/v1/organization/projects")
    assert (answer.status_code, code(answer)) == (403, "insufficient_permissions")
    with tenants.gateway.client(None) as client:
        assert client.get("/v1/organization/projects").status_code == 401


def test_the_sdk_raises_its_own_errors(tenants: Tenants):
    _, _, key = tenants.key(endpoints=["models"])
    client = openai.OpenAI(base_url=f"{tenants.gateway.url}/v1", api_key=key)
    with pytest.raises(openai.PermissionDeniedError) as denied:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert denied.value.code == "insufficient_permissions" and denied.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError) as wrong:
        client.with_options(api_key="sk-noria-x").models.list()
    assert wrong.value.code == "invalid_api_key"
