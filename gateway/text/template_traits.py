"""What a chat template can take, found out by rendering probes with it once, when the model becomes known.

Knows no model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from noria.gateway.text.template_input import TemplateError, Traits

_WORD, _KEY, _VALUE = "noria-probe", "noria_key", "noria_value"

Render = Callable[[Mapping[str, Any]], str]
"""The template on these variables; raises TemplateError where it refuses them."""


def traits_of(source: str, render: Render) -> Traits:
    parts = [{"type": "text", "text": _WORD}]
    content_parts = not _shows(render, [_user(_WORD)]) and _shows(render, [_user(parts)])
    hello = _user([{"type": "text", "text": "hello"}] if content_parts else "hello")
    word = parts if content_parts else _WORD
    tools = _shows(render, [hello], tools=[_tool()])
    as_object = _shows_arguments(render, hello, {_KEY: _VALUE})
    as_text = not as_object and _shows_arguments(render, hello, f'{{"{_KEY}": "{_VALUE}"}}')
    return Traits(
        developer_role="developer" in source,
        system_role=_shows(render, [{"role": "system", "content": word}, hello]),
        content_parts=content_parts,
        tools=tools,
        calls=as_object or as_text,
        text_arguments=as_text,
        short_ids="9" in source and "tool_call.id" in source and "length" in source,
    )


def _shows(render: Render, messages: list[dict[str, Any]], **more: Any) -> bool:
    try:
        return _WORD in render({"messages": messages, "add_generation_prompt": True, **more})
    except TemplateError:
        return False


def _shows_arguments(render: Render, hello: dict[str, Any], arguments: Any) -> bool:
    call = {"id": "abcdef123", "type": "function", "function": {"name": _WORD, "arguments": arguments}}
    turns = [hello, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = render({"messages": turns, "tools": [_tool()], "add_generation_prompt": False})
    except TemplateError:
        return False
    # Python's spelling of a dict, and JSON in a JSON string, are not what the model was taught.
    return _KEY in text and _VALUE in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _tool() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
    return {"type": "function", "function": {"name": _WORD, "description": "probe", "parameters": schema}}
