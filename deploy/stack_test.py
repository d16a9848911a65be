"""`make stack-test`: builds the images, brings docker-compose.yml up for real, breaks parts of it, and tears it down.

COMPOSE   "docker compose" or "podman-compose" (default: whichever is here)
BUILD     what takes a tag and docker build's arguments   (default: "docker build -t" or "podman build -t")
TORCH_INDEX, DEMO_MODEL   as in .env.example
--no-build takes the images that are there; --keep leaves everything up.

Knows the stack from outside: containers, the public API, and `noria queue` inside a gateway.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).parents[1]
PROJECT = "noria-stack-test"
TARGETS = ("gateway", "engine", "front")
MODEL = "smollm2-135m-instruct"
MIB = 2**20
GATEWAY_ADDS, GATEWAY_RESIDENT = 200, 150  # MiB at most
AT_REST = 15  # seconds after it was ready
# Long enough that somebody can look who runs it, and kill them, before it ends.
LONG = {"prompt": "Once upon a time", "max_tokens": 1200, "temperature": 0, "extra_body": {"ignore_eos": True}}


def say(line: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {line}", flush=True)


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def eventually(what: str, holds: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            sys.exit(f"not within {seconds:g} s: {what}\n{logs()}")
        time.sleep(0.3)


# --- containers ------------------------------------------------------------------------------------------------------


def compose(*words: str) -> str:
    return run(*COMPOSE, "-p", PROJECT, *words)


def containers(service: str = "") -> list[str]:
    """Ids of a service's running containers, or of all."""
    label = "label=com.docker.compose."
    found = ("--filter", f"{label}project={PROJECT}")
    found += ("--filter", f"{label}service={service}") if service else ()
    return run(DOCKER, "ps", "--quiet", *found).split()


def inside(container: str, *command: str, check: bool = True) -> str:
    return run(DOCKER, "exec", container, *command, check=check)


def page(container: str, url: str) -> str:
    """What a page says to its own container."""
    program = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=5).read().decode())"
    return inside(container, "python", "-c", program, check=False)


def logs() -> str:
    """The last lines of every container, standard error included."""
    found = []
    for container in containers():
        done = subprocess.run(
            [DOCKER, "logs", "--tail", "8", container], env=ENVIRONMENT, capture_output=True, text=True
        )
        found.append(f"== {container}\n{done.stdout}{done.stderr}")
    return "\n".join(found)


def image_size(tag: str) -> float:
    return int(run(DOCKER, "image", "inspect", "--format", "{{.Size}}", tag)) / MIB


def build() -> None:
    arguments = [f"--build-arg={name}={ENVIRONMENT[name]}" for name in ("TORCH_INDEX", "DEMO_MODEL")]
    for target in TARGETS:
        run(*BUILD, f"noria-{target}:latest", "--target", target, *arguments, ".")
    text = (ROOT / "Dockerfile").read_text()
    base = image_size(next(line.partition("=")[2] for line in text.splitlines() if line.startswith("ARG PYTHON_IMAGE")))
    for target in TARGETS:
        size = image_size(f"noria-{target}:latest")
        say(f"image noria-{target}: {size:.0f} MiB, {size - base:.0f} MiB over its base")
        assert target != "gateway" or size - base <= GATEWAY_ADDS


def resident(container: str) -> float:
    """MiB of the container's first process."""
    status = inside(container, "cat", "/proc/1/status")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def check_hardening() -> None:
    """Nobody is root, no root file system can be written to, and nothing was written outside volumes and tmpfs."""
    for service in ("redis", "gateway", "engine", "front"):
        (container,) = containers(service)
        assert inside(container, "id", "-u") != "0", service
        assert inside(container, "sh", "-c", "touch /opt/x /x 2>&1 || true").count("Read-only file system") == 2, (
            service
        )
        changed = [line for line in run(DOCKER, "diff", container).splitlines() if line.split()[0] != "C"]
        # Mount points are made when a container starts; what programs write would be something else.
        assert all(line.split()[1].startswith(("/run", "/etc", "/data", "/tmp", "/models")) for line in changed), (
            changed
        )
        tools = inside(container, "sh", "-c", "command -v cc gcc make ld; true")
        assert not tools, (service, tools)
    say("nobody is root, file systems are read-only, no build tools")


