"""What a request says about calling functions: which there are, and which may or must be called.

The same for every endpoint that has tools; knows no endpoint's spelling of them, and no model.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters` is a JSON schema of an object (None: there are none). `strict`: its calls always fit it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters

    def shown(self) -> dict[str, Any]:
        """As templates expect a tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.schema
        return {"type": "function", "function": function}


class Choice(enum.StrEnum):
    """Whether functions are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"  # at least one is called
    NAMED = "named"  # the one that is callable is called


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions` are those that there are, `callable` the names of those that may be called now. `parallel` is None
    where the request does not say whether there may be several calls; `legacy`: asked for as `functions`."""

    functions: tuple[Function, ...]
    choice: Choice
    callable: tuple[str, ...]
    parallel: bool | None = None
    legacy: bool = False

    @property
    def forced(self) -> bool:
        return self.choice in (Choice.REQUIRED, Choice.NAMED)

    @property
    def callable_functions(self) -> list[Function]:
        return [function for function in self.functions if function.name in self.callable]

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """What the template is shown: nothing where nothing may be called."""
        return None if self.choice is Choice.NONE else [function.shown() for function in self.functions]

    def finish(self, ended: str) -> str:
        """The reason for the end of an answer with calls in it. A call by name ends as any answer does."""
        if ended != "stop" or self.choice is Choice.NAMED:
            return ended
        return "function_call" if self.legacy else "tool_calls"
