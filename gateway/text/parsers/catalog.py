"""Which format a model writes its calls and thoughts in: by name, or told from its chat template.

Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.gateway.text.parsers import bare_json, deepseek, harmony, mistral, pythonic, qwen_xml, tagged_json, thinking
from noria.gateway.text.parsers.stream import Steps, StepsParser, TextStream
from noria.gateway.text.pieces import OutputParser

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of the functions that may be called, by name."""

Reader = Callable[[TextStream, Schemas], Steps[None]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`markers` are spellings that may be control tokens and must then be seen; `signs`: a template with one of these
    in it writes this format."""

    read: Reader
    markers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()


def _plain(read: Callable[[TextStream], Steps[None]]) -> Reader:
    return lambda stream, schemas: read(stream)


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "harmony": ToolFormat(
        _plain(harmony.harmony),
        (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, *harmony.ENDS),
        ("<|channel|>",),
    ),
    "deepseek": ToolFormat(
        _plain(deepseek.deepseek),
        (deepseek.ALL_OPEN, deepseek.ALL_CLOSE, deepseek.OPEN, deepseek.SEPARATOR, deepseek.CLOSE),
        (deepseek.OPEN,),
    ),
    "mistral": ToolFormat(_plain(mistral.mistral), (mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID), (mistral.OPEN,)),
    "qwen_xml": ToolFormat(qwen_xml.qwen_xml, (qwen_xml.OPEN, qwen_xml.CLOSE), ("<function=",)),
    "hermes": ToolFormat(_plain(tagged_json.tagged_json), (tagged_json.OPEN, tagged_json.CLOSE), (tagged_json.OPEN,)),
    "pythonic": ToolFormat(_plain(pythonic.pythonic), (pythonic.PYTHON_TAG,), ("func_name1(",)),
    "llama": ToolFormat(
        _plain(bare_json.llama_json), (bare_json.PYTHON_TAG,), (bare_json.PYTHON_TAG, '"parameters": dictionary of')
    ),
    "json": ToolFormat(_plain(bare_json.bare_json)),
}
"""By name, in the order in which a template is looked at."""

THINKING_MARKERS: Mapping[str, tuple[str, ...]] = {
    "think": (thinking.OPEN, thinking.CLOSE),
    "harmony": TOOL_FORMATS["harmony"].markers,
    "none": (),
}


def tool_format_of(template: str | None) -> str | None:
    """The name of the format that a template writes calls in, None where it writes none that is known."""
    return next((n for n, f in TOOL_FORMATS.items() if any(sign in (template or "") for sign in f.signs)), None)


def reasoning_format_of(template: str | None) -> str:
    if template is None:
        return "none"
    if harmony.CHANNEL in template:
        return "harmony"
    return "think" if thinking.CLOSE in template else "none"


@dataclass(frozen=True, slots=True)
class ParserPlan:
    """What parses the choices of one request. `tools` is the name of a format or None where no call is looked for;
    `opened`: the prompt ends inside thoughts."""

    reasoning: str = "none"
    opened: bool = False
    tools: str | None = None
    schemas: Schemas = field(default_factory=dict)
    max_calls: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Spellings that the parser has to see, be they control tokens or not."""
        tools = TOOL_FORMATS[self.tools].markers if self.tools else ()
        return (*THINKING_MARKERS[self.reasoning], *tools)

    def __call__(self, seed: str) -> OutputParser:
        stream = TextStream(seed, frozenset(self.schemas))
        return StepsParser(stream, self._steps(stream), self.max_calls)

    def _steps(self, stream: TextStream) -> Steps[None]:
        if self.reasoning == "harmony":  # its thoughts and calls are one format
            yield from harmony.harmony(stream)
            return
        if self.reasoning == "think":
            yield from thinking.thinking(stream, opened=self.opened)
        if self.tools is not None:
            yield from TOOL_FORMATS[self.tools].read(stream, self.schemas)
