"""How much a model is to think and to say: `reasoning_effort` and `verbosity`, by whatever means its template has.

Knows no model's name.
"""

from __future__ import annotations

from typing import Any

from noria.gateway.errors import InvalidRequest
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.text.chat_template import ChatTemplate
from noria.gateway.text.parsers.catalog import reasoning_format_of
from noria.gateway.text.tools_in_words import with_instruction

_VERBOSITY = {
    "low": "Keep your answers as short as they can be.",
    "high": "Give long and detailed answers.",
}  # "medium" is how a model talks anyway


def effort_variables(template: ChatTemplate, request: ChatRequest) -> dict[str, Any]:
    """Variables for the template. A model that does not think at all takes every effort. Raises `InvalidRequest` where
    thinking cannot be switched off."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    if "reasoning_effort" in template.source:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template.source:
        return {"enable_thinking": effort != "none"}
    if effort == "none" and reasoning_format_of(template.source) != "none":
        message = "Invalid 'reasoning_effort': this model always thinks before it answers."
        raise InvalidRequest(message, param="reasoning_effort", code="unsupported_value")
    return {}


def with_verbosity(template: ChatTemplate, request: ChatRequest) -> list[dict[str, Any]]:
    """The messages for the template, with an instruction where more or fewer words are wanted than usual."""
    messages = request.template_messages()
    words = _VERBOSITY.get(request.verbosity or "")
    if words is None:
        return messages
    return with_instruction(messages, words, system_role=template.traits.system_role)
