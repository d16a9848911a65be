"""What endpoints take from an HTTP request: the services, the tenant behind the key, and the decoded body.

Knows no field of any body.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, Request

from noria.gateway.config import KeyEntry
from noria.gateway.errors import Forbidden, InvalidKey, InvalidRequest, NotFound
from noria.gateway.http.body import ClientGone, read_body
from noria.gateway.inner_call import TENANT
from noria.gateway.services import Services, Tenant
from noria.gateway.tenancy.administration import Administration
from noria.gateway.tenancy.directory import Actor
from noria.gateway.tenancy.principal import Administrator, check_named
from noria.gateway.tenancy.resolver import WRONG_KEY
from noria.gateway.tenancy.tenancy import Tenancy

T = TypeVar("T")


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


class KeyRing:
    """The keys of the settings, kept as digests, so that comparing takes the same time whatever is sent."""

    def __init__(self, entries: tuple[KeyEntry, ...]) -> None:
        self._tenants = {_digest(entry.key): Tenant(entry.tenant, entry.weight, entry.cache_group) for entry in entries}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, key: str) -> Tenant | None:
        """Whose key it is; None: it is none of these."""
        return self._tenants.get(_digest(key))


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request carries: OpenAI's `Authorization: Bearer`, else Azure's `api-key` or Anthropic's
    `x-api-key`. Raises `InvalidKey`, which never repeats what was sent."""
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    if not scheme:
        scheme, key = "bearer", headers.get("api-key") or headers.get("x-api-key", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("You didn't provide an API key. Send it in an Authorization header: 'Bearer YOUR_KEY'.")
    return key.strip()


async def authenticate(request: Request) -> Tenant:
    """Whose request it is: by its key, or as the gateway's own call (see `inner_call`) says. Raises `InvalidKey`,
    `Forbidden` and BrokerUnavailable."""
    known = request.scope.get(TENANT)
    tenancy = services(request).tenancy
    if isinstance(known, Tenant):
        if known.charged_to and tenancy is not None:
            known = replace(known, caller=await tenancy.caller_of(known.charged_to))
        return known
    keys: KeyRing = request.app.state.keys
    if not keys and tenancy is None:
        tenant = Tenant()
    else:
        key = key_in(request.headers)
        tenant = keys.tenant(key) or await _holder(request, tenancy, key)
    if tenant.caller is None:
        request.state.organization = tenant.id  # for the answer's headers
    return tenant


async def _holder(request: Request, tenancy: Tenancy | None, key: str) -> Tenant:
    """The project whose stored key it is."""
    if tenancy is None:
        raise InvalidKey(WRONG_KEY)
    holder = await tenancy.resolver.resolve(key)
    if isinstance(holder, Administrator):
        message = "This is an admin API key: it manages keys and projects, and calls no model."
        raise Forbidden(message, code="insufficient_permissions")
    request.state.organization = holder.organization.id
    address = request.client.host if request.client is not None else None
    holder.check_request(request.url.path, address, request.headers)
    caller = tenancy.caller(holder, key)
    request.state.answer_headers = caller.headers
    return Tenant(holder.project.id, holder.project.weight, holder.project.cache_group, caller=caller)


async def administrate(request: Request) -> Administrator:
    """Whose admin key a request carries, for the organisation that its `OpenAI-Organization` header names, or its own.
    Raises `InvalidKey`, `Forbidden`, `NotFound` where there is no admin API, and BrokerUnavailable."""
    tenancy = services(request).tenancy
    if tenancy is None:
        raise NotFound("There is no admin API here: it needs a key pepper (NORIA_KEY_PEPPER).", code="admin_api_off")
    key = key_in(request.headers)
    if request.app.state.keys.tenant(key) is not None:
        message = "This needs an admin API key, and this is one of the server's settings: see noria keys bootstrap."
        raise Forbidden(message, code="insufficient_permissions")
    holder = await tenancy.resolver.resolve(key)
    if not isinstance(holder, Administrator):
        raise Forbidden("This needs an admin API key.", code="insufficient_permissions")
    if holder.is_instance_wide:
        named = request.headers.get("openai-organization", "").strip() or holder.organization
        holder = replace(holder, organization=named)
    else:
        check_named(request.headers, holder.organization, None)
    request.state.organization = holder.organization
    return holder


async def operate(request: Request) -> None:
    """Lets in who runs the place: an admin key for the whole installation where there are admin keys, else a key that
    was not given to a tenant. Raises `InvalidKey` and `Forbidden`."""
    if services(request).tenancy is None:
        if (await authenticate(request)).id != Tenant().id:
            message = "This key belongs to a tenant. Use one that is given without a tenant's name."
            raise Forbidden(message, code="insufficient_permissions")
    elif not (await administrate(request)).is_instance_wide:
        raise Forbidden("This needs an admin API key with the scope 'instance'.", code="insufficient_permissions")


async def operate_with_key(request: Request) -> None:
    """As `operate`; where nobody needs a key, nobody runs the place from outside either."""
    if services(request).tenancy is None and not request.app.state.keys:
        message = "This needs a key, and this server has none (NORIA_API_KEY): it is open to everybody."
        raise Forbidden(message, code="insufficient_permissions")
    await operate(request)


def administration(request: Request) -> Administration:
    """For whoever came past `administrate`."""
    tenancy = services(request).tenancy
    assert tenancy is not None
    return tenancy.administration


def actor(request: Request, administrator: AdministratorDep) -> Actor:
    """Who the audit log says it was."""
    return Actor("api_key", administrator.key.id, request.client.host if request.client is not None else None)


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
AdministratorDep = Annotated[Administrator, Depends(administrate)]
AdministrationDep = Annotated[Administration, Depends(administration)]
ActorDep = Annotated[Actor, Depends(actor)]
