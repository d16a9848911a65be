"""From a request of the Messages API to the question that the generation path answers.

The question is a chat's, under other names; errors come back under those of this API. Knows no HTTP.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from msgspec.structs import replace

from noria.gateway.chat_question import chat_question
from noria.gateway.errors import InvalidRequest
from noria.gateway.messages.turns import as_messages
from noria.gateway.model_directory import ServedModel
from noria.gateway.parsing import parsed
from noria.gateway.schemas.anthropic import (
    AnyChoice,
    AutoChoice,
    InputFields,
    MessagesRequest,
    NoChoice,
    ThinkingOff,
    ThinkingOn,
)
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.services import Question, Services
from noria.gateway.text.parsers.catalog import reasoning_format_of

_SAME_NAME = (
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "priority",
)

_RENAMED = (
    (re.compile(r"\bmessages(\[\d+\])?(\.\w+)*"), "messages"),
    (re.compile(r"\bresponse_format(\.json_schema)?(\.schema)?\b"), "output_config.format"),
    (re.compile(r"\breasoning_effort\b"), "thinking"),
    (re.compile(r"\btools(\[\d+\])\.function\.parameters\b"), r"tools\1.input_schema"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"\bparallel_tool_calls\b"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"(?<=')stop(?=')"), "stop_sequences"),
)


async def ask(services: Services, request: InputFields) -> Question:
    """Raises a `GatewayError` that names the offending field as this API does."""
    model = await services.directory.resolve(request.model)
    try:
        question = await chat_question(services, await parsed(ChatRequest, _chat(model, request)))
    except InvalidRequest as error:
        param = None if error.param is None else _own(error.param)
        raise type(error)(_own(error.message), param=param, code=error.code) from error
    params = [  # the engine names the field that a grammar came from, too
        each if each.grammar is None else replace(each, grammar=replace(each.grammar, param=_own(each.grammar.param)))
        for each in question.params
    ]
    return dataclasses.replace(question, params=params)


def _chat(model: ServedModel, request: InputFields) -> dict[str, Any]:
    messages = as_messages(request.system, request.messages)
    body: dict[str, Any] = {"model": request.model, "messages": messages, **_tools(request)}
    body["reasoning_effort"] = _effort(model, request)
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        body["continue_final_message"] = True  # its beginning was put into the model's mouth
    if request.output_config.format is not None:
        schema = {"name": "output", "schema": request.output_config.format.json_schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        body |= {name: getattr(request, name) for name in _SAME_NAME if name in request.model_fields_set}
        body["stop"] = request.stop_sequences
        body["user"] = request.metadata.user_id
    return body


def _tools(request: InputFields) -> dict[str, Any]:
    body: dict[str, Any] = {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in request.tools
        ]
    }
    choice = request.tool_choice
    if choice is None:
        return body
    if isinstance(choice, NoChoice):
        return {**body, "tool_choice": "none"}
    if isinstance(choice, AutoChoice):
        body["tool_choice"] = "auto"
    elif isinstance(choice, AnyChoice):
        body["tool_choice"] = "required"
    else:
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    return {**body, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _effort(model: ServedModel, request: InputFields) -> str | None:
    """How much the model is to think. Where nothing is said it does not, as at Anthropic, if it can be kept from it."""
    thinking, effort = request.thinking, request.output_config.effort
    if isinstance(thinking, ThinkingOff):
        return "none"
    if isinstance(thinking, ThinkingOn):
        return effort or "high"
    if thinking is None and effort is None and model.template is not None:
        source = model.template.source
        return "none" if "enable_thinking" in source and reasoning_format_of(source) == "think" else None
    return effort


def _own(text: str) -> str:
    """The text with this API's names of fields."""
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text
