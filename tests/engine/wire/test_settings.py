"""Where settings come from, and which of two places wins."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from pydantic_settings import SettingsError

from noria.engine.config import EngineConfig
from noria.gateway.config import GatewaySettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NORIA_REDIS_URL", "NORIA_REDIS_PASSWORD", "NORIA_API_KEY", "NORIA_GATEWAY_PORT", "NORIA_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    path = tmp_path / "noria.toml"
    monkeypatch.setenv("NORIA_CONFIG", str(path))
    return path.write_text


def test_options_then_environment_then_file_then_defaults(config, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    config('redis_url = "redis://file:1/0"\n[gateway]\nport = 1\nkeep_alive = 2\n[engine]\nmax_batch_size = 3\n')
    monkeypatch.setenv("NORIA_GATEWAY_PORT", "4")
    settings = GatewaySettings()
    assert (settings.port, settings.keep_alive, settings.host) == (4, 2, "127.0.0.1")
    assert GatewaySettings(port=5).port == 5
    assert EngineConfig().max_batch_size == 3
    assert settings.redis_url == EngineConfig().redis_url == "redis://file:1/0"
    monkeypatch.setenv("NORIA_REDIS_URL", "redis://environment:1/0")
    assert GatewaySettings().redis_url == EngineConfig().redis_url == "redis://environment:1/0"


def test_a_table_of_its_own_beats_what_is_shared(config) -> None:  # type: ignore[no-untyped-def]
    config('redis_url = "redis://both:1/0"\n[engine]\nredis_url = "redis://engine:1/0"\n')
    assert GatewaySettings().redis_url == "redis://both:1/0"
    assert EngineConfig().redis_url == "redis://engine:1/0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gateway]\nprot = 1\n", r"there is no setting prot; did you mean port\?"),
        ("[gatway]\nport = 1\n", r"nothing reads gatway; did you mean gateway\?"),
        ("gateway = 1\n", r"gateway is a table: write \[gateway\]"),
        ("[gateway]\nport = \n", "line 2"),
        ('[gateway]\napi_key = "sk"\n', "api_key is a secret: .* NORIA_API_KEY_FILE"),
        ('[gateway]\nredis_password = "x"\n', "redis_password is a secret"),
    ],
)
def test_what_nobody_reads_is_a_mistake(config, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    config(text)
    with pytest.raises(SettingsError, match=said):
        GatewaySettings()


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_CONFIG", "/no/such/noria.toml")
    with pytest.raises(SettingsError, match=r"NORIA_CONFIG: /no/such/noria.toml: no such file"):
        EngineConfig()


def test_secrets_come_from_files_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("key", "one,two\n"), ("password", "p@ss/word\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("NORIA_API_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("NORIA_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.setenv("NORIA_REDIS_URL", "redis://someone@store:1/0")
    settings = GatewaySettings()
    assert settings.api_keys == ("one", "two")
    assert settings.redis_url == EngineConfig().redis_url == "redis://someone:p%40ss%2Fword@store:1/0"
    assert "p@ss" not in repr(settings) and "one" not in repr(settings.api_key)
    monkeypatch.setenv("NORIA_API_KEY", "three")
    assert GatewaySettings().api_keys == ("three",)
    monkeypatch.delenv("NORIA_API_KEY")
    monkeypatch.setenv("NORIA_API_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match=r"NORIA_API_KEY_FILE: .*/none: no such file"):
        GatewaySettings()


def test_one_password_only() -> None:
    def url(given: str, password: str = "a b") -> str:
        return GatewaySettings(redis_url=given, redis_password=SecretStr(password)).redis_url

    assert url("redis://h:1/0") == "redis://:a%20b@h:1/0"
    assert url("unix:///run/store.sock?db=0") == "unix://:a%20b@/run/store.sock?db=0"
    assert url("redis://:a%20b@h:1/0") == "redis://:a%20b@h:1/0"
    assert url("redis://:old@h:1/0", "") == "redis://:old@h:1/0"
    with pytest.raises(ValidationError, match="another one"):
        url("redis://:old@h:1/0")