def check_inventory() -> None:
    """Each image of ours lists what is in it; the gateway's has no torch."""
    for service in ("gateway", "engine"):
        told = json.loads(inside(containers(service)[0], "cat", "/opt/noria/sbom.cdx.json"))
        names = {component["name"].lower() for component in told["components"]}
        assert {"noria", "redis", "fastapi"} <= names and ("torch" in names) == (service == "engine"), names
    say("both images list their packages")


def check_health() -> None:
    """The images' own health checks, run by hand: some hosts have no timers for them."""
    (gateway,), (engine,) = containers("gateway"), containers("engine")
    inside(gateway, "python", "-m", "noria.probe", "http://127.0.0.1:8000/healthz")
    inside(engine, "python", "-m", "noria.probe", "http://127.0.0.1:9100/livez")
    assert "noria_engine_iterations_total{" in page(engine, "http://127.0.0.1:9100/metrics")
    assert "noria_engines{" in page(gateway, "http://127.0.0.1:9100/metrics")
    for container in (gateway, engine):
        findings = json.loads(inside(container, "noria", "doctor", "--json"))
        assert {"store", "store durability", "clock"} <= {f["check"] for f in findings if f["level"] == "ok"}, findings
    say("health checks pass, pages of figures are there, noria doctor finds nothing to mend in either container")


def check_tenants() -> None:
    """Stored keys are there: the first admin key from within, a project and a key over it, and a request with that."""
    (gateway,) = containers("gateway")
    admin = inside(gateway, "noria", "keys", "bootstrap").split()[-1]
    project = json.loads(inside(gateway, "noria", "projects", "create", "stack", "--json"))["id"]
    key = inside(gateway, "noria", "keys", "create", "ci", "--project", project).split()[-1]
    assert text_of(openai.OpenAI(base_url=f"{ORIGIN}/v1", api_key=key, timeout=300, max_retries=0))
    usage = httpx.get(f"{ORIGIN}/v1/organization/projects", headers={"Authorization": f"Bearer {admin}"}, timeout=30)
    assert project in usage.text, usage.text
    say("an admin key, a project and its key were made; the key is answered")


# --- the API ---------------------------------------------------------------------------------------------------------


def ready() -> bool:
    try:
        return httpx.get(f"{ORIGIN}/readyz", timeout=3).status_code == 200
    except httpx.HTTPError:
        return False


def smoke(client: openai.OpenAI) -> None:
    """A chat, streamed and not, what lies beside it, and what must be refused."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": question, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole and "".join(pieces) == whole and len(pieces) > 4, (whole, pieces)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert len(client.embeddings.create(model=MODEL, input="water").data[0].embedding) > 100
    assert client.responses.create(model=MODEL, input="Hello", max_output_tokens=16).output_text
    assert httpx.get(f"{ORIGIN}/v1/models").status_code == 401
    assert httpx.get(f"{ORIGIN}/metrics").status_code == 404
    say(f"chat, stream, embeddings, responses through the openai SDK: {whole!r}")


def text_of(client: openai.OpenAI, on_piece: Callable[[int], None] = lambda _: None) -> str:
    """The long greedy completion, streamed; `on_piece` is told how many pieces there are."""
    text = ""
    for count, chunk in enumerate(client.completions.create(model=MODEL, stream=True, **LONG), 1):
        text += chunk.choices[0].text if chunk.choices else ""
        on_piece(count)
    return text


def pool() -> dict[str, Any]:
    """The model's pool as `noria queue` in a gateway shows it."""
    found = json.loads(inside(containers("gateway")[0], "noria", "queue", "--json", check=False) or "[]")
    return found[0] if found else {"engines": [], "depth": {}}


def live_engines() -> list[dict[str, Any]]:
    return [engine for engine in pool()["engines"] if engine["lease_seconds"] > 0]


