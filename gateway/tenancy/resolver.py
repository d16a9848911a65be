"""From a key's text to its principal, through a cache that is never older than half a second.

Requests that generate are checked again against the directory's version when they are let in, so that for them a
revoked key is of no use at once. Knows no request.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from noria.gateway.errors import InvalidKey
from noria.gateway.tenancy.credentials import is_well_formed, same
from noria.gateway.tenancy.directory import Directory, credential_of
from noria.gateway.tenancy.principal import Administrator, Principal
from noria.gateway.tenancy.records import AdminKey, ApiKey, Organization, Project

FRESH_FOR = 0.5
"""Seconds for which a key is known without a look at the store."""

MAX_KNOWN = 4096
"""Keys known at a time, wrong ones included."""

Holder = Principal | Administrator
WRONG_KEY = "Incorrect API key provided."


class Resolver:
    """One per gateway. `clock` is monotonic."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Holder | InvalidKey]] = OrderedDict()

    async def resolve(self, key: str, *, afresh: bool = False) -> Holder:
        """Raises `InvalidKey`, which never repeats what was sent, and BrokerUnavailable. `afresh`: whatever the cache
        has."""
        if not is_well_formed(key):
            raise InvalidKey(WRONG_KEY)
        digest, now = self._directory.pepper.digest(key), self._clock()
        known = self._known.get(digest)
        if known is None or known[0] <= now or afresh:
            known = self._known[digest] = (now + FRESH_FOR, await self._look(digest))
            self._known.move_to_end(digest)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if isinstance(known[1], InvalidKey):
            raise InvalidKey(known[1].message, code=known[1].code)
        return known[1]

    async def of_account(self, account: str) -> Principal:
        """The principal that `Principal.account` names, as it is now. Raises as `resolve`."""
        organization_id, _, key_id = account.split("/")
        found = await self._read(organization_id, f"key/{key_id}", None)
        if isinstance(found, Principal):
            return found
        raise found if isinstance(found, InvalidKey) else InvalidKey(WRONG_KEY)

    async def _look(self, digest: str) -> Holder | InvalidKey:
        owner = await self._directory.owner(digest)
        return InvalidKey(WRONG_KEY) if owner is None else await self._read(*owner, digest)

    async def _read(self, organization_id: str, name: str, digest: str | None) -> Holder | InvalidKey:
        """The holder of the key in the directory's field `name`; without a digest: whichever secret opens it."""
        version, organization_raw, raw = await self._directory.fields(organization_id, "version", "organization", name)
        if raw is None or organization_raw is None:
            return InvalidKey(WRONG_KEY)
        credential = credential_of(name, raw)
        if fault := _fault(credential, digest):
            return fault
        if isinstance(credential, AdminKey):
            return Administrator(organization_id, credential)
        project_name = f"project/{credential.project}"
        again, project_raw = await self._directory.fields(organization_id, "version", project_name)
        if again != version:
            return await self._read(organization_id, name, digest)
        organization = Organization.model_validate_json(organization_raw)
        if project_raw is None or version is None or organization.archived_at is not None:
            return InvalidKey(WRONG_KEY)
        project = Project.model_validate_json(project_raw)
        if project.archived_at is not None:
            return InvalidKey("The project of this API key is archived.", code="project_archived")
        return Principal(organization, project, credential, version.decode())


def _fault(credential: AdminKey | ApiKey, digest: str | None) -> InvalidKey | None:
    now = time.time()
    if digest is not None and not same(credential.digest, digest):
        former = credential.former if isinstance(credential, ApiKey) else None
        if former is None or not same(former.digest, digest) or now >= former.until:
            return InvalidKey(WRONG_KEY)
    if credential.is_expired(now):
        return InvalidKey("This API key has expired.", code="expired_api_key")
    return None
