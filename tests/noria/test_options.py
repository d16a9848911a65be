"""Options made from settings classes: one per field, the right type, and one line for a bad value."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from noria.engine.config import EngineConfig
from noria.gateway.config import GatewaySettings
from noria.options import BadSetting, Panel, as_arguments, build, flag, in_environment, only, parameters


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NORIA_REDIS_URL", "NORIA_API_KEY", "NORIA_ENGINE_MAX_BATCH_SIZE", "NORIA_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("settings", [EngineConfig, GatewaySettings])
def test_every_field_is_an_option_that_is_not_given(settings: Any) -> None:
    made = {parameter.name: parameter for parameter in parameters(Panel("All", settings))}
    assert set(made) == set(settings.model_fields)
    assert {parameter.default for parameter in made.values()} == {None}


def test_shared_fields_are_one_option_and_skipped_ones_are_none() -> None:
    panels = Panel("Gateway", GatewaySettings), Panel("Engine", EngineConfig, skip=frozenset({"model"}))
    names = [parameter.name for parameter in parameters(*panels)]
    assert len(names) == len(set(names))
    assert "model" not in names
    assert set(names) == (set(GatewaySettings.model_fields) | set(EngineConfig.model_fields)) - {"model"}


def test_help_names_the_default_and_the_variables() -> None:
    made = {p.name: p for p in parameters(Panel("G", GatewaySettings), Panel("E", EngineConfig))}
    size = get_args(made["max_batch_size"].annotation)[1]
    assert f"(default: {EngineConfig.model_fields['max_batch_size'].default}; NORIA_ENGINE_MAX_BATCH_SIZE)" in size.help
    shared = get_args(made["log_format"].annotation)[1]
    assert "NORIA_GATEWAY_LOG_FORMAT; NORIA_ENGINE_LOG_FORMAT" in shared.help


@pytest.mark.parametrize("settings", [EngineConfig, GatewaySettings])
def test_options_beat_the_environment_which_beats_defaults(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    default = build(settings, {}).redis_url
    monkeypatch.setenv("NORIA_REDIS_URL", "redis://environment:1/0")
    assert in_environment(settings, "redis_url")
    assert build(settings, {}).redis_url == "redis://environment:1/0" != default
    assert build(settings, {"redis_url": "redis://option:2/0"}).redis_url == "redis://option:2/0"


def test_the_key_is_taken_from_option_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_API_KEY", "one,two")
    assert build(GatewaySettings, {}).api_keys == ("one", "two")
    assert build(GatewaySettings, {"api_key": "three"}).api_keys == ("three",)


def test_a_bad_option_is_named_by_its_flag() -> None:
    with pytest.raises(BadSetting, match=r"^--max-batch-size: .*greater than or equal to 1, not 0$"):
        build(EngineConfig, {"max_batch_size": 0})


def test_a_bad_variable_is_named_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_GATEWAY_PORT", "http")
    with pytest.raises(BadSetting, match=r"^NORIA_GATEWAY_PORT: .*integer.*'http'$"):
        build(GatewaySettings, {})


def test_arguments_for_a_child_hold_its_own_options_and_no_secret() -> None:
    given = {
        "port": 8123,
        "policy": "static",
        "prefix_cache": False,
        "open_metrics": True,
        "redis_url": "redis://:secret@host:1/0",
        "api_key": "sk-secret",
        "max_batch_size": None,
    }
    assert as_arguments(EngineConfig, given) == ["--policy=static", "--no-prefix-cache"]
    assert as_arguments(GatewaySettings, given) == ["--port=8123", "--open-metrics"]
    assert only(EngineConfig, {"redis_url": "x", "port": 1}) == {"redis_url": "x"}


def test_flag() -> None:
    assert flag("max_batch_size") == "--max-batch-size"


def test_an_option_that_may_be_repeated_is_one_setting_and_again_several_arguments() -> None:
    made = {p.name: p for p in parameters(Panel("E", EngineConfig))}
    assert get_args(get_args(made["lora"].annotation)[0])[0] == list[str]
    given = {"lora": ["a=/x", "b=/y,c=/z"]}
    assert list(build(EngineConfig, given).adapters) == ["a", "b", "c"]
    assert as_arguments(EngineConfig, given) == ["--lora=a=/x", "--lora=b=/y,c=/z"]
    for bad, message in (("a", "NAME=FOLDER"), ("a=/x,a=/y", "two adapters"), ("a\tb=/x", "printable")):
        with pytest.raises(BadSetting, match=message):
            build(EngineConfig, {"lora": [bad]})