def kill_an_engine_in_mid_stream(client: openai.OpenAI, expected: str) -> None:
    killed: list[str] = []

    def on_piece(count: int) -> None:
        if count == 20:
            holder = next(engine["engine"] for engine in live_engines() if engine["held"])
            victim = next(c for c in containers("engine") if holder in page(c, "http://127.0.0.1:9100/readyz"))
            run(DOCKER, "kill", "--signal", "KILL", victim)
            killed.append(victim)

    text = text_of(client, on_piece)
    assert killed and killed[0] not in containers("engine")
    assert text == expected, f"{text!r}\nis not\n{expected!r}"
    say(f"an engine was killed after 20 pieces of a stream; the text went on, the same {len(text)} characters")


def restart_redis_under_a_queue(client: openai.OpenAI, expected: str) -> None:
    """Requests that wait while every engine stands still are answered after the store was away."""
    for container in containers("engine"):
        run(DOCKER, "kill", "--signal", "STOP", container)
    texts: list[str] = []
    askers = [threading.Thread(target=lambda: texts.append(text_of(client))) for _ in range(3)]
    for asker in askers:
        asker.start()
    eventually("three wait", lambda: sum(pool()["depth"].values()) == 3, 20)
    time.sleep(1.5)  # the append-only file is synchronised every second
    run(DOCKER, "restart", *containers("redis"))
    eventually("the store is back with its queue", lambda: sum(pool()["depth"].values()) == 3, 60)
    for container in containers("engine"):
        run(DOCKER, "kill", "--signal", "CONT", container)
    for asker in askers:
        asker.join(180)
    assert texts == [expected] * 3, texts
    say("Redis was restarted under three waiting requests; all were answered, with the same text")


def main() -> None:
    say(f"{shlex.join(COMPOSE)}, {shlex.join(BUILD)}")
    run("deploy/make-secrets")
    if "--no-build" not in sys.argv:
        build()
    try:
        compose("up", "-d")
        eventually("ready", ready, 300)
        (gateway,) = containers("gateway")
        say(f"ready; the gateway has {resident(gateway):.0f} MiB resident")
        time.sleep(AT_REST)
        at_rest = resident(gateway)
        say(f"at rest it has {at_rest:.0f} MiB")
        assert at_rest < GATEWAY_RESIDENT
        key = (ROOT / "secrets" / "api_key").read_text().strip()
        client = openai.OpenAI(base_url=f"{ORIGIN}/v1", api_key=key, timeout=300, max_retries=0)
        smoke(client)
        check_health()
        check_tenants()
        check_hardening()
        check_inventory()
        say(f"after that it has {resident(gateway):.0f} MiB, the engine {resident(*containers('engine')):.0f} MiB")
        expected = text_of(client)
        ENVIRONMENT.update(NORIA_GATEWAYS="2", NORIA_ENGINES="2")
        compose("up", "-d")
        eventually("two of each", lambda: len(containers("gateway")) == 2 and len(live_engines()) == 2)
        eventually("ready", ready)
        say("two gateways, two engines")
        kill_an_engine_in_mid_stream(client, expected)
        restart_redis_under_a_queue(client, expected)
    finally:
        if "--keep" not in sys.argv:
            compose("down", "-v")
    assert "--keep" in sys.argv or not containers()
    say("torn down; all is well")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _compose_command() -> list[str]:
    if given := os.environ.get("COMPOSE"):
        return shlex.split(given)
    docker = (
        shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    )
    return ["docker", "compose"] if docker else ["podman-compose"]


if __name__ == "__main__":
    STARTED = time.monotonic()
    COMPOSE = _compose_command()
    DOCKER = "docker" if "docker" in COMPOSE[0] and "podman" not in COMPOSE[0] else "podman"
    BUILD = shlex.split(os.environ.get("BUILD", f"{DOCKER} build -t"))
    PORT = _free_port()
    ORIGIN = f"http://127.0.0.1:{PORT}"
    ENVIRONMENT = {"TORCH_INDEX": "https://download.pytorch.org/whl/cpu", **os.environ}
    ENVIRONMENT |= {"NORIA_PORT": str(PORT), "NORIA_MODEL": MODEL, "DEMO_MODEL": "1"}
    main()
