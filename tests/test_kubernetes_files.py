"""deploy/kubernetes agrees with itself, with the settings, and with Kubernetes' schemas where their package is here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from noria.engine.config import EngineConfig
from noria.engine.wire.nodes import parse_nodes
from noria.gateway.config import GatewaySettings
from noria.options import variables

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
Thing = dict[str, Any]


def documents(folder: Path, names: list[str]) -> list[Thing]:
    files = [folder / name for name in names if name.endswith(".yaml")]
    return [document for path in files for document in yaml.safe_load_all(path.read_text())]


def name_of(thing: Thing) -> str:
    return f"{thing['kind']}/{thing['metadata']['name']}"


def merged(base: Any, patch: Any) -> Any:
    """As Kustomize's strategic merge does with what our patches use: lists of things with a name by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base[key], value) if key in base else value for key, value in patch.items()}
    if isinstance(patch, list) and all(isinstance(item, dict) and "name" in item for item in [*patch, *base]):
        return list(merged({item["name"]: item for item in base}, {item["name"]: item for item in patch}).values())
    return patch


def rendered(folder: Path) -> list[Thing]:
    """What comes of a kustomization: of what it is based on, patched, and of its own."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    resources = kustomization.get("resources", [])
    things = [thing for name in resources if (folder / name).is_dir() for thing in rendered(folder / name)]
    for patch in documents(folder, [patch["path"] for patch in kustomization.get("patches", [])]):
        (place,) = [place for place, thing in enumerate(things) if name_of(thing) == name_of(patch)]
        things[place] = merged(things[place], patch)
    return things + documents(folder, resources)


KUSTOMIZATIONS = [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]
RENDERED = {folder.name: rendered(folder) for folder in KUSTOMIZATIONS}
every_kustomization = pytest.mark.parametrize("things", RENDERED.values(), ids=RENDERED)


def of_kind(things: list[Thing], *kinds: str) -> list[Thing]:
    return [thing for thing in things if thing["kind"] in kinds]


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


@every_kustomization
def test_workloads_are_hardened_selected_and_have_time_to_stop(things: list[Thing]) -> None:
    for thing in of_kind(things, "Deployment", "StatefulSet", "Job"):
        pod = thing["spec"]["template"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["seccompProfile"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        if thing["kind"] != "Job":
            assert thing["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
            assert pod["spec"]["terminationGracePeriodSeconds"] >= 45
        mounts = {volume["name"] for volume in pod["spec"]["volumes"]}
        mounts |= {claim["metadata"]["name"] for claim in thing["spec"].get("volumeClaimTemplates", [])}
        for container in pod["spec"]["containers"]:
            check_container(container, mounts)
            if thing["kind"] != "Job":
                check_probes(container)
        ports = {
            port["containerPort"] for container in pod["spec"]["containers"] for port in container.get("ports", [])
        }
        annotations = pod["metadata"].get("annotations", {})
        assert "prometheus.io/port" not in annotations or int(annotations["prometheus.io/port"]) in ports


def check_container(container: Thing, mounts: set[str]) -> None:
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == mounts
    assert container["resources"]["limits"]["memory"]
    for word in container.get("command", []):
        if word.startswith("/etc/noria/"):
            script = ROOT / "deploy" / "redis" / Path(word).name
            packed = yaml.safe_load(script.with_name("kustomization.yaml").read_text())["configMapGenerator"][0][
                "files"
            ]
            assert script.is_file() and script.name in packed


def check_probes(container: Thing) -> None:
    ports = {port["name"] for port in container["ports"]}
    for probe in (container["readinessProbe"], container["livenessProbe"]):
        if "httpGet" in probe:
            assert probe["httpGet"]["path"] in ("/healthz", "/livez", "/readyz")
        for way in ("httpGet", "tcpSocket"):
            assert way not in probe or probe[way]["port"] in ports


@every_kustomization
def test_what_selects_finds_a_workload_and_what_scales_exists(things: list[Thing]) -> None:
    workloads = of_kind(things, "Deployment", "StatefulSet")
    labels = [thing["spec"]["template"]["metadata"]["labels"] for thing in workloads]
    for thing in of_kind(things, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        selector = thing["spec"].get("selector") or thing["spec"]["podSelector"]
        assert selector.get("matchLabels", selector) in labels, thing["metadata"]["name"]
    for thing in of_kind(things, "HorizontalPodAutoscaler", "ScaledObject"):
        target = thing["spec"]["scaleTargetRef"]
        assert f"{target.get('kind', 'Deployment')}/{target['name']}" in map(name_of, things)
    for thing in of_kind(things, "PodDisruptionBudget"):
        workload = next(t for t in workloads if t["metadata"]["name"] == thing["metadata"]["name"])
        must_stay = thing["spec"].get("minAvailable", 0)
        assert workload["spec"]["replicas"] > must_stay, "nothing could ever be moved"


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_the_address_of_several_redis_names_pods_that_there_are(kind: str) -> None:
    folder = KUBERNETES / "overlays" / kind
    (made,) = yaml.safe_load((folder / "kustomization.yaml").read_text())["configMapGenerator"]
    nodes = parse_nodes(made["literals"][0].removeprefix("NORIA_REDIS_URL="))
    (redis,) = of_kind(RENDERED[kind], "StatefulSet")
    (service,) = [
        t for t in of_kind(RENDERED[kind], "Service") if t["metadata"]["name"] == redis["spec"]["serviceName"]
    ]
    ports = {port["port"] for port in service["spec"]["ports"]}
    pods = {f"noria-redis-{number}.{redis['spec']['serviceName']}" for number in range(redis["spec"]["replicas"])}
    assert nodes is not None and nodes.kind == kind
    assert {host for host, _ in nodes.hosts} <= pods and {port for _, port in nodes.hosts} <= ports
    assert (
        kind == "cluster" or f"sentinel monitor {nodes.name} " in (ROOT / "deploy/redis/start-sentinel.sh").read_text()
    )


@pytest.mark.parametrize("version", ["1.29", "1.33"])
@every_kustomization
def test_kubernetes_knows_every_field(things: list[Thing], version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make manifests brings it")
    for thing in things:
        if thing["kind"] != "ScaledObject":  # a kind of KEDA's
            kubernetes_validate.validate(thing, version, strict=True)
