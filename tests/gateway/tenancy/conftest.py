"""A gateway with stored keys, an administrator for it, and projects made on the fly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from pydantic import SecretStr

from noria.gateway.config import GatewaySettings
from noria.gateway.tenancy.bootstrap import bootstrap
from tests.gateway.conftest import RunningGateway, ScriptedEngine, eventually

PEPPER = "pepper-of-the-tests-0123456789abcdef"
CHAT = "/v1/chat/completions"


@dataclass
class Tenants:
    """Two gateways on one store, and the admin API of the first."""

    gateways: list[RunningGateway]
    admin: httpx.Client
    admin_key: str

    @property
    def gateway(self) -> RunningGateway:
        return self.gateways[0]

    def post(self, path: str, body: object = None) -> dict:  # type: ignore[type-arg]
        response = self.admin.post(f"/v1{path}", json=body)
        assert response.status_code == 200, response.text
        found: dict = response.json()  # type: ignore[type-arg]
        return found

    def project(self, **fields: object) -> str:
        return str(self.post("/organization/projects", {"name": "p", **fields})["id"])

    def key(self, project: str | None = None, **fields: object) -> tuple[str, str, str]:
        """Project id, key id and the key itself."""
        project = project or self.project()
        made = self.post(f"/organization/projects/{project}/api_keys", {"name": "k", **fields})
        return project, made["id"], made["value"]

    def client(self, key: str, place: int = 0) -> httpx.Client:
        return self.gateways[place].client(key)

    def chat(self, key: str, place: int = 0, **fields: object) -> httpx.Response:
        with self.client(key, place) as client:
            return ask(client, **fields)


def ask(client: httpx.Client, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    return client.post(CHAT, json=body)


@pytest.fixture(scope="module")
def tenants(store_url: str, shared_engine: ScriptedEngine) -> Iterator[Tenants]:
    made = asyncio.run(bootstrap(store_url, PEPPER))
    assert made is not None
    settings = GatewaySettings(redis_url=store_url, key_pepper=SecretStr(PEPPER), api_key=SecretStr("sk-static"))
    gateways = [RunningGateway(settings) for _ in range(2)]
    for gateway in gateways:
        with gateway.client("sk-static") as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
    with gateways[0].client(made) as admin:
        yield Tenants(gateways, admin, made)
    for gateway in gateways:
        gateway.stop()
