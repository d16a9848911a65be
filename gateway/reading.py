"""How the answers of one model are read: which parser takes them apart, which grammar holds the calls in them.

Knows no endpoint and no prompt but for whether it ends inside thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from noria.engine.wire.messages import Grammar, ModelCard
from noria.gateway.errors import UnsupportedParameter
from noria.gateway.model_directory import ServedModel
from noria.gateway.text.chat_template import ChatTemplate
from noria.gateway.text.parsers.catalog import TOOL_FORMATS, ParserPlan, reasoning_format_of, tool_format_of
from noria.gateway.tool_grammar import (
    GRAMMAR_FORMATS,
    content_grammar,
    either_grammar,
    forced_grammar,
    free_grammar,
)
from noria.gateway.tools import Choice, Tools


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read: `parser` is None where they are text and nothing else."""

    parser: ParserPlan | None = None
    grammar: Grammar | None = None

    def spelled(self, control: Mapping[str, int]) -> frozenset[int]:
        """Ids of the control tokens that the parser has to see."""
        markers = () if self.parser is None else self.parser.markers
        return frozenset(control[marker] for marker in markers if marker in control)


def reading(model: ServedModel, tools: Tools | None, content: Grammar | None, *, opened: bool) -> Reading:
    """How to read a model's answers. `content` is what the client wants their text to match; `opened`: the prompt ends
    inside thoughts. Raises UnsupportedParameter where the model's calls are not read."""
    card, template, control = model.card, model.template, model.tokenizer.control_tokens
    if template is None:
        return Reading(grammar=content)
    thoughts = reasoning_format_of(template.source) if card.reasoning_parser == "auto" else card.reasoning_parser
    if tools is None or tools.choice is Choice.NONE:
        held = content and content_grammar(content, opened=opened if thoughts == "think" else None)
        return Reading(None if thoughts == "none" else ParserPlan(thoughts, opened), held)
    form = _tool_format(card, template)
    param = "functions" if tools.legacy else "tools"
    schemas = {function.name: function.schema for function in tools.callable_functions}
    bound = form in GRAMMAR_FORMATS and not any(marker in control for marker in TOOL_FORMATS[form].markers)
    one = tools.choice is Choice.NAMED or tools.parallel is False
    inside = opened if thoughts == "think" else None
    if not tools.forced:
        plan = ParserPlan(thoughts, opened, form, schemas, 1 if one else None)
        return Reading(plan, _free(form, tools, content, param, many=not one, bound=bound, opened=inside))
    if not bound or not template.traits.tools:
        form = "json"  # short, and any model can be held to it
    if thoughts == "harmony":
        thoughts = "none"
    # A model that was never taught to call functions does not know either when it has called enough.
    one = one or (tools.parallel is None and not template.traits.tools)
    grammar = forced_grammar(
        form,
        tools.callable_functions,
        many=not one,
        opened=None if thoughts == "none" else opened,
        param=param,
    )
    return Reading(ParserPlan(thoughts, opened, form, schemas, 1 if one else None), grammar)


def _free(
    form: str,
    tools: Tools,
    content: Grammar | None,
    param: str,
    *,
    many: bool,
    bound: bool,
    opened: bool | None,
) -> Grammar | None:
    """What holds a model that may call or not."""
    functions = tools.callable_functions
    if content is None:
        return free_grammar(form, functions, many=many, param=param) if bound else None
    if not bound:  # such calls are no text to a grammar: what the text must be goes before
        return content_grammar(content, opened=opened)
    calls = forced_grammar(form, functions, many=many, opened=None, param=param)
    return either_grammar(content, calls, opened=opened)


def _tool_format(card: ModelCard, template: ChatTemplate) -> str:
    if card.tool_parser == "none":
        raise UnsupportedParameter(f"The calls of the model '{card.id}' are not read by this server.", param="tools")
    if card.tool_parser != "auto":
        return card.tool_parser
    if not template.traits.tools:
        return "hermes"  # the words in which it is told of its tools
    return tool_format_of(template.source) or "json"
