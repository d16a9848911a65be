"""`noria doctor`: what is wrong with this machine, its settings and its store, and what to do about it.

Knows how findings are gathered and shown; each kind of check has a file of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

Level = Literal["ok", "warn", "fail"]
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. `fail`: requests are refused, lost or computed nowhere; `warn`: slower or less safe than
    need be. Everything but `ok` has a cure."""

    check: str
    level: Level
    said: str
    cure: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(check: str, said: str) -> Finding:
    return Finding(check, "ok", said)


def warn(check: str, said: str, cure: str) -> Finding:
    return Finding(check, "warn", said, cure)


def fail(check: str, said: str, cure: str) -> Finding:
    return Finding(check, "fail", said, cure)


def doctor(checks: Iterable[Check], *, as_json: bool) -> int:
    """Run the checks and show what they found; 1 if something fails, else 0."""
    findings = list(_findings(checks))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2 if sys.stdout.isatty() else None))
    else:
        _show(findings)
    return int(any(finding.level == "fail" for finding in findings))


def _findings(checks: Iterable[Check]) -> Iterator[Finding]:
    for check in checks:
        yield from check()


def _show(findings: list[Finding]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(f"[{STYLES[finding.level]}]{finding.level}[/]", finding.check, _plain(finding.said))
        if finding.cure:
            table.add_row("", "", f"[bold]→ {_plain(finding.cure)}[/]")
    console.print(table)
    counts = {level: sum(finding.level == level for finding in findings) for level in STYLES}
    console.print(f"\n{counts['ok']} fine, {counts['warn']} to look at, {counts['fail']} to mend")


def _plain(text: str) -> str:
    """Without what the table would take for markup."""
    return text.replace("[", r"\[")
