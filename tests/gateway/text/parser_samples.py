"""What models write, by format: calls, what only looks like some, and thoughts."""

# ruff: noqa: E501

from __future__ import annotations

import json

SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
ROME = {"city": "Rome", "days": 2}
ODD = {"city": 'a "q" \\ {[<tool_call>]} ünï\n🎉 </tool_call', "days": 0}

DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def call(name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{call(*one)}\n</tool_call>" for one in calls)


WHOLE = [
    # format, text, what is said, calls
    ("hermes", hermes(("weather", ROME)), "", [("weather", ROME)]),
    ("hermes", "Let me see.\n\n" + hermes(("weather", ODD), ("now", {})), "Let me see.", [("weather", ODD), ("now", {})]),
    ("hermes", f"<tool_call>[{call('now', {})}, {call('weather', ROME)}]</tool_call>", "", [("now", {}), ("weather", ROME)]),
    ("hermes", '<tool_call>{"arguments": {"days": 2, "city": "Rome"}, "name": "weather"}</tool_call> ok', " ok", [("weather", ROME)]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null, "id": 3}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 2}"}</tool_call>', "", [("weather", ROME)]),
    ("hermes", "<tool_call>" + call("now", {}) + "\nafter", "\nafter", [("now", {})]),
    ("qwen_xml", "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", "I look.", [("weather", ROME)]),
    ("qwen_xml", "<function=now>\n</function>", "", [("now", {})]),
    ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\na\n<b> 12\n\n</parameter>\n</function></tool_call>", "", [("weather", {"city": "a\n<b> 12\n"})]),
    ("llama", '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}', "", [("weather", ROME)]),
    ("llama", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Rome", "days": 2}}', "", [("now", {}), ("weather", ROME)]),
    ("json", '```json\n[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]\n```', "", [("weather", ROME)]),
    ("json", call("weather", ODD), "", [("weather", ODD)]),
    ("pythonic", '[weather(city="Rome", days=2), now()]', "", [("weather", ROME), ("now", {})]),
    ("pythonic", "[weather(city='it\\'s (odd) ]', days=[1, {'a': true, 'b': None}])]", "", [("weather", {"city": "it's (odd) ]", "days": [1, {"a": True, "b": None}]})]),
    ("mistral", "[TOOL_CALLS] [" + call("weather", ROME) + ", " + call("now", {}) + "]", "", [("weather", ROME), ("now", {})]),
    ("mistral", 'Yes. [TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}[TOOL_CALLS]now{}', "Yes.", [("weather", ROME), ("now", {})]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome", "days": 2}', "", [("weather", ROME)]),
    ("deepseek", DS.format('function<｜tool▁sep｜>weather\n```json\n{"city": "Rome", "days": 2}\n```'), "", [("weather", ROME)]),
    ("deepseek", "Hm.\n\n" + DS.format('weather<｜tool▁sep｜>{"city": "Rome", "days": 2}'), "Hm.", [("weather", ROME)]),
    ("harmony", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 2}<|call|>', "", [("weather", ROME)]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}", "I look.", [("now", {})]),
    ("harmony", "<|channel|>final<|message|>Hello <b>.<|return|>", "Hello <b>.", []),
    ("harmony", "No channel at all.", "No channel at all.", []),
]  # fmt: skip

BROKEN = [
    ("hermes", "a <tool_call> b </tool_call> c"),
    ("hermes", '<tool_call>{"name": "weather"}</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "weather", "argu'),
    ("hermes", '<tool_call>{"x": {</tool_call>'),
    ("hermes", "  <tool_"),
    ("hermes", "if a < b: <tool_call"),
    ("hermes", "<tool_call>[1, 2]</tool_call>"),
    ("qwen_xml", "<tool_call>\n{}</tool_call>"),
    ("qwen_xml", "<function=weather"),
    ("llama", '{"name": "Ann", "parameters": {"age": 3}}'),
    ("llama", ' {"weather": 1} and more'),
    ("llama", '<|python_tag|>print("hi")'),
    ("json", "```json\n{}\n```"),
    ("json", "```python\nprint(1)\n```"),
    ("json", '{"name": "weather", "arguments": '),
    ("json", "\n[1, 2, 3]"),
    ("pythonic", "[weather(1)]"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", " [unknown(a=1)]"),
    ("pythonic", "[weather(city='Rome'"),
    ("pythonic", "a [weather()]"),
    ("mistral", "[TOOL_CALLS] hello"),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek", "<｜tool▁calls▁begin｜> nothing <｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no separator"),
    ("harmony", "<|channel|>final without an end"),
]
THOUGHT = [
    ("<think>\nOkay: {x}\n</think>\n\nHello.", False, "Okay: {x}", "Hello."),
    ("Okay.\n</think>\n\nHello. </think>", True, "Okay.", "Hello. </think>"),
    ("<think>\nOkay.", True, "Okay.", ""),
    ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
    ("  No thoughts </think> here", False, "", "  No thoughts </think> here"),
    ("<thin", False, "", "<thin"),
    ("Never closed </thi", True, "Never closed </thi", ""),
]
