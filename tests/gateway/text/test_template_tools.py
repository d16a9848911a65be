"""Tools in prompts: as templates of several families want them, and in words where a template has no place for them."""

from __future__ import annotations

from typing import Any

import pytest

from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.text.chat_template import ChatTemplate, encode_chat

HERMES = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
AS_TEXT = """{% for tool in tools %}{{ tool.function.name }}{% endfor %}
{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls %}{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}
{% endfor %}"""
MISTRAL = """{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [{% for tool_call in m.tool_calls %}
{%- if tool_call.id | length != 9 %}{{ raise_exception("Tool call IDs should have a length of 9") }}{% endif %}
{{- tool_call.function | tojson }} {{ tool_call.id }}{% endfor %}]
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.tool_call_id }} {{ m.name }} {{ m.content }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)

TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Röm"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "sunny"},
]


def made(source: str, *, describe_tools: bool = True) -> ChatTemplate:
    files = TokenizerFiles("{}", source, "<s>", "</s>", False)
    return ChatTemplate(files, describe_tools=describe_tools)


def render(source: str, messages: list[dict[str, Any]] = TURNS, **more: Any) -> str:
    return made(source).render(messages, add_generation_prompt=False, **more)


def test_arguments_are_mappings_for_templates_that_print_json() -> None:
    assert made(HERMES).traits.tools and not made(HERMES).traits.text_arguments
    text = render(HERMES, tools=[TOOL])
    assert '"arguments": {"city": "Röm"}' in text and '"description": "d"' in text
    assert "sunny" in text


def test_arguments_stay_text_for_templates_that_join_strings() -> None:
    assert made(AS_TEXT).traits.text_arguments
    assert '<call>weather{"city": "Röm"}' in render(AS_TEXT, tools=[TOOL])


def test_mistral_gets_ids_of_nine_characters_and_the_results_name() -> None:
    assert made(MISTRAL).traits.short_ids
    text = render(MISTRAL, tools=[TOOL])
    called = text.split("}} ", 1)[1].split("]")[0]
    assert len(called) == 9 and called.isalnum()
    assert f"[TOOL_RESULTS] {called} weather sunny" in text
    kept = [{**TURNS[1], "tool_calls": [{**CALL, "id": "abc123XYZ"}]}]
    assert "abc123XYZ" in render(MISTRAL, [TURNS[0], *kept])


def test_without_a_place_for_tools_they_are_told_in_the_system_turn() -> None:
    text = render(PLAIN, tools=[TOOL])
    system, user, assistant, result = text.split("<|im_end|>\n")[:4]
    assert system.startswith("<|im_start|>system\n") and '"name": "weather"' in system and "<tool_call>" in system
    assert user == "<|im_start|>user\nWeather?"
    assert assistant == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>'
    )
    assert result == "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>"


def test_a_system_turn_that_is_there_is_kept() -> None:
    text = render(PLAIN, [{"role": "system", "content": "Be kind."}, *TURNS], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert text.count("<|im_start|>system") == 1


def test_without_a_system_role_the_first_user_turn_has_the_words() -> None:
    text = render(NO_SYSTEM, tools=[TOOL])
    assert text.startswith("user: You can call functions.") and "Weather?" in text.split("assistant:")[0]


def test_results_of_one_turn_are_one_turn() -> None:
    turns = [*TURNS, {"role": "tool", "tool_call_id": "other", "content": "rainy"}, {"role": "user", "content": "So?"}]
    text = render(PLAIN, turns)
    assert text.count("<|im_start|>user") == 3
    assert "sunny\n</tool_response>\n<tool_response>\nrainy" in text


def test_an_operator_who_names_the_format_tells_the_model_himself() -> None:
    assert "weather" not in made(PLAIN, describe_tools=False).render(TURNS[:1], tools=[TOOL])


@pytest.mark.parametrize("spelled", ["<|im_end|>", "<|im_start|>system"])
def test_control_tokens_spelled_in_tools_calls_and_results_stay_text(
    tokenizer: Tokenizer, files: TokenizerFiles, spelled: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": spelled, "parameters": {"x": spelled}}}
    call = {"id": "1", "type": "function", "function": {"name": spelled, "arguments": f'{{"a": "{spelled}"}}'}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": spelled, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": spelled},
    ]
    ids = encode_chat(tokenizer, ChatTemplate(files), turns, tools=[tool])
    starts, ends = (tokenizer.control_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
    assert (ids.count(starts), ids.count(ends)) == (5, 4)
