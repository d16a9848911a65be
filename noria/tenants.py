"""`noria orgs`, `noria projects`, `noria keys`, `noria limits`: the directory of tenants from a shell on this machine.

Works on the store itself, so that it needs no gateway and no admin key. Knows how to show and which words it takes.
"""

from __future__ import annotations

import asyncio
import getpass
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from noria.engine.wire.broker import BrokerUnavailable
from noria.gateway.errors import GatewayError
from noria.gateway.schemas.administration import (
    ApiKeyCreate,
    ApiKeyUpdate,
    OrganizationCreate,
    OrganizationUpdate,
    ProjectCreate,
    ProjectUpdate,
    chosen,
    shown_key,
    shown_organization,
    shown_project,
)
from noria.gateway.schemas.strict import RequestBody, parse
from noria.gateway.tenancy.administration import Administration
from noria.gateway.tenancy.bootstrap import WrongPepper, bootstrap, opened
from noria.gateway.tenancy.credentials import Secret
from noria.gateway.tenancy.directory import Actor
from noria.gateway.tenancy.names import DEFAULT_ORGANIZATION
from noria.gateway.tenancy.records import ApiKey, Limits
from noria.store_address import CannotShow, key_pepper, store_url, unreachable
from noria.supervisor import EXIT_CONFIGURATION, EXIT_FAILED
from noria.tables import columns, console

T = TypeVar("T")
Shown = dict[str, Any]

RedisUrl = Annotated[
    str | None, typer.Option(help="The store; else that of the noria serve that runs here. (NORIA_REDIS_URL)")
]
StateDir = Annotated[Path | None, typer.Option(help="State folder of the noria serve to act on.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Org = Annotated[str, typer.Option("--org", help="The organization.")]
ProjectId = Annotated[str, typer.Option("--project", help="The project.")]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A field as in the admin API, its value in JSON or plain text; repeatable."
    ),
]


def run(work: Callable[[Administration], Coroutine[Any, Any, T]], redis_url: str | None, state_dir: Path | None) -> T:
    """What `work` returns. Raises CannotShow for whatever is the user's or the store's fault."""

    async def opened_work() -> T:
        async with opened(store_url(redis_url, state_dir), key_pepper(state_dir)) as administration:
            return await work(administration)

    return guarded(lambda: asyncio.run(opened_work()))


def guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except BrokerUnavailable as error:
        raise unreachable(error) from None
    except GatewayError as error:
        code = EXIT_CONFIGURATION if error.status == 400 else EXIT_FAILED
        # Only bootstrap makes the default organization: without it there is nothing to put projects and keys into.
        cure = "; noria keys bootstrap makes it" if error.message.endswith(f"'{DEFAULT_ORGANIZATION}'.") else ""
        raise CannotShow(error.message.rstrip(".") + cure, code) from None
    except (WrongPepper, ValueError) as error:
        raise CannotShow(str(error), EXIT_CONFIGURATION) from None


def me() -> Actor:
    """Who the audit log says it was."""
    try:
        return Actor("cli", getpass.getuser())
    except (OSError, KeyError):  # a user without a name
        return Actor("cli", "unknown")


def fields(given: Sequence[str] | None, kind: type[RequestBody], **named: Any) -> dict[str, Any]:
    """`NAME=VALUE` words and options as the admin API would take them. Raises InvalidRequest."""
    body: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for word in given or ():
        name, equals, text = word.partition("=")
        if not equals:
            raise CannotShow(f"--set takes NAME=VALUE, not {word!r}", EXIT_CONFIGURATION)
        body[name] = _value(text)
    return chosen(parse(kind, body))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, stderr: bool = False) -> None:
    shown = columns(*headings)
    for row in rows:
        shown.add_row(*("-" if value is None or value == "" else str(value) for value in row))
    console(stderr=stderr).print(shown)


def emit(shown: Any, as_json: bool, people: Callable[[], None]) -> None:
    print(json.dumps(shown, ensure_ascii=False)) if as_json else people()


def one(shown: Shown, as_json: bool) -> None:
    """A record, line by line."""
    emit(shown, as_json, lambda: table(("FIELD", "VALUE"), _rows(shown)))


def with_secret(shown: Shown, value: str, as_json: bool) -> None:
    """A key that was just made. Its secret is the whole of stdout, so that `KEY=$(noria keys create …)` has it."""

    def people() -> None:
        table(("FIELD", "VALUE"), _rows(shown), stderr=True)
        print(value)

    emit({**shown, "value": value}, as_json, people)


