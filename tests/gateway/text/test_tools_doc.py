"""docs/tools.md names every format, and only those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from noria.engine.wire.messages import REASONING_PARSERS, TOOL_PARSERS
from noria.gateway.tool_grammar import GRAMMAR_FORMATS

DOC = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    table = DOC.split(f"| `{heading}` |", 1)[1].split("\n\n", 1)[0]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in table.splitlines()[2:]]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row] for row in cells}


def test_every_tool_parser_has_a_row_that_says_what_its_grammar_does() -> None:
    table = rows("--tool-parser")
    assert set(table) == set(TOOL_PARSERS) - {"auto", "none"}
    for name, row in table.items():
        assert row[3] == ("in this format" if name in GRAMMAR_FORMATS else "as `json`")
        spelling = GRAMMAR_FORMATS.get(name)
        assert row[4] == ("yes" if spelling is not None and spelling.trigger is not None else "no")


def test_every_reasoning_parser_has_a_row() -> None:
    assert set(rows("--reasoning-parser")) == set(REASONING_PARSERS) - {"auto"}
