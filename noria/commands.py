"""The commands of `noria`: their options, their words in `--help`, and which room does the work.

Here and in `cli` imports stand inside functions: each command loads what it needs, and `--version` loads nothing.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from noria.supervisor import EXIT_CONFIGURATION

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="Alias, local folder (safetensors), GGUF file, or hub id.", show_default=False
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the embedded store's file and of the generated key. (default: ~/.local/state/noria)",
        rich_help_panel="Serve",
    ),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="Use this store; without it an embedded one is started. (NORIA_REDIS_URL)", rich_help_panel="Serve"
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings as TOML, beneath options and environment. (NORIA_CONFIG)"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Keys that are let in, comma-separated; without any, one is generated and kept. (NORIA_API_KEY)",
        rich_help_panel="Serve",
    ),
]


def serve(
    model: ModelArgument = None,
    redis_url: RedisUrl = None,
    api_key: ApiKey = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    **given: Any,
) -> int:
    """Serve a model: store, engine and gateway in one command, until Ctrl-C."""
    _read_settings_from(config)
    from noria.engine.config import EngineConfig
    from noria.gateway.config import GatewaySettings
    from noria.options import build

    chosen = _given(model=model, redis_url=redis_url, api_key=api_key, **given)
    for settings in (EngineConfig, GatewaySettings):
        build(settings, chosen)  # a bad value is told before the slow imports
    from noria.serve import CannotStart, serve

    try:
        return serve(chosen, state_dir)
    except CannotStart as error:
        fail(str(error), error.code)


def gateway(config: ConfigFile = None, **given: Any) -> int:
    """Run a gateway alone; engines serve it through the same store."""
    _read_settings_from(config)
    from noria.gateway.config import GatewaySettings
    from noria.options import build

    chosen = _given(**given)
    settings = build(GatewaySettings, chosen)
    with _uncollected():
        from noria.gateway.server import run

    return run(settings, lambda: build(GatewaySettings, chosen))


def engine(model: ModelArgument = None, config: ConfigFile = None, **given: Any) -> int:
    """Run an engine alone; gateways reach it through the same store."""
    _read_settings_from(config)
    from noria.engine.config import EngineConfig
    from noria.options import build

    settings = build(EngineConfig, _given(model=model, **given))
    with _uncollected():
        from noria.engine.server import run

    return run(settings)


def queue(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[dead list|show ID|requeue ID|drop ID]", help="Dead letters.", show_default=False),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="The store; else that of the noria serve that runs here. (NORIA_REDIS_URL)"),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State folder of the noria serve to look at.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show what waits, who runs it, and what was given up; manage dead letters."""
    from noria.queue import queue_command
    from noria.store_address import CannotShow

    try:
        return queue_command(words or [], redis_url, state_dir, as_json=json)
    except CannotShow as error:
        fail(str(error), error.code)


def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML: organizations, projects, keys, prices.")],
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Archive projects and revoke keys that the file does not name.")
    ] = False,
    redis_url: Annotated[
        str | None,
        typer.Option(help="The store; else that of the noria serve that runs here. (NORIA_REDIS_URL)"),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State folder of the noria serve to act on.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and do not ask.")] = False,
) -> int:
    """Make tenants what a file declares: plan, show, apply."""
    from noria.apply import apply_command

    return apply_command(
        file, only_plan=plan, yes=yes, prune=prune, as_json=json, redis_url=redis_url, state_dir=state_dir
    )


