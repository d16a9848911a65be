"""deploy/kubernetes agrees with itself, with the settings, and with Kubernetes' schemas where their package is here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from noria.engine.config import EngineConfig
from noria.gateway.config import GatewaySettings
from noria.options import variables

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
Thing = dict[str, Any]


def manifests() -> list[tuple[str, Thing]]:
    found = []
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            place = str(path.relative_to(KUBERNETES))
            found += [(place, document) for document in yaml.safe_load_all(path.read_text())]
    return found


THINGS = manifests()


def of_kind(*kinds: str) -> list[Thing]:
    return [thing for place, thing in THINGS if thing["kind"] in kinds and place.startswith("base/")]


def names() -> set[str]:
    return {f"{thing['kind']}/{thing['metadata']['name']}" for _, thing in THINGS}


def test_kustomizations_name_files_that_exist() -> None:
    for path in (*KUBERNETES.rglob("kustomization.yaml"), ROOT / "deploy" / "redis" / "kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text())
        mentioned = [
            *kustomization.get("resources", []),
            *(patch["path"] for patch in kustomization.get("patches", [])),
        ]
        mentioned += [name for made in kustomization.get("configMapGenerator", []) for name in made.get("files", [])]
        for name in mentioned:
            target = path.parent / name
            assert (target / "kustomization.yaml" if target.is_dir() else target).is_file(), (path, name)
        beside = {found.name for found in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert beside <= set(mentioned), f"{path.parent}: not part of anything"


def test_every_variable_that_is_set_is_read() -> None:
    known = variables(GatewaySettings) | variables(EngineConfig)
    text = "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    set_here = set(re.findall(r"(?:- |name: )(NORIA_[A-Z_]+)", text))
    assert len(set_here) > 4
    for name in set_here:
        assert name.removesuffix("_FILE") in known, name


@pytest.mark.parametrize("thing", of_kind("Deployment", "StatefulSet"), ids=lambda thing: thing["metadata"]["name"])
def test_a_workload_is_hardened_selected_and_has_time_to_stop(thing: Thing) -> None:
    spec = thing["spec"]["template"]["spec"]
    assert thing["spec"]["selector"]["matchLabels"] == thing["spec"]["template"]["metadata"]["labels"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] >= 45
    mounts = {volume["name"] for volume in spec["volumes"]}
    mounts |= {claim["metadata"]["name"] for claim in thing["spec"].get("volumeClaimTemplates", [])}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == mounts
        assert container["readinessProbe"] and container["livenessProbe"] and container["resources"]["limits"]["memory"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in ports
                assert probe["httpGet"]["path"] in ("/healthz", "/livez", "/readyz")
        annotations = thing["spec"]["template"]["metadata"].get("annotations", {})
        assert "prometheus.io/port" not in annotations or int(annotations["prometheus.io/port"]) in ports.values()


def test_what_selects_finds_a_workload_and_what_scales_exists() -> None:
    labels = [thing["spec"]["template"]["metadata"]["labels"] for thing in of_kind("Deployment", "StatefulSet")]
    for thing in of_kind("Service", "PodDisruptionBudget", "NetworkPolicy"):
        selector = thing["spec"].get("selector") or thing["spec"]["podSelector"]
        assert selector.get("matchLabels", selector) in labels, thing["metadata"]["name"]
    for place, thing in THINGS:
        if thing["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = thing["spec"]["scaleTargetRef"]
            assert f"{target.get('kind', 'Deployment')}/{target['name']}" in names(), place
    for thing in of_kind("PodDisruptionBudget"):
        workload = next(t for t in of_kind("Deployment") if t["metadata"]["name"] == thing["metadata"]["name"])
        assert workload["spec"]["replicas"] > thing["spec"]["minAvailable"], "nothing could ever be moved"


def test_patches_change_what_the_base_has() -> None:
    for place, thing in THINGS:
        if place.startswith("overlays/") and thing["kind"] != "ScaledObject":
            base = next(t for t in of_kind(thing["kind"]) if t["metadata"]["name"] == thing["metadata"]["name"])
            patched = [container["name"] for container in thing["spec"]["template"]["spec"]["containers"]]
            assert patched == [container["name"] for container in base["spec"]["template"]["spec"]["containers"]]


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_kubernetes_knows_every_field(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for place, thing in THINGS:
        if thing["kind"] != "ScaledObject" and place.startswith("base/"):  # a kind of KEDA's; and whole things only
            kubernetes_validate.validate(thing, version, strict=True)
