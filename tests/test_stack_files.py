"""docker-compose.yml and what lies around it agree with each other and with the settings that they set."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from noria.engine.config import EngineConfig
from noria.gateway.config import GatewaySettings
from noria.gateway.tenancy.credentials import MIN_PEPPER
from noria.options import variables

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "docker-compose.yml"
OWN_IMAGES = ("gateway", "engine", "front")


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def test_every_variable_that_is_set_is_read(services: dict[str, dict[str, Any]]) -> None:
    known = variables(GatewaySettings) | variables(EngineConfig)
    given = {name for service in services.values() for name in service.get("environment", {})}
    for line in re.findall(r"^ENV (.+)$", (ROOT / "Dockerfile").read_text(), re.M):
        given |= set(re.findall(r"([A-Z_]+)=", line))
    ours = {name for name in given if name.startswith("NORIA_")}
    assert len(ours) > 10
    assert {name for name in ours if name.removesuffix("_FILE") not in known} == set()


def test_every_variable_that_may_be_given_is_in_the_example() -> None:
    example = set(re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M))
    asked = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE.read_text()))
    unnamed = {name for name in asked - example if not re.search(r"_IMAGE$|GPU|PROMETHEUS|GRAFANA", name)}
    assert not unnamed
    assert example <= asked


def test_every_service_is_hardened(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["restart"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for port in service.get("ports", []):
            assert re.match(r"\$\{NORIA_BIND:-127\.0\.0\.1\}|127\.0\.0\.1:", port), (name, port)


def test_containers_have_longer_to_stop_than_programs_take(services: dict[str, dict[str, Any]]) -> None:
    def stop(name: str) -> int:
        return int(services[name]["stop_grace_period"].removesuffix("s"))

    assert stop("engine") >= EngineConfig.model_fields["drain_timeout"].default + 15
    assert stop("gateway") >= GatewaySettings.model_fields["shutdown_timeout"].default + 15
    assert stop("front") >= GatewaySettings.model_fields["shutdown_timeout"].default


def test_services_of_ours_are_built_from_this_checkout(services: dict[str, dict[str, Any]]) -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.M))
    for name, service in services.items():
        ours = name.split("-")[0] in OWN_IMAGES
        assert ours == ("build" in service)
        if ours:
            assert service["build"]["context"] == "." and service["build"]["target"] in stages
        else:
            assert re.search(r"docker\.io/[a-z/]+:[a-z0-9.-]+\}$", service["image"]), "a public image with a tag"


def test_every_file_that_is_copied_or_mounted_exists(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).is_dir()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    kept = [
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for path in " ".join(copied).split():
        assert (ROOT / path).exists()
        assert any(path == place or path.startswith(f"{place}/") for place in kept), f".dockerignore leaves {path} out"


def test_secrets_are_made_once_and_kept(services: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    command = [ROOT / "deploy" / "make-secrets", folder]
    subprocess.run(command, check=True, capture_output=True)
    declared = yaml.safe_load(COMPOSE.read_text())["secrets"]
    assert {Path(secret["file"]).name for secret in declared.values()} == set(os.listdir(folder))
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert all(len(text) > 32 for text in before.values()) and before["api_key"].startswith("sk-noria-")
    assert folder.stat().st_mode & 0o777 == 0o700
    subprocess.run(command, check=True, capture_output=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    assert len(before["key_pepper"].strip()) > MIN_PEPPER
    used = {name for service in services.values() for name in service.get("secrets", [])}
    assert used == set(declared)


@pytest.mark.parametrize("chosen", [None, ""])
def test_gateways_have_stored_keys_unless_told_not_to(
    services: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    subprocess.run([ROOT / "deploy" / "make-secrets", tmp_path], check=True, capture_output=True)
    variable, given = "NORIA_KEY_PEPPER_FILE", services["gateway"]["environment"]["NORIA_KEY_PEPPER_FILE"]
    default = re.fullmatch(r"\$\{NORIA_KEY_PEPPER_FILE-/run/secrets/(\w+)\}", given)
    assert default and default[1] in services["gateway"]["secrets"]
    monkeypatch.setenv(variable, str(tmp_path / default[1]) if chosen is None else chosen)
    assert (GatewaySettings().pepper is None) == (chosen == "")
