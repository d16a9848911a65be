"""The pages: every link leads somewhere, what is made is current, and what docs/security.md claims has its proof."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from noria.gateway.config import GatewaySettings
from noria.settings_page import page

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(path: Path) -> str:
    return _FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings."""
    titles = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in _LINK.findall(text_of(path)):
        name, _, anchor = target.partition("#")
        if "://" in name or name.startswith("mailto:"):
            continue
        found = (path.parent / name) if name else path
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            broken.append(target)
        if path.parent.name == "docs" and not found.resolve().is_relative_to(ROOT / "docs"):
            broken.append(f"{target}: not on the site")
    assert not broken


def test_the_site_has_every_page() -> None:
    found = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert found == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    program = shutil.which("mkdocs", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("mkdocs is not installed: make docs brings it")
    build = [program, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "configuration.html").exists()


def test_the_configuration_page_is_current() -> None:
    told = (ROOT / "docs" / "configuration.md").read_text()
    assert told == page(), "run: python -m noria.settings_page > docs/configuration.md"


def test_claims_of_safety_have_a_proof() -> None:
    table = text_of(ROOT / "docs" / "security.md").split("## What is held")[1].split("## What is not")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "shown by" not in line]
    assert len(rows) > 20
    missing = []
    for row in rows:
        proofs = re.findall(r"`([^`]+)`", row.split(" | ")[-1])
        if not proofs:
            missing.append(row)
        for proof in proofs:
            name, _, test = proof.partition("::")
            if name.startswith("tests/"):
                path = ROOT / name
                if not path.exists() or (test and f"def {test}(" not in path.read_text()):
                    missing.append(proof)
            elif name not in GatewaySettings.model_fields and name != "cache_group":
                missing.append(proof)
    assert not missing


def _imports(folder: str) -> set[str]:
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_gateway_calls_nobody() -> None:
    """No client of HTTP is imported, so no request can make it fetch anything."""
    clients = {"httpx", "requests", "aiohttp", "urllib.request", "urllib3", "http.client", "ftplib", "smtplib"}
    assert not _imports("gateway") & clients


def test_nothing_is_unpickled() -> None:
    for folder in ("gateway", "engine", "kernels"):
        assert not _imports(folder) & {"pickle", "cPickle", "dill", "shelve", "marshal", "torch.load", "joblib"}
        for path in (ROOT / folder).rglob("*.py"):
            assert "torch.load(" not in path.read_text(), path


def test_templates_of_issues_are_forms() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"] and form["body"]
