"""Turns of content blocks as messages of a chat.

Pure. Knows no template and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from noria.gateway.schemas.anthropic_blocks import (
    AssistantTurn,
    DocumentBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)

Message = dict[str, Any]


def as_messages(system: str | Sequence[TextBlock] | None, turns: Sequence[Turn]) -> list[Message]:
    """Results of tools become messages of their own, where they stand. Neighbours of one role are one message, as
    Anthropic has it: most templates want roles to alternate."""
    messages: list[Message] = [{"role": "system", "content": _text(system)}] if system else []
    for turn in turns:
        made = [_of_assistant(turn)] if isinstance(turn, AssistantTurn) else _of_others(turn.role, turn.content)
        for message in made:
            if messages and messages[-1]["role"] == message["role"] != "tool":
                _join(messages[-1], message)
            else:
                messages.append(message)
    return messages


def _of_others(role: str, content: str | Sequence[TextBlock | DocumentBlock | ToolResultBlock]) -> Iterable[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    messages: list[Message] = []
    texts: list[TextBlock | DocumentBlock] = []
    for block in content:
        if isinstance(block, ToolResultBlock):
            if texts:
                messages.append({"role": role, "content": _text(texts)})
                texts = []
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        else:
            texts.append(block)
    return [*messages, {"role": role, "content": _text(texts)}] if texts or not messages else messages


def _of_assistant(turn: AssistantTurn) -> Message:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]
    message: Message = {"role": "assistant", "content": _text(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)  # with spaces, as models write it
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: ToolResultBlock) -> str:
    text = _text(block.content or "")
    return f"Error: {text}" if block.is_error else text


def _text(content: str | Iterable[TextBlock | DocumentBlock]) -> str:
    """Blocks are lines of one text."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text if isinstance(block, TextBlock) else _document(block) for block in content)


def _document(block: DocumentBlock) -> str:
    heads = [head for head in (block.title, block.context) if head]
    return "\n".join([*heads, block.source.data])


def _join(first: Message, second: Message) -> None:
    for name, text in second.items():
        if name in ("content", "reasoning_content"):
            first[name] = "\n".join(part for part in (first.get(name), text) if part) or text
        elif name == "tool_calls":
            first[name] = [*first.get(name, ()), *text]
