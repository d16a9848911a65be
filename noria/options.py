"""Command-line options made from settings classes: one per field, so that no list of options is kept twice.

Knows pydantic and typer; not what any setting means.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError

from noria.engine.wire.settings import CONFIG_VARIABLE, REPEATABLE

Settings = TypeVar("Settings", bound=BaseSettings)

ENVIRONMENT_ONLY = frozenset({"redis_url", "redis_password", "api_key", "key_pepper"})
"""Fields that may hold a secret: handed to a child process through its environment, never through its arguments,
which every user of the machine can read."""


class BadSetting(ValueError):
    """A setting that cannot be used; the text is one line and names the option or the variable."""


@dataclass(frozen=True)
class Panel:
    """The options of one settings class in `--help`, under their own heading. `skip` are fields without an option."""

    title: str
    settings: type[BaseSettings]
    skip: frozenset[str] = frozenset()


def flag(field: str) -> str:
    """`max_batch_size` -> `--max-batch-size`."""
    return "--" + field.replace("_", "-")


def parameters(*panels: Panel) -> list[Parameter]:
    """One keyword parameter per field, for the signature of a typer command. None means: not given.

    A field that several classes share becomes one option.
    """
    made: dict[str, Parameter] = {}
    for panel in panels:
        for name, info in panel.settings.model_fields.items():
            if name in panel.skip or name in made:
                continue
            variables = [variable(p.settings, name) for p in panels if name in p.settings.model_fields]
            made[name] = Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_plain_type(info) | None, _option(name, info, panel.title, variables)],
            )
    return list(made.values())


def build(settings: type[Settings], given: Mapping[str, Any]) -> Settings:
    """The settings from options, then the environment, then the file, then defaults. `given` may hold other classes'
    fields too.

    Raises BadSetting for the first value that does not fit.
    """
    chosen = {name: _joined(value) for name, value in only(settings, given).items()}
    try:
        return settings(**{_key(settings, name): value for name, value in chosen.items()})
    except SettingsError as error:
        raise BadSetting(str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        name = _field_named(settings, str(first["loc"][0]))
        where = flag(name) if name in chosen else _origin(settings, name)
        message = first["msg"].removeprefix("Value error, ")
        quoted = name in ENVIRONMENT_ONLY or repr(first["input"]) in message
        value = "" if quoted else f", not {first['input']!r}"
        raise BadSetting(f"{where}: {message[:1].lower()}{message[1:]}{value}") from None


def only(settings: type[BaseSettings], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given (are not None) and belong to this class."""
    return {name: value for name, value in given.items() if value is not None and name in settings.model_fields}


def as_arguments(settings: type[BaseSettings], given: Mapping[str, Any]) -> list[str]:
    """The given options of this class as arguments for a child process, those that may be secret left out."""
    arguments = []
    for name, value in only(settings, given).items():
        if name in ENVIRONMENT_ONLY:
            continue
        if isinstance(value, list):
            arguments += [f"{flag(name)}={item}" for item in value]
        elif isinstance(value, bool):
            arguments.append(flag(name) if value else flag(f"no_{name}"))
        else:
            arguments += [f"{flag(name)}={value}"]
    return arguments


def in_environment(settings: type[BaseSettings], name: str) -> bool:
    """True if the environment, or a file that it names, sets this field. Raises BadSetting."""
    return name in build(settings, {}).model_fields_set


def variables(settings: type[BaseSettings]) -> set[str]:
    """Every environment variable that the class reads."""
    return {variable(settings, name) for name in settings.model_fields}


def _option(name: str, info: FieldInfo, title: str, variables: list[str]) -> Any:
    names, default = flag(name), info.default
    if info.annotation is bool:
        names += "/" + flag(f"no_{name}")
        default = flag(name if default else f"no_{name}")
    if isinstance(default, SecretStr) or default == "":
        default = None
    notes = [f"default: {default}"] if default is not None else []
    notes += dict.fromkeys(variables)
    return typer.Option(names, help=f"{info.description}. ({'; '.join(notes)})", rich_help_panel=title)


def _joined(value: Any) -> Any:
    """What the settings take for an option that was given several times."""
    return ",".join(value) if isinstance(value, list) else value


def _plain_type(info: FieldInfo) -> Any:
    annotation = info.annotation
    if REPEATABLE in info.metadata:
        return list[str]
    if get_origin(annotation) is Literal and all(isinstance(choice, str) for choice in get_args(annotation)):
        return annotation
    return annotation if annotation in (bool, int, float) else str


def _origin(settings: type[BaseSettings], name: str) -> str:
    """How a person names the place that a field's value came from, where it was no option."""
    named = variable(settings, name)
    config = os.environ.get(CONFIG_VARIABLE)
    if named in os.environ or f"{named}_FILE" in os.environ or not config:
        return named
    return f"{config}: [{getattr(settings, 'table', '')}] {name}"


def _aliases(info: FieldInfo) -> list[str]:
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [alias] if isinstance(alias, str) else []


def variable(settings: type[BaseSettings], name: str) -> str:
    """The environment variable of a field."""
    aliases = [alias for alias in _aliases(settings.model_fields[name]) if alias != name]
    return aliases[0] if aliases else f"{settings.model_config.get('env_prefix', '')}{name}".upper()


def _key(settings: type[BaseSettings], name: str) -> str:
    """The keyword that the class takes a field by."""
    aliases = _aliases(settings.model_fields[name])
    return aliases[0] if aliases and name not in aliases else name


def _field_named(settings: type[BaseSettings], key: str) -> str:
    for name, info in settings.model_fields.items():
        if key in (name, *_aliases(info)):
            return name
    return key


def check_lengths(**spans: tuple[int, int]) -> None:
    """Spans of lengths, by the option that gave them. Raises BadSetting for one that holds none."""
    for name, (low, high) in spans.items():
        if not 0 < low <= high:
            raise BadSetting(f"--{name} {low} {high}: 0 < shortest <= longest")