def doctor(
    model: ModelArgument = None,
    redis_url: Annotated[
        str | None, typer.Option(help="The store; else that of the noria serve that runs here. (NORIA_REDIS_URL)")
    ] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Look for what is wrong with settings, store, model and machine, and say what to do about it."""
    _read_settings_from(config)
    from noria.doctor import doctor
    from noria.doctor_checks import EngineCheck, all_checks

    engine_check: EngineCheck | None = None
    with contextlib.suppress(ModuleNotFoundError):  # an installation of the gateway alone
        from noria.engine_checks import check_engine

        engine_check = check_engine
    return doctor(all_checks(_given(model=model, redis_url=redis_url), state_dir, engine_check), as_json=json)


def config(
    word: Annotated[Literal["check", "show"], typer.Argument(help="check: is it sound; show: what it comes to.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Settings as TOML. (NORIA_CONFIG)", show_default=False)
    ] = None,
) -> int:
    """Check a configuration file, or show what it and the environment come to."""
    _read_settings_from(file)
    from noria.config_file import check, show

    return check() if word == "check" else show()


def top(
    redis_url: Annotated[
        str | None, typer.Option(help="The store; else that of the noria serve that runs here. (NORIA_REDIS_URL)")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State folder of the noria serve to look at.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one look, after one interval, and end.")] = False,
) -> int:
    """Watch models, queues, engines and tenants live, until Ctrl-C."""
    from noria.store_address import CannotShow, store_url
    from noria.top import top

    try:
        return top(store_url(redis_url, state_dir), interval, once=once)
    except CannotShow as error:
        fail(str(error), error.code)


def models(
    action: Annotated[str, typer.Argument(help="list, or inspect MODEL.")] = "list",
    model: Annotated[str, typer.Argument(help="Alias, folder, GGUF file or hub id.", show_default=False)] = "",
    memory: Annotated[
        str, typer.Option(help="How much there is for weights and KV, like 8GiB; default: what is free here.")
    ] = "",
) -> None:
    """List the models that lie on this machine, or inspect one: size, memory, and how it is computed."""
    from noria.engine.models.errors import ModelError
    from noria.model_report import inspect_table, model_table
    from noria.tables import console

    if action not in ("list", "inspect") or (action == "inspect") != bool(model):
        fail("noria models [list], or noria models inspect MODEL", EXIT_CONFIGURATION)
    try:
        table = inspect_table(model, memory) if model else model_table()
    except (ModelError, ValueError) as error:
        fail(str(error), EXIT_CONFIGURATION)
    console().print(table)


def bench(**given: Any) -> int:
    """Measure a server under load: throughput, first token, between tokens."""
    from noria.bench import bench_command

    return bench_command(**given)


def simulate(**given: Any) -> int:
    """Compare the scheduling policies on a simulated engine: latency against load."""
    from noria.simulate import simulate_command

    return simulate_command(**given)


def trace(**given: Any) -> int:
    """Show an engine's iteration log: who was in the batch, and what iterations took."""
    from noria.trace import trace_command

    return trace_command(**given)


OWN_OPTIONS = frozenset({"model", "redis_url", "redis_password", "api_key", "progress_fd"})
"""Fields that `serve` words itself, that no command line should show, or that are between it and its children."""


def _serve_parameters() -> list[inspect.Parameter]:
    from noria.engine.config import EngineConfig
    from noria.gateway.config import GatewaySettings
    from noria.options import Panel, parameters

    return parameters(Panel("Gateway", GatewaySettings, OWN_OPTIONS), Panel("Engine", EngineConfig, OWN_OPTIONS))


def _gateway_parameters() -> list[inspect.Parameter]:
    from noria.gateway.config import GatewaySettings
    from noria.options import Panel, parameters

    return parameters(Panel("Gateway", GatewaySettings, frozenset({"redis_password"})))


def _engine_parameters() -> list[inspect.Parameter]:
    from noria.engine.config import EngineConfig
    from noria.options import Panel, parameters

    return parameters(Panel("Engine", EngineConfig, frozenset({"model", "redis_password", "progress_fd"})))


def _bench_parameters() -> list[inspect.Parameter]:
    from noria.bench import bench_command

    return list(inspect.signature(bench_command, eval_str=True).parameters.values())


def _simulate_parameters() -> list[inspect.Parameter]:
    from noria.simulate import simulate_command

    return list(inspect.signature(simulate_command, eval_str=True).parameters.values())


def _trace_parameters() -> list[inspect.Parameter]:
    from noria.trace import trace_command

    return list(inspect.signature(trace_command, eval_str=True).parameters.values())


COMMANDS: dict[Callable[..., int | None], Callable[[], list[inspect.Parameter]] | None] = {
    serve: _serve_parameters,
    gateway: _gateway_parameters,
    engine: _engine_parameters,
    queue: None,
    doctor: None,
    config: None,
    top: None,
    models: None,
    apply: None,
    bench: _bench_parameters,
    simulate: _simulate_parameters,
    trace: _trace_parameters,
}
"""Each command, and how to find the options that it takes from settings classes."""


GROUPS = {
    "orgs": "Organizations.",
    "projects": "Projects of an organization.",
    "keys": "API keys of projects, and the first admin key.",
    "limits": "Limits of organizations, projects and keys.",
    "usage": "What was used, and the ledger of requests.",
}
"""Commands with commands of their own, which stand in `noria.tenants` and `noria.usage`."""


def _read_settings_from(config: Path | None) -> None:
    """Told through the environment, so that the children of `serve` read the same file."""
    if config is not None:
        os.environ["NORIA_CONFIG"] = str(config.expanduser().absolute())


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Imports make some hundred thousand objects that stay: looking for garbage among them, now and ever after, would
    take a tenth of the start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and the exit code."""
    print(f"noria: {message}", file=sys.stderr)
    sys.exit(code)
