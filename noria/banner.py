"""What a person sees of `noria serve`: the loading bar, the children's lines, and the text once it is ready.

Knows how to draw, not when.
"""

from __future__ import annotations

import json
import sys
from typing import Protocol

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from noria.version import __version__

STYLES = {"store": "magenta", "engine": "cyan", "gateway": "green", "noria": "bold"}


class Screen(Protocol):
    """Where `noria serve` writes to."""

    def say(self, line: str) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


class Terminal:
    """A terminal: a loading bar at the bottom, and above it the children's lines, each with its origin."""

    def __init__(self, console: Console, model: str) -> None:
        self._console = console
        self._model = model
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def say(self, line: str) -> None:
        self.show("noria", line)

    def show(self, origin: str, line: str) -> None:
        """One line of a child's log."""
        prefix = Text(f"{origin:>7} | ", style=STYLES.get(origin, ""))
        self._console.print(prefix + Text(line), soft_wrap=True)

    def progress(self, line: str) -> None:
        """One line `{"done": bytes, "total": bytes}` of a loading engine."""
        try:
            record = json.loads(line)
            done, total = int(record["done"]), int(record["total"])
        except (ValueError, KeyError, TypeError):
            return  # a line cut short by the engine's death
        if self._bar is None:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn(f"Loading {self._model}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                console=self._console,
                auto_refresh=False,  # a drawing thread would be alive while children are forked
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("load", total=total)
        self._bar.update(self._task, completed=done, total=total)
        if done >= total:
            self.close()

    def tick(self) -> None:
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class LogLines:
    """No terminal: the supervisor's lines go through the log, and the children write their own."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("noria.supervisor")

    def say(self, line: str) -> None:
        self._log.warning(line)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


def ready_text(base_url: str, model: str, key: str | None, key_file: str, admin_key: str | None = None) -> str:
    """The text printed once requests can be answered. `key` is None for one that the user gave: it is not repeated.
    `admin_key` is what there is to say of the admin key; None: nothing."""
    admin = f"\n  Admin key  {admin_key}" if admin_key else ""
    shown = key or "YOUR_KEY"
    origin = f"{key}   (kept in {key_file})" if key else "as given"
    question = "What is the capital of France?"
    return f"""
Noria {__version__} serves {model}

  Base URL   {base_url}
  API key    {origin}{admin}

curl {base_url}/chat/completions \\
  -H "Authorization: Bearer {shown}" -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{question}"}}],
       "temperature": 0, "max_tokens": 64}}'

from openai import OpenAI

client = OpenAI(base_url="{base_url}", api_key="{shown}")
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "{question}"}}],
    temperature=0,
    max_tokens=64,
)
print(answer.choices[0].message.content)
"""


def open_screen(model: str) -> Terminal | LogLines:
    """A Terminal when standard error is one, else LogLines."""
    return Terminal(Console(stderr=True, highlight=False), model) if sys.stderr.isatty() else LogLines()
