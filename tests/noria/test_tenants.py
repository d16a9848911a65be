"""`noria orgs|projects|keys|limits` as a shell meets them: on a real store, with exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bench.store import running_store
from noria.cli import main
from noria.gateway.tenancy.credentials import is_well_formed
from tests.noria.conftest import PEPPER


def found(noria, *words):
    code, out = noria(*words, "--json")
    assert code == 0, out
    return json.loads(out)


def test_from_the_first_key_to_the_last(noria):
    code, said = noria("keys", "create", "ci")
    assert code == 1 and "noria keys bootstrap" in said
    assert found(noria, "keys", "bootstrap")["value"].startswith("sk-noria-admin-")
    code, said = noria("keys", "bootstrap")
    assert code == 1 and "--force" in said
    assert found(noria, "orgs", "list")[0]["id"] == "org-default"
    project = found(noria, "projects", "create", "mine", "--set", "weight=2", "--set", 'labels={"a": "b"}')
    assert project["weight"] == 2 and project["labels"] == {"a": "b"}
    made = found(noria, "keys", "create", "ci", "--project", project["id"], "--set", 'endpoints=["chat"]')
    assert is_well_formed(made["value"]) and made["endpoints"] == ["chat"]
    rotated = found(noria, "keys", "rotate", made["id"], "--grace", "60")
    assert rotated["value"] != made["value"] and rotated["grace_until"]
    listed = noria("keys", "list")[1]
    assert made["id"] in listed and rotated["value"] not in listed
    assert found(noria, "keys", "revoke", made["id"])["deleted"]
    assert found(noria, "keys", "list", "--project", project["id"]) == []
    assert found(noria, "projects", "archive", project["id"])["status"] == "archived"


def test_a_shell_variable_takes_a_new_key_as_it_is_printed(noria, capsys):
    with pytest.raises(SystemExit):
        main(["keys", "create", "ci"])
    printed = capsys.readouterr()
    assert is_well_formed(printed.out.strip()) and printed.out.strip() not in printed.err
    key = next(word for word in printed.err.split() if word.startswith("key_"))
    with pytest.raises(SystemExit):
        main(["keys", "rotate", key])
    assert is_well_formed(capsys.readouterr().out.strip())


@pytest.mark.parametrize("of", ["org-default", "proj_default", "key"])
def test_limits_are_shown_and_set_one_by_one(noria, of):
    noria("keys", "bootstrap")
    subject = found(noria, "keys", "create", "limited")["id"] if of == "key" else of
    assert found(noria, "limits", "set", subject, "requests_per_minute=5", "tokens_per_day=9")
    assert found(noria, "limits", "set", subject, "tokens_per_day=") == found(noria, "limits", "show", subject)
    assert found(noria, "limits", "show", subject)["requests_per_minute"] == 5


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("projects", "create", "x", "--set", "wieght=2"), 2, "wieght"),
        (("projects", "create", "x", "--set", "weight"), 2, "NAME=VALUE"),
        (("projects", "update", "proj_none", "--set", "name=x"), 1, "proj_none"),
        (("keys", "revoke", "key_none"), 1, "key_none"),
        (("limits", "set", "proj_default", "requests_per_second=1"), 2, "requests_per_second"),
        (("projects", "list", "--redis-url", "redis://127.0.0.1:1/0"), 1, "cannot be reached"),
        (("keys",), 2, ""),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(noria, words, code, says):
    noria("keys", "bootstrap")
    got, said = noria(*words)
    assert got == code, said
    assert says in said and "Traceback" not in said


def test_warnings_stay_out_of_the_json():
    """This store cannot tell when a change is on disk, which is worth a warning."""
    with running_store("redis") as store:
        environment = {**os.environ, "NORIA_KEY_PEPPER": PEPPER, "NORIA_REDIS_URL": store.url}
        command = [sys.executable, "-m", "noria", "keys", "bootstrap", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout)["value"].startswith("sk-noria-admin-")
    assert "on disk" in done.stderr and "sk-noria-admin-" not in done.stderr


def test_another_pepper_is_noticed(noria, monkeypatch):
    noria("keys", "bootstrap")
    monkeypatch.setenv("NORIA_KEY_PEPPER", "another-" + PEPPER)
    code, said = noria("keys", "list")
    assert code == 2 and "pepper" in said and PEPPER not in said
