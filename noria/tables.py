"""Tables as the commands print them: plain columns, on a terminal as wide as it is.

Knows nothing of what they show.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table


def console(*, stderr: bool = False) -> Console:
    """Piped, each row is one line for the next program, however long."""
    to = sys.stderr if stderr else sys.stdout
    return Console(width=None if to.isatty() else 1000, highlight=False, stderr=stderr)


def columns(*headings: str, numbers: Collection[str] = ()) -> Table:
    """An empty table. Columns named in `numbers` are aligned right."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading in numbers else "left")
    return table
