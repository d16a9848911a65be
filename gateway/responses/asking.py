"""From a request of the Responses API and what it builds on to the question that the generation path answers.

The question is a chat's, under other names; errors come back under those of this API. Knows no store.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from noria.gateway.chat_question import answer_reading, chat_question
from noria.gateway.choice import TextOptions
from noria.gateway.errors import ContextLengthExceeded, InvalidRequest
from noria.gateway.model_directory import ServedModel
from noria.gateway.parsing import parsed
from noria.gateway.prompts import chat_prompt
from noria.gateway.responses.items import as_messages
from noria.gateway.responses.parts import Shown
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.responses import AllowedTools, InputFields, JsonSchemaFormat, NamedFunction, ResponseRequest
from noria.gateway.services import Question, Services

_SAME_NAME = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p",
    "repetition_penalty", "priority", "service_tier", "prompt_cache_key", "safety_identifier", "user",
)  # fmt: skip

_ROOM = 64
"""Tokens that a shortened input leaves for the answer, if it can, where the request does not say how many it wants."""

_RENAMED = (
    (re.compile(r"\bmessages(\[\d+\])?(\.\w+)*"), "input"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"(?<!text\.)\bverbosity\b"), "text.verbosity"),
)


async def ask(
    services: Services, request: InputFields, items: Sequence[Shown], files: Mapping[str, str] | None = None
) -> Question:
    """The question after `items`, which may name `files`. With `truncation` "auto" the oldest are left out until the
    rest fits, but never the last. Raises a `GatewayError` that names the offending field as this API does."""
    all_thoughts = request.reasoning is not None and request.reasoning.context == "all_turns"
    messages = as_messages(items, all_thoughts=all_thoughts, files=files)
    most = len(messages) - 1

    async def attempt(dropped: int) -> Question:
        question = _with_own_names(await chat_question(services, await _chat(request, _without(messages, dropped))))
        if 0 < dropped < most and question.params[0].max_tokens < _ROOM:
            raise ContextLengthExceeded("There is no room for an answer.", param="input")
        return question

    try:
        try:
            return await attempt(0)
        except ContextLengthExceeded:
            if request.truncation != "auto" or most < 1:
                raise
        return await _shortened(attempt, most)
    except InvalidRequest as error:
        raise _renamed(error) from error


async def reading(services: Services, request: InputFields, model_id: str) -> tuple[ServedModel, TextOptions]:
    """How an answer to this request is read from its tokens. Raises a `GatewayError` where the model is not known."""
    model = await services.directory.resolve(model_id)
    chat = await _chat(request, [{"role": "user", "content": ""}])
    _, options = answer_reading(model, chat, await chat_prompt(model, chat))
    return model, options


async def _shortened(attempt: Callable[[int], Awaitable[Question]], most: int) -> Question:
    """The question with as few messages dropped as fits, found by halving: every try encodes what is left."""
    best = await attempt(most)
    fewest_that_fit, most_that_do_not = most, 0
    while fewest_that_fit - most_that_do_not > 1:
        middle = (fewest_that_fit + most_that_do_not) // 2
        try:
            best, fewest_that_fit = await attempt(middle), middle
        except ContextLengthExceeded:
            most_that_do_not = middle
    return best


def _without(messages: Sequence[dict[str, Any]], dropped: int) -> Sequence[dict[str, Any]]:
    """Without the first `dropped` messages, and without the outputs of calls among them."""
    rest = messages[dropped:]
    calls = {call["id"] for message in rest for call in message.get("tool_calls", ())}
    return [message for message in rest if message["role"] != "tool" or message["tool_call_id"] in calls]


async def _chat(request: InputFields, messages: Sequence[dict[str, Any]]) -> ChatRequest:
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    body: dict[str, Any] = {"model": request.model, "messages": list(messages), **_tools(request), **_text(request)}
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if isinstance(request, ResponseRequest):
        body |= {name: getattr(request, name) for name in _SAME_NAME if name in request.model_fields_set}
        body["max_completion_tokens"] = 1 if request.prewarm else request.max_output_tokens
        if request.with_logprobs:
            body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return await parsed(ChatRequest, body)


def _tools(request: InputFields) -> dict[str, Any]:
    if not request.tools:
        return {} if request.tool_choice in ("auto", "none") else {"tool_choice": _choice(request)}
    tools = [
        {
            "type": "function",
            "function": tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True),
        }
        for tool in request.tools
    ]
    # Only what the client says itself: a model that was never taught to call functions then stops after one.
    parallel = request.parallel_tool_calls if "parallel_tool_calls" in request.model_fields_set else None
    return {"tools": tools, "tool_choice": _choice(request), "parallel_tool_calls": parallel}


def _choice(request: InputFields) -> Any:
    choice = request.tool_choice
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedTools):
        allowed = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
    return choice


def _text(request: InputFields) -> dict[str, Any]:
    given = request.text.format
    body: dict[str, Any] = {} if request.text.verbosity is None else {"verbosity": request.text.verbosity}
    if isinstance(given, JsonSchemaFormat):
        schema = given.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif given.type != "text":
        body["response_format"] = {"type": given.type}
    return body


def _with_own_names(question: Question) -> Question:
    """The engine names the field that a grammar came from, too."""
    params = [
        each if each.grammar is None else replace(each, grammar=replace(each.grammar, param=_own(each.grammar.param)))
        for each in question.params
    ]
    return dataclasses.replace(question, params=params)


def _renamed(error: InvalidRequest) -> InvalidRequest:
    param = None if error.param is None else _own(error.param)
    return type(error)(_own(error.message), param=param, code=error.code)


def _own(text: str) -> str:
    """The text with this API's names of fields."""
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text
