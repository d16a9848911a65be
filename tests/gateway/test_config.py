"""The list of keys: who is let in, as whom, with which share."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from noria.engine.config import EngineConfig
from noria.gateway.config import GatewaySettings, KeyEntry, parse_keys


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("", ()),
        (" a , b ", (KeyEntry("a"), KeyEntry("b"))),
        ("acme=sk-1,acme=sk-2", (KeyEntry("sk-1", "acme"), KeyEntry("sk-2", "acme"))),
        ("acme*3=sk-1,low*0.5=k", (KeyEntry("sk-1", "acme", 3.0), KeyEntry("k", "low", 0.5))),
        ("a@x=k,b*2@x=l", (KeyEntry("k", "a", cache_group="x"), KeyEntry("l", "b", 2.0, "x"))),
        ("c2VjcmV0==", (KeyEntry("c2VjcmV0=="),)),  # a key that only ends so
        ("acme=c2VjcmV0==", (KeyEntry("c2VjcmV0==", "acme"),)),
        ("a+/b=,sk-*@1", (KeyEntry("a+/b="), KeyEntry("sk-*@1"))),
    ],
)
def test_entries(text, entries):
    assert parse_keys(text) == entries


@pytest.mark.parametrize(
    "text", ["a*0=secret", "a*5000=secret", "a*1=secret,a*2=other", "a@x=secret,a=other", "a=secret,b=secret"]
)
def test_contradictions_are_refused_without_the_key(text):
    with pytest.raises(ValidationError) as caught:
        GatewaySettings(api_key=SecretStr(text))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a*nan=secret", "a*inf=secret", "a*-1=secret", "a*1e2=secret", "a*=secret", "a*2=", "a@x=", "a b@x=secret",
             "=secret", "=,=", "==", "fine=k,a*nan=secret"],
)  # fmt: skip
def test_what_is_no_entry_is_no_key(text):
    with pytest.raises(ValidationError, match="TENANT") as caught:
        GatewaySettings(api_key=SecretStr(text))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", [GatewaySettings, EngineConfig])
def test_no_setting_is_endless(kind):
    names = [name for name, field in kind.model_fields.items() if field.annotation is float]
    assert names
    for name in names:
        for value in ("inf", "nan"):
            with pytest.raises(ValidationError, match=name):
                kind(**{name: value})


def test_keys_from_the_environment_are_not_repeated_in_errors(monkeypatch):
    monkeypatch.setenv("NORIA_API_KEY", "a*0=secret")
    with pytest.raises(ValidationError) as caught:
        GatewaySettings()
    assert "secret" not in str(caught.value)
