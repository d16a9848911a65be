"""Tenants as a file declares them, and what has to be done so that the store says the same.

Pure: knows the records and no store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, model_validator

from noria.gateway.schemas.administration import ApiKeyCreate, OrganizationCreate, ProjectCreate, chosen
from noria.gateway.schemas.strict import RequestBody
from noria.gateway.tenancy.directory import Snapshot
from noria.gateway.tenancy.given import ModelName
from noria.gateway.tenancy.records import Price, Stored

_REST = "[A-Za-z0-9_.-]{1,60}$"


class DeclaredKey(ApiKeyCreate):
    id: Annotated[str, Field(pattern="^key_" + _REST)]


class DeclaredProject(ProjectCreate):
    id: Annotated[str, Field(pattern="^proj_" + _REST)]
    keys: list[DeclaredKey] = Field(default_factory=list)


class DeclaredOrganization(OrganizationCreate):
    id: Annotated[str, Field(pattern="^org-" + _REST)]
    projects: list[DeclaredProject] = Field(default_factory=list)


class TenantsFile(RequestBody):
    """A field that is left out has its default: the file says all there is to say of what it names."""

    organizations: list[DeclaredOrganization] = Field(default_factory=list)
    prices: dict[ModelName, Price] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_each_once(self) -> TenantsFile:
        ids = [i for o in self.organizations for i in (o.id, *(p.id for p in o.projects))]
        ids += [key.id for o in self.organizations for p in o.projects for key in p.keys]
        for record_id in ids:
            if ids.count(record_id) > 1:
                raise ValueError(f"'{record_id}' is declared twice")
        return self


@dataclass(frozen=True, slots=True)
class Step:
    """One change: `verb` is create, update, archive or revoke; `before` and `after` are the fields that differ."""

    verb: str
    kind: str
    id: str
    organization: str = ""
    project: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)


def plan(
    declared: TenantsFile, known: Mapping[str, Snapshot], prices: Mapping[str, Price], *, prune: bool
) -> list[Step]:
    """What to do, in this order; empty: nothing. With `prune`, projects and keys of declared organisations that are not
    declared are archived and revoked. `known` has a snapshot of every declared organisation. Raises ValueError for what
    no step can bring about."""
    steps = [*_prices(declared.prices, prices)]
    for organization in declared.organizations:
        steps += _organization(organization, known[organization.id], prune=prune)
    return steps


def _prices(declared: Mapping[str, Price], known: Mapping[str, Price]) -> Iterator[Step]:
    for model, price in declared.items():
        now = known.get(model)
        if now != price:
            before = {} if now is None else now.model_dump()
            yield Step("update" if now else "create", "price", model, before=before, after=price.model_dump())


def _organization(declared: DeclaredOrganization, known: Snapshot, *, prune: bool) -> Iterator[Step]:
    yield from _put("organization", declared, known.organization, declared.id, "", hidden=("projects",))
    projects = {project.id: project for project in known.projects}
    keys = {key.id: key for key in known.keys}
    for project in declared.projects:
        yield from _put("project", project, projects.get(project.id), declared.id, project.id, hidden=("keys",))
        for key in project.keys:
            now = keys.get(key.id)
            if now is not None and now.project != project.id:
                raise ValueError(f"'{key.id}' belongs to '{now.project}': a key does not move")
            yield from _put("key", key, now, declared.id, project.id)
    if prune:
        yield from _pruned(declared, known)


def _pruned(declared: DeclaredOrganization, known: Snapshot) -> Iterator[Step]:
    wanted = {project.id: {key.id for key in project.keys} for project in declared.projects}
    for key in known.keys:
        if key.project in wanted and key.id not in wanted[key.project]:
            yield Step("revoke", "key", key.id, declared.id, key.project)
    for project in known.projects:
        if project.id not in wanted and project.archived_at is None:
            yield Step("archive", "project", project.id, declared.id, project.id)


def _put(
    kind: str,
    declared: RequestBody,
    now: Stored | None,
    organization: str,
    project: str,
    *,
    hidden: Sequence[str] = (),
) -> Iterator[Step]:
    names = set(type(declared).model_fields) - {"id", *hidden}
    record_id: str = getattr(declared, "id", "")
    given = chosen(declared.model_copy(update={n: getattr(declared, n) for n in names}))
    given = {name: value for name, value in given.items() if name in names}
    if now is None:
        yield Step("create", kind, record_id, organization, project, given, after=_plain(given))
        return
    if getattr(now, "archived_at", None) is not None:
        raise ValueError(f"'{record_id}' is archived, for good: declare another id")
    different = {name: value for name, value in given.items() if getattr(now, name) != value}
    if different:
        before = _plain({name: getattr(now, name) for name in different})
        yield Step("update", kind, record_id, organization, project, different, before, _plain(different))


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as people write them, those that say nothing left out."""
    return {name: shown for name, value in fields.items() if (shown := _shown(value)) not in (None, {}, [], "")}


def _shown(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return {name: part for name, part in value.model_dump(exclude_none=True).items() if part != {}}
    return [_shown(part) for part in value] if isinstance(value, list | tuple) else value
