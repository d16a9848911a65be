"""Chat templates: rendering as `transformers` does, control tokens from the template alone, clear errors.

Knows the demo model's template and small ones written here.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.text.chat_template import ChatTemplate, TemplateError, encode_chat

USER = {"role": "user", "content": "Hi"}


def _template(source: str | None, **names: Any) -> ChatTemplate:
    files = TokenizerFiles("{}", source, "<s>", "</s>", False, names)
    return ChatTemplate(files, max_rendered=100_000, max_seconds=0.2)


@pytest.fixture(scope="module")
def template(files: TokenizerFiles) -> ChatTemplate:
    return ChatTemplate(files)


@pytest.fixture(scope="module")
def library(files: TokenizerFiles) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(files.tokenizer_json)


_texts = st.one_of(st.text(max_size=30), st.text("<|im_endstar>s \n1", max_size=30))
_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": _texts}),
    min_size=1,
    max_size=4,
)


@given(_messages, st.booleans())
def test_equals_the_plain_encoding_where_nothing_is_spelled(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    library: tokenizers.Tokenizer,
    messages: list[dict[str, str]],
    add: bool,
) -> None:
    spelled = [s for s in tokenizer.control_tokens for m in messages if s in m["content"]]
    text = template.render(messages, add_generation_prompt=add)
    ids = encode_chat(tokenizer, template, messages, add_generation_prompt=add)
    assert tokenizer.decode(ids) == tokenizer.decode(library.encode(text).ids) or spelled
    if not spelled:
        assert ids == library.encode(text, add_special_tokens=False).ids


@given(_messages, st.booleans())
def test_renders_as_transformers_does(
    files: TokenizerFiles, template: ChatTemplate, messages: list[dict[str, str]], add: bool
) -> None:
    (expected,), _ = render_jinja_template([messages], chat_template=files.chat_template, add_generation_prompt=add)
    assert template.render(messages, add_generation_prompt=add) == expected


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|", "im_end|>", "\n", "system", "<|endoftext|>"])))
def test_typed_control_tokens_stay_text(tokenizer: Tokenizer, template: ChatTemplate, words: list[str]) -> None:
    typed = "".join(words)
    ids = encode_chat(tokenizer, template, [{"role": "system", "content": ""}, {"role": "user", "content": typed}])
    assert [i for i in ids if i in tokenizer.control_tokens.values()] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids) == f"system\n\nuser\n{typed}\nassistant\n"


def test_typed_control_tokens_stay_text_wherever_they_come_in(tokenizer: Tokenizer) -> None:
    template = _template(
        "{{ '<|im_start|>' }}{% for t in tools %}{{ t | tojson }}{{ t | tojson(ensure_ascii=True) }}"
        "{{ t.name }}{{ t.end }}"
        "{% endfor %}{% for m in messages %}{{ m.role ~ m.name ~ (m.content | trim | upper | lower) }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson(indent=2) }}{% endfor %}{% endfor %}{{ extra }}"
    )
    bad = "<|im_end|>"
    call = {"type": "function", "function": {"name": bad, "arguments": '{"<|im_end|>": "<|im_start|>"}'}}
    messages = [{"role": bad, "name": "<|im_", "content": "end|>" + bad, "tool_calls": [call]}]
    tools = [{"name": "<|im_end", "end": "|>", bad: [bad]}]
    ids = encode_chat(tokenizer, template, messages, tools=tools, extra=bad)
    assert [i for i in ids if i in tokenizer.control_tokens.values()] == [1]
    assert tokenizer.decode(ids) == template.render(messages, tools=tools, extra=bad).removeprefix("<|im_start|>")


def test_roles_may_be_part_of_a_control_token(tokenizer: Tokenizer) -> None:
    template = _template("{% for m in messages %}{{ '<|im_' + m.part + '|>' + m.role }}{% endfor %}")
    assert encode_chat(tokenizer, template, [USER | {"part": "end"}])[0] == 2


def test_guard_characters_in_the_input_are_kept(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    typed = "\ufdd0<|im_end|>\ufdd1<\ufdd2|im_end|>"
    ids = encode_chat(tokenizer, template, [{"role": "user", "content": typed}], add_generation_prompt=False)
    assert tokenizer.decode(ids).endswith(f"user\n{typed}\n")
    everything = "".join(chr((plane << 16) + low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF))
    everything += "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(TemplateError, match="noncharacters"):
        template.render([{"role": "user", "content": everything}])


@pytest.mark.parametrize("content", [None, [], ""])
def test_no_content_is_empty_content(template: ChatTemplate, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}, {"role": "tool", "content": "7"}]
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n7<|im_end|>" in template.render(messages)
    assert "assistant\n<|im_end|>" in template.render([{"role": "assistant"}])


def test_text_parts_mean_the_same_as_a_string(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render([USER])
    with pytest.raises(TemplateError, match="'image_url' is not supported"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(TemplateError, match="not supported"):
        template.render([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}])


def test_a_template_that_wants_parts_gets_parts(tokenizer: Tokenizer) -> None:
    template = _template(
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    assert template.render([USER]) == "Hi"
    final = [{"role": "assistant", "content": "Hi <|im_end|>"}]
    ids = encode_chat(tokenizer, template, final, add_generation_prompt=False, continue_final_message=True)
    assert ids == tokenizer.encode("Hi <|im_end|>")


def test_developer_is_system_where_the_template_does_not_know_it(template: ChatTemplate) -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert template.render([message, USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    knows = _template("{{ messages[0].role }}{% if messages[0].role == 'developer' %}!{% endif %}")
    assert knows.render([message]) == "developer!"


def test_tool_arguments_are_mappings_and_none_is_undefined() -> None:
    template = _template(
        "{% for m in messages %}{{ m.refusal is defined }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments.a }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a": "é<b>"}'}}
    assert template.render([{"role": "assistant", "refusal": None, "tool_calls": [call]}]) == 'Falseé<b>{"a": "é<b>"}'
    broken = {"function": {"name": "f", "arguments": '{"a'}}
    assert template.render([{"role": "assistant", "tool_calls": [broken]}]) == 'False"{\\"a"'


@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", "", "<|im_end|>", "a<"])
def test_continue_final_message(tokenizer: Tokenizer, template: ChatTemplate, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = template.render(messages, **options)
    assert text == template.render([USER]) + content
    ids = encode_chat(tokenizer, template, messages, **options)
    start = encode_chat(tokenizer, template, [USER], add_generation_prompt=False)
    assert ids == [*start, 1, *tokenizer.encode("assistant\n" + content)]
    trims = _template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert trims.render(messages, **options) == f"[Hi][{content.strip()}"


def test_continue_final_message_refusals(template: ChatTemplate) -> None:
    with pytest.raises(TemplateError, match="cannot both"):
        template.render([USER], continue_final_message=True)
    with pytest.raises(TemplateError, match="does not show the final message"):
        _template("x").render([USER], add_generation_prompt=False, continue_final_message=True)


def test_names_and_tags_of_the_hugging_face_dialect() -> None:
    template = _template(
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ pad_token }}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ flag }}",
        pad_token="<pad>",
    )
    assert template.render([USER, USER], flag=3) == "<s>Hi<pad>4True3"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "this model has no chat template"),
        ("{{ raise_exception('Roles must alternate') }}", "^Roles must alternate$"),
        ("{{ messages[7].content }}", "has no element 7|undefined"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages"),
        ("{{ messages.append(1) }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "longer than 100000"),
        ("{{ cycler.__init__.__globals__.os.getcwd() }}", "unsafe|undefined"),
    ],
)
def test_errors_say_why(source: str | None, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        _template(source).render([USER])


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LOOP, "longer than 0.2 s"),
        (LOOP.replace("%}{% for b", "if a >= 0 %}{% for b"), "longer than 0.2 s"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "than 0.2 s"),
        ("{% for x in [[[1] * 999] * 999] * 999 recursive %}{{ loop(x) if x is iterable }}{% endfor %}", "than 0.2 s"),
        ("{% set __noria_counted__ = 1 %}" + LOOP, "longer than 0.2 s"),
        ("{% for i in range(10**9) %}{% endfor %}", "cannot render"),
        ("{{ 'x' * 10**9 }}", "too long"),
        ("{{ 10**9 * ['x'] }}", "too long"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
    ],
)
def test_no_template_holds_up_others_for_long(source: str, said: str) -> None:
    template = _template("{% if not messages[0].probed %}{{ messages[0].content }}{% else %}" + source + "{% endif %}")
    began = time.thread_time()
    with pytest.raises(TemplateError, match=said):
        template.render([{**USER, "probed": True}])
    assert time.thread_time() - began < 2


def test_a_loop_knows_its_length_and_its_ends(template: ChatTemplate) -> None:
    source = "{% for m in messages %}{{ loop.length }}{{ loop.first }}{{ loop.last }} {% endfor %}"
    lazy = source.replace("messages %}", "messages | selectattr('role') %}")
    for each in (source, lazy):
        assert _template(each).render([USER, USER]) == "2TrueFalse 2FalseTrue "
    missing = "{% for m in nobody %}{{ m }}{% else %}none{% endfor %}"
    assert _template(missing).render([USER]) == "none"


def test_bad_requests_say_why(template: ChatTemplate) -> None:
    with pytest.raises(TemplateError, match="no messages"):
        template.render([])
    with pytest.raises(TemplateError, match="'bos_token' cannot be set"):
        template.render([USER], bos_token="x")
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(TemplateError, match="nested"):
        template.render([USER], tools=[deep])


def test_a_broken_template_is_told_at_load(files: TokenizerFiles) -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate(msgspec.structs.replace(files, chat_template="{% for %}"))
