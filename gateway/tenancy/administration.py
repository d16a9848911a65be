"""What administrators do: make, change, rotate and take away organisations, projects and keys.

Knows the records and what follows from what; not who asks, and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from noria.gateway.errors import NotFound, WrongState
from noria.gateway.tenancy.credentials import Secret, new_secret
from noria.gateway.tenancy.directory import Actor, Change, Directory, Snapshot
from noria.gateway.tenancy.names import DEFAULT_ORGANIZATION
from noria.gateway.tenancy.records import (
    MAX_LIMITED_MODELS,
    AdminKey,
    ApiKey,
    FormerSecret,
    ListedPrice,
    Organization,
    Price,
    Project,
    Rates,
    Stored,
    new_id,
)

R = TypeVar("R", bound=Stored)

MAX_PROJECTS = 10_000
MAX_KEYS = 100_000
"""Of one organisation: its directory is read whole for every change."""


class Unknown(NotFound):
    """There is nothing with this id. `kind` is a word for people."""

    def __init__(self, kind: str, record_id: str) -> None:
        super().__init__(f"No {kind} found with id '{record_id[:128]}'.")
        self.record_id = record_id


class Refused(WrongState):
    """It cannot be done as things are; the text says why."""


class Administration:
    """Every method is one change with one audit entry, or none where nothing changes. Raises Unknown and Refused, and
    what `Directory.change` raises."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    # --- organisations ------------------------------------------------------------------------------------------------

    async def organizations(self) -> list[Organization]:
        found = [await self.directory.snapshot(i) for i in await self.directory.organization_ids()]
        listed = [snapshot.organization for snapshot in found]
        return sorted((o for o in listed if o is not None), key=lambda o: (o.created_at, o.id))

    async def organization(self, organization_id: str) -> Organization:
        return _required(await self.directory.snapshot(organization_id), Organization, "organization")

    async def create_organization(self, actor: Actor, given: Mapping[str, Any], *, id: str = "") -> Organization:
        made = Organization(id=id or new_id("org-"), created_at=_now(), **given)

        def step(now: Snapshot) -> Change:
            if now.organization is not None:
                raise Refused(f"There is an organization with id '{made.id}'.")
            return Change("organization.created", {"organization": made})

        await self.directory.change(made.id, actor, step)
        return made

    async def change_organization(self, actor: Actor, organization_id: str, given: Mapping[str, Any]) -> Organization:
        return await self._update(actor, organization_id, Organization, "organization", given)

    # --- projects -----------------------------------------------------------------------------------------------------

    async def create_project(
        self, actor: Actor, organization_id: str, given: Mapping[str, Any], *, id: str = ""
    ) -> Project:
        made = Project(id=id or new_id("proj_"), created_at=_now(), **given)

        def step(now: Snapshot) -> Change:
            _open(_required(now, Organization, "organization"))
            if len(now.projects) >= MAX_PROJECTS:
                raise Refused(f"An organization has {MAX_PROJECTS} projects at most.")
            if f"project/{made.id}" in now.raw:
                raise Refused(f"There is a project with id '{made.id}'.")
            return Change("project.created", {f"project/{made.id}": made}, made.id)

        await self.directory.change(organization_id, actor, step)
        return made

    async def project(self, organization_id: str, project_id: str) -> Project:
        return _required(await self.directory.snapshot(organization_id), Project, f"project/{project_id}")

    async def change_project(
        self, actor: Actor, organization_id: str, project_id: str, given: Mapping[str, Any]
    ) -> Project:
        return await self._update(actor, organization_id, Project, f"project/{project_id}", given, project_id)

    async def archive_project(self, actor: Actor, organization_id: str, project_id: str) -> Project:
        """Its keys open nothing any more; what it used stays on the books. It cannot be undone."""
        return await self._update(
            actor, organization_id, Project, f"project/{project_id}", {"archived_at": _now()}, project_id,
            event="project.archived",
        )  # fmt: skip

    async def limit_model(
        self, actor: Actor, organization_id: str, project_id: str, model: str, rates: Mapping[str, int]
    ) -> Project:
        """These limits of a project for requests of one model; the others stay."""

        def changed(project: Project) -> Mapping[str, Any]:
            known = project.limits.models
            of_model = known.get(model, Rates()).model_copy(update=dict(rates))
            if model not in known and len(known) >= MAX_LIMITED_MODELS:
                raise Refused(f"A project limits {MAX_LIMITED_MODELS} models at most.")
            return {"limits": project.limits.model_copy(update={"models": {**known, model: of_model}})}

        return await self._update(actor, organization_id, Project, f"project/{project_id}", changed, project_id)

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def keys(self, organization_id: str, project_id: str) -> list[ApiKey]:
        snapshot = await self.directory.snapshot(organization_id)
        _required(snapshot, Project, f"project/{project_id}")
        return [key for key in snapshot.keys if key.project == project_id]

    async def key(self, organization_id: str, project_id: str, key_id: str) -> ApiKey:
        return _key_of(await self.directory.snapshot(organization_id), project_id, key_id)

    async def create_key(
        self, actor: Actor, organization_id: str, project_id: str, given: Mapping[str, Any], *, id: str = ""
    ) -> tuple[ApiKey, Secret]:
        secret = new_secret()
        digest = self.directory.pepper.digest(secret.value)
        made = ApiKey(
            id=id or new_id("key_"), project=project_id, created_at=_now(), redacted=secret.redacted, digest=digest,
            **given,
        )  # fmt: skip
        name = f"key/{made.id}"

        def step(now: Snapshot) -> Change:
            _open(_required(now, Organization, "organization"))
            _open(_required(now, Project, f"project/{project_id}"))
            if len(now.keys) >= MAX_KEYS:
                raise Refused(f"An organization has {MAX_KEYS} keys at most.")
            if name in now.raw:
                raise Refused(f"There is a key with id '{made.id}'.")
            return Change("api_key.created", {name: made}, project_id, opened={digest: name})

        await self.directory.change(organization_id, actor, step)
        return made, secret

    async def change_key(
        self, actor: Actor, organization_id: str, project_id: str, key_id: str, given: Mapping[str, Any]
    ) -> ApiKey:
        _key_of(await self.directory.snapshot(organization_id), project_id, key_id)
        return await self._update(actor, organization_id, ApiKey, f"key/{key_id}", given, project_id)

    async def rotate_key(
        self, actor: Actor, organization_id: str, project_id: str, key_id: str, grace_seconds: int
    ) -> tuple[ApiKey, Secret]:
        """A new secret for the same key. The one before opens for the grace time yet, one from before that no more."""
        secret, now_at = new_secret(), time.time()
        digest = self.directory.pepper.digest(secret.value)
        rotated: list[ApiKey] = []

        def step(now: Snapshot) -> Change:
            key = _key_of(now, project_id, key_id)
            until = now_at + grace_seconds
            former = FormerSecret(digest=key.digest, redacted=key.redacted, until=until) if grace_seconds else None
            changes = {"digest": digest, "redacted": secret.redacted, "former": former, "rotated_at": int(now_at)}
            rotated[:] = [key.model_copy(update=changes)]
            closed = {key.digest: until} | ({key.former.digest: now_at} if key.former else {})
            name = f"key/{key_id}"
            return Change("api_key.rotated", {name: rotated[0]}, project_id, {digest: name}, closed)

        await self.directory.change(organization_id, actor, step)
        return rotated[0], secret

    async def delete_key(self, actor: Actor, organization_id: str, project_id: str, key_id: str) -> None:
        """Revoke it, for good."""

        def step(now: Snapshot) -> Change:
            key = _key_of(now, project_id, key_id)
            closed = {digest: time.time() for digest in (key.digest, *((key.former.digest,) if key.former else ()))}
            return Change("api_key.deleted", {f"key/{key_id}": None}, project_id, closed=closed)

        await self.directory.change(organization_id, actor, step)

    # --- admin keys ---------------------------------------------------------------------------------------------------

    async def create_admin_key(
        self, actor: Actor, organization_id: str, given: Mapping[str, Any]
    ) -> tuple[AdminKey, Secret]:
        secret = new_secret(admin=True)
        digest = self.directory.pepper.digest(secret.value)
        made = AdminKey(id=new_id("key_"), created_at=_now(), redacted=secret.redacted, digest=digest, **given)
        name = f"admin/{made.id}"

        def step(now: Snapshot) -> Change:
            _open(_required(now, Organization, "organization"))
            return Change("admin_api_key.created", {name: made}, opened={digest: name})

        await self.directory.change(organization_id, actor, step)
        return made, secret

    async def delete_admin_key(self, actor: Actor, organization_id: str, key_id: str) -> None:
        """Raises Refused for the last one: nobody could make another."""

        def step(now: Snapshot) -> Change:
            key = _required(now, AdminKey, f"admin/{key_id}")
            if len(now.admin_keys) == 1:
                raise Refused("This is the last admin key of its organization. Create another one first.")
            return Change("admin_api_key.deleted", {f"admin/{key_id}": None}, closed={key.digest: time.time()})

        await self.directory.change(organization_id, actor, step)

    # --- prices -------------------------------------------------------------------------------------------------------

    async def set_price(self, actor: Actor, model: str, price: Price | None) -> None:
        """None takes it off the list; nothing happens where it is not on it."""
        name = f"price/{model}"
        listed = None if price is None else ListedPrice(id=model, price=price)

        def step(now: Snapshot) -> Change | None:
            if now.prices.get(model) == price:
                return None
            event = "deleted" if listed is None else "updated" if name in now.raw else "created"
            return Change(f"price.{event}", {name: listed})

        await self.directory.change(DEFAULT_ORGANIZATION, actor, step)

    async def _update(
        self,
        actor: Actor,
        organization_id: str,
        kind: type[R],
        name: str,
        given: Mapping[str, Any] | Callable[[R], Mapping[str, Any]],
        project: str | None = None,
        *,
        event: str = "",
    ) -> R:
        changed: list[R] = []

        def step(now: Snapshot) -> Change | None:
            record = _required(now, kind, name)
            _open(record)
            fields = given(record) if callable(given) else given
            changed[:] = [record.model_copy(update=dict(fields))]
            if changed[0] == record:
                return None
            return Change(event or f"{_EVENTS[kind]}.updated", {name: changed[0]}, project)

        await self.directory.change(organization_id, actor, step)
        return changed[0]


_EVENTS: Mapping[type[Stored], str] = {Organization: "organization", Project: "project", ApiKey: "api_key"}
_WORDS: Mapping[type[Stored], str] = {
    Organization: "organization", Project: "project", ApiKey: "API key", AdminKey: "admin API key",
}  # fmt: skip


def _required(snapshot: Snapshot, kind: type[R], name: str) -> R:
    found = snapshot.find(kind, name)
    if found is None:
        record_id = snapshot.id if kind is Organization else name.partition("/")[2]
        raise Unknown(_WORDS[kind], record_id)
    return found


def _key_of(snapshot: Snapshot, project_id: str, key_id: str) -> ApiKey:
    key = _required(snapshot, ApiKey, f"key/{key_id}")
    if key.project != project_id:
        raise Unknown("API key", key_id)
    return key


def _open(record: Stored) -> None:
    if getattr(record, "archived_at", None) is not None:
        raise Refused(f"'{record.id}' is archived.")


def _now() -> int:
    return int(time.time())
