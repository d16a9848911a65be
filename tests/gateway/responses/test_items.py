"""Items as messages of a chat, files and compactions."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from noria.gateway.errors import InvalidRequest
from noria.gateway.responses import ids
from noria.gateway.responses.items import MAX_FILE_BYTES, as_messages, compacted, file_text, opened


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def call(n: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{n}", "name": f"f{n}", "arguments": "{}"}


def output(n: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{n}", "output": [{"type": "input_text", "text": f"r{n}"}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_calls_join_the_assistants_turn() -> None:
    items = [
        message("user", "hi"),
        message("assistant", "Let me see."),
        call(1),
        call(2),
        output(1),
        output(2),
        call(3),
    ]
    messages = as_messages(items)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1]["content"] == "Let me see." and [c["id"] for c in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "r1"}
    assert messages[4]["content"] is None and len(messages[4]["tool_calls"]) == 1


def test_an_output_needs_its_call() -> None:
    with pytest.raises(InvalidRequest, match="c1"):
        as_messages([message("user", "hi"), output(1)])


def test_thoughts_of_earlier_turns_are_seen_on_request() -> None:
    items = [
        message("user", "a"),
        thought("old"),
        message("assistant", "b"),
        message("user", "c"),
        thought("new"),
        call(1),
    ]
    thoughts = [m.get("reasoning_content") for m in as_messages(items) if m["role"] == "assistant"]
    assert thoughts == [None, "new"]
    thoughts = [m.get("reasoning_content") for m in as_messages(items, all_thoughts=True) if m["role"] == "assistant"]
    assert thoughts == ["old", "new"]


@pytest.mark.parametrize("wrapped", ["{}", "data:text/plain;base64,{}"])
def test_a_text_file_is_read(wrapped: str) -> None:
    assert file_text(wrapped.format(base64.b64encode("größe".encode()).decode()), "input") == "größe"


@pytest.mark.parametrize("data", ["not base64!", base64.b64encode(b"\xff\xfe\x00").decode(), "A" * 2 * MAX_FILE_BYTES])
def test_what_is_no_text_file_is_refused(data: str) -> None:
    with pytest.raises(InvalidRequest):
        file_text(data, "input")


def test_a_compaction_opens_again() -> None:
    assert opened(compacted("So far: ö")) == "So far: ö"
    for forged in ("", "noria-1.", "noria-1.AAAA", "other", compacted("x")[:-4]):
        with pytest.raises(InvalidRequest):
            opened(forged)


def test_an_items_id_names_its_response() -> None:
    group = ids.new_group()
    made = {ids.input_item(group, "message", 3), ids.output_item(group, "message", 3)}
    assert len(made) == 2 and {ids.response_of(one) for one in made} == {f"resp_{group}"}
    assert ids.response_of("msg_abc") is None
