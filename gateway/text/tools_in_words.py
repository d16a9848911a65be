"""Tools for models whose chat template has no place for them: described in the system turn, with calls and their
results in the history as plain turns. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_WORDS = """You can call functions. Each line here describes one:
<tools>
{functions}
</tools>
Call a function only if it helps to answer. To call one, write its name and its arguments as JSON like this:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result then comes in the next message."""


def tools_in_words(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model has to know to call these functions."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return _WORDS.format(functions=lines)


def calls_in_words(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with calls and their results as text. Results of one turn's calls are one turn of the user: many
    templates want turns to alternate."""
    turns: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role = message.get("role")
        if role == "tool":
            text = f"<tool_response>\n{_text_of(message)}\n</tool_response>"
            if after_result:
                turns[-1]["content"] += "\n" + text
            else:
                turns.append({"role": "user", "content": text})
        elif role == "assistant" and message.get("tool_calls"):
            turns.append(_called(message))
        else:
            turns.append(dict(message))
        after_result = role == "tool"
    return turns


def with_instruction(messages: Sequence[Message], words: str, *, system_role: bool) -> list[dict[str, Any]]:
    """The messages with more words for the model, in the system turn; `system_role`: whether there can be one."""
    turns = [dict(message) for message in messages]
    if turns[0].get("role") in ("system", "developer"):
        turns[0]["content"] = f"{_text_of(turns[0])}\n\n{words}"
    elif not system_role and turns[0].get("role") == "user":
        turns[0]["content"] = f"{words}\n\n{_text_of(turns[0])}"
    else:
        turns.insert(0, {"role": "system" if system_role else "user", "content": words})
    return turns


def _called(message: Message) -> dict[str, Any]:
    text = _text_of(message)
    blocks = [text] if text else []
    for call in message["tool_calls"]:
        name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"] or "{}"
        blocks.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(blocks)}


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content or ())
