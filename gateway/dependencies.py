"""What endpoints take from an HTTP request: the services, the tenant behind the key, and the decoded body.

Knows no field of any body.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, Request

from noria.gateway.config import KeyEntry
from noria.gateway.errors import InvalidKey, InvalidRequest
from noria.gateway.http.body import ClientGone, read_body
from noria.gateway.inner_call import TENANT
from noria.gateway.services import Services, Tenant

T = TypeVar("T")


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


class KeyRing:
    """The accepted keys, kept as digests, so that comparing takes the same time whatever is sent."""

    def __init__(self, entries: tuple[KeyEntry, ...]) -> None:
        self._tenants = {_digest(entry.key): Tenant(entry.tenant, entry.weight, entry.cache_group) for entry in entries}

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Whose key a request's headers carry: OpenAI's `Authorization: Bearer`, else Azure's `api-key` or Anthropic's
        `x-api-key`. Raises `InvalidKey`, which never repeats what was sent."""
        if not self._tenants:
            return Tenant()
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        if not scheme:
            scheme, key = "bearer", headers.get("api-key") or headers.get("x-api-key", "")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidKey("You didn't provide an API key. Send it in an Authorization header: 'Bearer YOUR_KEY'.")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise InvalidKey("Incorrect API key provided.")
        return tenant


def authenticate(request: Request) -> Tenant:
    """Whose request it is: by its key, or as the gateway's own call (see `inner_call`) says."""
    known = request.scope.get(TENANT)
    if isinstance(known, Tenant):
        return known
    keys: KeyRing = request.app.state.keys
    tenant = keys.tenant(request.headers)
    request.state.organization = tenant.id  # for the answer's headers
    return tenant


async def json_object(request: Request) -> Mapping[str, Any]:
    """The body as a JSON object, whatever content type it claims. Size, time and depth (1,024) are bounded. Where the
    path names the model, as Azure's do, the body's `model` is that one."""
    settings = services(request).settings
    raw = await read_body(request, settings.max_body_bytes, settings.body_timeout)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        message = f"We could not parse the JSON body of your request: {error}."
        raise InvalidRequest(message, code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body of the request must be a JSON object.", code="invalid_json")
    deployment = getattr(request.state, "deployment", None)
    return body if deployment is None else {**body, "model": deployment}


async def until_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, or `ClientGone`: then the work is cancelled at once. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(client_left(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel_and_wait(task, gone)


async def client_left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns once the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


ServicesDep = Annotated[Services, Depends(services)]
TenantDep = Annotated[Tenant, Depends(authenticate)]
