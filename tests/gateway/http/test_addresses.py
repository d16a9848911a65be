"""Every spelling of an address that clients use reaches the same endpoint."""

from __future__ import annotations

import openai
import pytest

from noria.gateway.http.addresses import settle

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "settled", "deployment"),
    [
        ("/v1/models", "/v1/models", None),
        ("/v1/models/", "/v1/models", None),
        ("/", "/", None),
        ("/v1/v1/chat/completions", "/v1/chat/completions", None),
        ("/v1/v1x", "/v1/v1x", None),
        ("/openai/v1/chat/completions", "/v1/chat/completions", None),
        ("/openai/models", "/models", None),
        ("/openai/deployments/tiny/chat/completions", "/v1/chat/completions", "tiny"),
        ("/openai/deployments/a%2Fb/completions", "/v1/completions", "a/b"),
        ("/openai/deployments/tiny", "/deployments/tiny", None),
        ("/openaix/models", "/openaix/models", None),
    ],
)
def test_settling(path, settled, deployment):
    scope = {"path": path, "raw_path": path.encode()}
    settle(scope)
    assert scope["path"] == settled
    assert scope.get("state", {}).get("deployment") == deployment


def test_the_azure_client_works_unchanged(gateway):
    url = str(gateway.client().base_url).rstrip("/")
    with openai.AzureOpenAI(api_key="sk-test-key", azure_endpoint=url, api_version="2024-10-21") as client:
        answer = client.chat.completions.create(**BODY)
    assert answer.model == "tiny" and answer.choices[0].message.content
    with (
        openai.AzureOpenAI(api_key="wrong", azure_endpoint=url, api_version="2024-10-21") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(**BODY)


def test_a_deployment_names_the_model(client):
    answer = client.post("/openai/deployments/nobody/chat/completions?api-version=1", json=BODY)
    assert answer.status_code == 404 and "'nobody'" in answer.json()["error"]["message"]
