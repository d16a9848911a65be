"""Where settings come from: options, the environment, files that it names, one TOML file, defaults; the first wins.

Lies on this floor because gateway and engine both are configured so. Knows no setting but the store's address.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import SecretStr, ValidationInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

REPEATABLE = "repeatable"
"""Marks a field that holds several values, with commas between them: its option may be given again and again."""

CONFIG_VARIABLE = "NORIA_CONFIG"
TABLES = ("gateway", "engine")
SHARED = ("redis_url", "redis_tls_ca", "redis_tls_cert", "redis_tls_key")
"""Settings that may stand above the tables of the file, for gateway and engine at once."""


class Settings(BaseSettings):
    """A class of settings with a table of its own in the file. `NORIA_X_FILE` names a file that holds what `NORIA_X`
    would, as secrets are handed to containers."""

    table: ClassVar[str]

    model_config = SettingsConfigDict(allow_inf_nan=False)  # no size and no time is endless

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _NamedFiles(settings_cls), _TomlFile(settings_cls)


class _NamedFiles(EnvSettingsSource):
    """`NORIA_API_KEY_FILE=/run/secrets/api_key` and the like."""

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, field in self.settings_cls.model_fields.items():
            for key, variable, _ in self._extract_field_info(field, name):
                if path := self.env_vars.get(f"{variable}_file".lower()):
                    values[key] = _content(Path(path), f"{variable}_FILE".upper())
        return values


class _TomlFile(EnvSettingsSource):
    """The file that `NORIA_CONFIG` names. Its keys are the fields' names."""

    def __call__(self) -> dict[str, Any]:
        path = self.env_vars.get(CONFIG_VARIABLE.lower())
        if not path:
            return {}
        document = read_toml(Path(path))
        table = self.settings_cls.table if issubclass(self.settings_cls, Settings) else ""
        values = {name: value for name, value in document.items() if name in SHARED}
        values |= document.get(table, {})
        return {self._key(path, name): value for name, value in values.items()}

    def _key(self, path: str, name: str) -> str:
        """What the class takes the field by. Secrets are refused: such files are shown and committed."""
        fields = self.settings_cls.model_fields
        if name not in fields:
            raise SettingsError(f"{path}: there is no setting {name}{nearest(name, fields)}")
        if fields[name].annotation is SecretStr:
            raise SettingsError(f"{path}: {name} is a secret: give a file that holds it in NORIA_{name.upper()}_FILE")
        return self._extract_field_info(fields[name], name)[0][0]


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises SettingsError, one line, where it is no TOML or holds what nobody reads."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}: {path}: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    for name, value in document.items():
        if name in TABLES and not isinstance(value, dict):
            raise SettingsError(f"{path}: {name} is a table: write [{name}]")
        if name not in (*TABLES, *SHARED):
            raise SettingsError(f"{path}: nothing reads {name}{nearest(name, (*TABLES, *SHARED))}")
    return document


def nearest(name: str, known: Any) -> str:
    """`; did you mean X?`, or nothing where nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


_TLS_OPTIONS = {"redis_tls_ca": "ssl_ca_certs", "redis_tls_cert": "ssl_certfile", "redis_tls_key": "ssl_keyfile"}


def with_credentials(url: str, info: ValidationInfo) -> str:
    """A validator of `redis_url`: the URL with the fields `redis_password` and `redis_tls_…`, which stand before it,
    in their places, so that whoever is given the URL needs nothing else."""
    return _with_files(_with_password(url, info), info)


def _with_files(url: str, info: ValidationInfo) -> str:
    files = {option: info.data[name] for name, option in _TLS_OPTIONS.items() if info.data.get(name)}
    if not files:
        return url
    parts = urlsplit(url)
    if not parts.scheme.startswith("rediss"):
        raise ValueError("there are files for TLS, and the URL does not begin with rediss")
    return parts._replace(query=urlencode(dict(parse_qsl(parts.query)) | files, safe="/")).geturl()


def _with_password(url: str, info: ValidationInfo) -> str:
    given = info.data.get("redis_password")
    password = given.get_secret_value() if isinstance(given, SecretStr) else ""
    parts = urlsplit(url)
    if not password or parts.password == quote(password, safe=""):
        return url
    if parts.password is not None:
        raise ValueError("the URL has a password, and there is another one apart from it")
    userinfo, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{userinfo}:{quote(password, safe='')}@{host}").geturl()


def _content(path: Path, variable: str) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{variable}: {path}: {(reason or str(error)).lower()}") from None