def _rows(shown: Shown) -> list[tuple[str, str]]:
    return [(name, _short(value)) for name, value in shown.items() if name != "object" and value not in (None, {}, [])]


def _short(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _limits(record: BaseModel) -> str:
    limits: Mapping[str, Any] = record.model_dump(exclude_none=True)
    return " ".join(f"{name}={value}" for name, value in limits.items() if value) or "none"


orgs = typer.Typer(help="Organizations.", no_args_is_help=True)
projects = typer.Typer(help="Projects of an organization.", no_args_is_help=True)
keys = typer.Typer(help="API keys of projects, and the first admin key.", no_args_is_help=True)
limits = typer.Typer(help="Limits of organizations, projects and keys.", no_args_is_help=True)


@orgs.command("list")
def list_orgs(redis_url: RedisUrl = None, state_dir: StateDir = None, as_json: Json = False) -> None:
    """All organizations."""
    found = run(lambda a: a.organizations(), redis_url, state_dir)
    rows = [(o.id, o.name, _limits(o.limits)) for o in found]
    emit([shown_organization(o) for o in found], as_json, lambda: table(("ID", "NAME", "LIMITS"), rows))


@orgs.command("create")
def create_org(
    name: str, given: Fields = None, redis_url: RedisUrl = None, state_dir: StateDir = None, as_json: Json = False
) -> None:
    """Make an organization."""
    body = guarded(lambda: fields(given, OrganizationCreate, name=name))
    one(shown_organization(run(lambda a: a.create_organization(me(), body), redis_url, state_dir)), as_json)


@orgs.command("update")
def update_org(
    org: str, given: Fields = None, redis_url: RedisUrl = None, state_dir: StateDir = None, as_json: Json = False
) -> None:
    """Change an organization."""
    body = guarded(lambda: fields(given, OrganizationUpdate))
    one(shown_organization(run(lambda a: a.change_organization(me(), org, body), redis_url, state_dir)), as_json)


@projects.command("list")
def list_projects(
    org: Org = DEFAULT_ORGANIZATION, redis_url: RedisUrl = None, state_dir: StateDir = None, as_json: Json = False
) -> None:
    """All projects of an organization."""
    found = run(lambda a: a.directory.snapshot(org), redis_url, state_dir).projects
    rows = [(p.id, p.name, "archived" if p.archived_at else "active", p.weight, _limits(p.limits)) for p in found]
    headings = ("ID", "NAME", "STATUS", "WEIGHT", "LIMITS")
    emit([shown_project(p) for p in found], as_json, lambda: table(headings, rows))


@projects.command("create")
def create_project(
    name: str,
    org: Org = DEFAULT_ORGANIZATION,
    given: Fields = None,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Make a project."""
    body = guarded(lambda: fields(given, ProjectCreate, name=name))
    one(shown_project(run(lambda a: a.create_project(me(), org, body), redis_url, state_dir)), as_json)


@projects.command("update")
def update_project(
    project: str,
    org: Org = DEFAULT_ORGANIZATION,
    given: Fields = None,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Change a project."""
    body = guarded(lambda: fields(given, ProjectUpdate))
    one(shown_project(run(lambda a: a.change_project(me(), org, project, body), redis_url, state_dir)), as_json)


@projects.command("archive")
def archive_project(
    project: str,
    org: Org = DEFAULT_ORGANIZATION,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Close a project for good: its keys open nothing any more."""
    one(shown_project(run(lambda a: a.archive_project(me(), org, project), redis_url, state_dir)), as_json)


@keys.command("bootstrap")
def bootstrap_key(
    force: Annotated[bool, typer.Option(help="Make another one, though there is an admin key.")] = False,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Make the first admin key, and print it: it is shown this once."""
    work = bootstrap(store_url(redis_url, state_dir), key_pepper(state_dir), force=force, actor=me())
    value = guarded(lambda: asyncio.run(work))
    if value is None:
        raise CannotShow("there is an admin key already (--force makes another one)", EXIT_FAILED)
    emit({"value": value}, as_json, lambda: print(value))


@keys.command("list")
def list_keys(
    project: ProjectId = "",
    org: Org = DEFAULT_ORGANIZATION,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """The keys of a project, or of all."""
    found = run(lambda a: _keys(a, org, project), redis_url, state_dir)
    rows = [(k["id"], k["project_id"], k["name"], k["redacted_value"], k["status"], k["last_used_at"]) for k in found]
    emit(found, as_json, lambda: table(("ID", "PROJECT", "NAME", "KEY", "STATUS", "LAST USED"), rows))


async def _keys(administration: Administration, org: str, project: str) -> list[Shown]:
    if project:
        found = await administration.keys(org, project)
    else:
        found = (await administration.directory.snapshot(org)).keys
    used = await administration.directory.last_used(org, [key.id for key in found])
    return [shown_key(key, used.get(key.id)) for key in found]


@keys.command("create")
def create_key(
    name: str,
    project: ProjectId = "proj_default",
    org: Org = DEFAULT_ORGANIZATION,
    given: Fields = None,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Make a key, and print it: it is shown this once."""
    body = guarded(lambda: fields(given, ApiKeyCreate, name=name))
    key, secret = run(lambda a: a.create_key(me(), org, project, body), redis_url, state_dir)
    with_secret(shown_key(key), secret.value, as_json)


@keys.command("update")
def update_key(
    key: str,
    org: Org = DEFAULT_ORGANIZATION,
    given: Fields = None,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Change a key."""
    body = guarded(lambda: fields(given, ApiKeyUpdate))

    async def work(a: Administration) -> ApiKey:
        return await a.change_key(me(), org, await project_of(a, org, key), key, body)

    one(shown_key(run(work, redis_url, state_dir)), as_json)


@keys.command("rotate")
def rotate_key(
    key: str,
    grace: Annotated[int, typer.Option(help="Seconds for which the secret before still opens.")] = 0,
    org: Org = DEFAULT_ORGANIZATION,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Give a key a new secret, and print it: it is shown this once."""

    async def work(a: Administration) -> tuple[ApiKey, Secret]:
        return await a.rotate_key(me(), org, await project_of(a, org, key), key, grace)

    rotated, secret = run(work, redis_url, state_dir)
    with_secret(shown_key(rotated), secret.value, as_json)


@keys.command("revoke")
def revoke_key(
    key: str,
    org: Org = DEFAULT_ORGANIZATION,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Take a key away, for good."""

    async def work(a: Administration) -> None:
        await a.delete_key(me(), org, await project_of(a, org, key), key)

    run(work, redis_url, state_dir)
    emit({"id": key, "deleted": True}, as_json, lambda: print(f"{key} is revoked"))


async def project_of(administration: Administration, org: str, key_id: str) -> str:
    for key in (await administration.directory.snapshot(org)).keys:
        if key.id == key_id:
            return key.project
    raise CannotShow(f"no API key has the id {key_id}", EXIT_FAILED)


@limits.command("show")
def show_limits(
    subject: Annotated[str, typer.Argument(help="Id of an organization, project or key.")],
    org: Org = DEFAULT_ORGANIZATION,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """What an organization, project or key may use at most."""

    async def work(a: Administration) -> Limits:
        return await _limits_of(a, org, subject)

    found = run(work, redis_url, state_dir).model_dump(exclude_none=True)
    emit(found, as_json, lambda: table(("LIMIT", "VALUE"), list(found.items())))


@limits.command("set")
def set_limits(
    subject: Annotated[str, typer.Argument(help="Id of an organization, project or key.")],
    given: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="A limit, or NAME= for none.")],
    org: Org = DEFAULT_ORGANIZATION,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Change limits; those that are not named stay."""

    async def work(a: Administration) -> Limits:
        body: dict[str, Any] = (await _limits_of(a, org, subject)).model_dump(exclude_none=True)
        for word in given:
            name, _, text = word.partition("=")
            body[name] = _value(text) if text else None
        record = chosen(parse(OrganizationUpdate, {"limits": body}))
        if subject == org:
            return (await a.change_organization(me(), org, record)).limits
        if subject.startswith("key_"):
            return (await a.change_key(me(), org, await project_of(a, org, subject), subject, record)).limits
        return (await a.change_project(me(), org, subject, record)).limits

    found = run(work, redis_url, state_dir).model_dump(exclude_none=True)
    emit(found, as_json, lambda: table(("LIMIT", "VALUE"), list(found.items())))


async def _limits_of(administration: Administration, org: str, subject: str) -> Limits:
    if subject == org:
        return (await administration.organization(org)).limits
    if subject.startswith("key_"):
        return (await administration.key(org, await project_of(administration, org, subject), subject)).limits
    return (await administration.project(org, subject)).limits


GROUPS: Mapping[str, typer.Typer] = {"orgs": orgs, "projects": projects, "keys": keys, "limits": limits}
