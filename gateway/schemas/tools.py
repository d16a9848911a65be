"""Tools as chat completions spell them: functions, which of them may or must be called, and the older `functions`.

Knows no model and no format of calls.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.strict import FIRST_FAULT, Strict, at_most, deeper_than, only_kinds
from noria.gateway.tools import Choice, Function, Tools

MAX_TOOLS = 128
MAX_DEPTH = 48
"""Levels of a function's parameters: a chat template takes no more than 64 of a whole request."""

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionSpec(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        kind = None if value is None else value.get("type", "object")
        if value is not None and kind != "object":
            shown = {"kind": repr(kind)[:64]}
            raise PydanticCustomError("parameters", "the schema must be of type 'object', got type {kind}", shown)
        if deeper_than(value, MAX_DEPTH):
            raise PydanticCustomError("parameters", "the schema is nested more than {most} deep", {"most": MAX_DEPTH})
        return value

    def function(self) -> Function:
        return Function(self.name, self.description, self.parameters, self.strict)


FUNCTIONS_ONLY = only_kinds(
    "function", error="tool_kind", message="tools of type '{kind}' are not supported: only functions are"
)


class FunctionTool(Strict):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedChoice, FUNCTIONS_ONLY]], FIRST_FAULT, at_most(MAX_TOOLS)]


class AllowedToolsChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_KNOWN_CHOICE = only_kinds(
    "function", "allowed_tools", error="tool_kind", message="'{kind}' is not supported: only functions are"
)
Tool = Annotated[FunctionTool, FUNCTIONS_ONLY]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedChoice | AllowedToolsChoice, Field(discriminator="type")],
    _KNOWN_CHOICE,
]
ToolList = Annotated[list[Tool], FIRST_FAULT, at_most(MAX_TOOLS)]
FunctionList = Annotated[list[FunctionSpec], FIRST_FAULT, at_most(MAX_TOOLS)]
FunctionChoice = Literal["none", "auto"] | NamedFunction


def chosen_tools(tools: list[FunctionTool], choice: ToolChoice | None, parallel: bool | None) -> Tools | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` say together; None without tools. Raises ValueError with
    the field and what is wrong with it."""
    if not tools:
        for name, given in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
            if given is not None and given != "none":
                raise Mismatch(name, f"'{name}' is only allowed when 'tools' are specified")
        return None
    functions = tuple(tool.function.function() for tool in tools)
    _refuse_duplicates(functions, "tools[{}].function.name")
    if isinstance(choice, NamedChoice):
        _require_known(functions, choice.function.name, "tool_choice.function.name")
        return Tools(functions, Choice.NAMED, (choice.function.name,), parallel)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        names = tuple(dict.fromkeys(tool.function.name for tool in allowed.tools))
        for place, name in enumerate(names):
            _require_known(functions, name, f"tool_choice.allowed_tools.tools[{place}].function.name")
        if not names:
            raise Mismatch("tool_choice.allowed_tools.tools", "there must be at least one allowed tool")
        return Tools(functions, Choice(allowed.mode), names, parallel)
    return Tools(functions, Choice(choice or "auto"), tuple(f.name for f in functions), parallel)


def chosen_functions(functions: list[FunctionSpec], choice: FunctionChoice | None) -> Tools | None:
    """The same for the older `functions` and `function_call`: one call at most."""
    if not functions:
        if choice is not None and choice != "none":
            raise Mismatch("function_call", "'function_call' is only allowed when 'functions' are specified")
        return None
    known = tuple(function.function() for function in functions)
    _refuse_duplicates(known, "functions[{}].name")
    if isinstance(choice, NamedFunction):
        _require_known(known, choice.name, "function_call.name")
        return Tools(known, Choice.NAMED, (choice.name,), False, legacy=True)
    return Tools(known, Choice(choice or "auto"), tuple(f.name for f in known), False, legacy=True)


class Mismatch(ValueError):
    """Fields that are fine alone but not together."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _refuse_duplicates(functions: tuple[Function, ...], param: str) -> None:
    seen: set[str] = set()
    for place, function in enumerate(functions):
        if function.name in seen:
            raise Mismatch(param.format(place), f"there are two functions with the name '{function.name}'")
        seen.add(function.name)


def _require_known(functions: tuple[Function, ...], name: str, param: str) -> None:
    if all(function.name != name for function in functions):
        raise Mismatch(param, f"there is no function with the name {name[:64]!r}")
