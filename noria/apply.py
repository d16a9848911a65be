"""`noria apply FILE`: makes the store say what a file declares of tenants; shows what it would do, then does it.

Knows files and how to show a plan; what a plan holds is tenancy's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console

from noria.gateway.schemas.strict import parse
from noria.gateway.tenancy.administration import Administration
from noria.gateway.tenancy.declared import Step, TenantsFile, plan
from noria.gateway.tenancy.records import Price
from noria.store_address import CannotShow
from noria.supervisor import EXIT_CONFIGURATION, EXIT_FAILED
from noria.tenants import guarded, me, run

SIGNS = {"create": ("+", "green"), "update": ("~", "yellow"), "archive": ("-", "red"), "revoke": ("-", "red")}


def apply_command(
    file: Path, *, only_plan: bool, yes: bool, prune: bool, as_json: bool, redis_url: str | None, state_dir: Path | None
) -> int:
    """Returns the exit code: 0 where the store says what the file says. Raises CannotShow, before anything is changed,
    for a file that is not right as a whole."""
    declared = guarded(lambda: parse(TenantsFile, _read(file)))
    steps = run(lambda a: _plan(a, declared, prune=prune), redis_url, state_dir)
    if not as_json:
        _show(steps)
    if steps and not only_plan:
        if not yes and not as_json and not typer.confirm("Apply?"):
            raise CannotShow("nothing was changed", EXIT_FAILED)
        made = run(lambda a: _apply(a, steps), redis_url, state_dir)
    else:
        made = {}
    if as_json:
        told = [{name: getattr(s, name) for name in ("verb", "kind", "id", "before", "after")} for s in steps]
        print(json.dumps({"applied": bool(steps) and not only_plan, "steps": told, "keys": made}, ensure_ascii=False))
    else:
        for key_id, value in made.items():
            print(f"{key_id}  {value}   (shown this once)")
    return 0


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise CannotShow(f"{file} cannot be read: {error.strerror}", EXIT_CONFIGURATION) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CannotShow(f"{file} is no YAML: {' '.join(str(error).split())}", EXIT_CONFIGURATION) from None
    if not isinstance(found, dict):
        raise CannotShow(f"{file} declares nothing: it needs 'organizations' or 'prices'", EXIT_CONFIGURATION)
    return found


async def _plan(administration: Administration, declared: TenantsFile, *, prune: bool) -> list[Step]:
    directory = administration.directory
    known = {o.id: await directory.snapshot(o.id) for o in declared.organizations}
    return plan(declared, known, await directory.prices(), prune=prune)


async def _apply(administration: Administration, steps: list[Step]) -> dict[str, str]:
    """The values of keys that were made, by id."""
    made: dict[str, str] = {}
    for step in steps:
        actor, org, project, given = me(), step.organization, step.project, step.given
        match step.kind, step.verb:
            case "price", _:
                await administration.set_price(actor, step.id, Price.model_validate(step.after))
            case "organization", "create":
                await administration.create_organization(actor, given, id=step.id)
            case "organization", _:
                await administration.change_organization(actor, org, given)
            case "project", "create":
                await administration.create_project(actor, org, given, id=step.id)
            case "project", "archive":
                await administration.archive_project(actor, org, step.id)
            case "project", _:
                await administration.change_project(actor, org, step.id, given)
            case "key", "create":
                _, secret = await administration.create_key(actor, org, project, given, id=step.id)
                made[step.id] = secret.value
            case "key", "revoke":
                await administration.delete_key(actor, org, project, step.id)
            case _:
                await administration.change_key(actor, org, project, step.id, given)
    return made


def _show(steps: list[Step]) -> None:
    console = Console(highlight=False)
    if not steps:
        console.print("Nothing to do: the store says what the file says.")
    for step in steps:
        sign, style = SIGNS[step.verb]
        console.print(f"{sign} {step.verb} {step.kind} {step.id}", style=style, markup=False)
        for name in dict.fromkeys((*step.before, *step.after)):
            before, after = (json.dumps(side.get(name)) for side in (step.before, step.after))
            console.print(f"    {name}: {after if step.verb == 'create' else f'{before} -> {after}'}", markup=False)
