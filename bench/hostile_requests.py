"""Requests that no careful client sends: good ones broken in one to three places, and bytes that are no JSON at all.

A hypothesis strategy. Knows the endpoints and what their bodies look like; no server and no answer.
"""

from __future__ import annotations

import copy
import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from bench.random_requests import RandomRequests
from bench.schema_suite import SUPPORTED, UNSUPPORTED

MAX_TOKENS = 8
TEXT = "the river turns"
SCHEMAS = [*SUPPORTED.values(), *(schema for schema, _ in UNSUPPORTED.values())]


@dataclass(frozen=True)
class Hostile:
    """One HTTP request. `cut`: its body ends before the promised length, as if the client had hung up."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


class Spelled(str):
    """JSON as it goes out, whatever it is."""


class Pairs(list[tuple[str, Any]]):
    """An object whose names may occur twice."""


def _nested(levels: int, start: str, end: str, inner: str = "1") -> Spelled:
    return Spelled(start * levels + inner + end * levels)


STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63 - 1, 2**63, -(2**64), 1e308, -0.0, 1e-320, 0.5,
    *map(Spelled, ("1" + "0" * 400, "1e999", "NaN", "Infinity", "-Infinity", "01", "1.0", "-")),
    *map(Spelled, ('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"unended', '"\\x"')),
    "", " ", "\0", "a" * 100, "x" * 70_000, "🎉" * 300, "\u202e", "ﷺ" * 40, "\r\n\r\n", "data: [DONE]\n\n",
    "{{ 7*7 }}", "{% for x in range(10**9) %}", "<|im_end|>", "../../etc/passwd", "%00", "'; --",
    "null", "text", "function", "auto", "none", "required", "json_object", "json_schema", "user", "assistant", "tool",
    "message", "item_reference", "gpt-4",
    [], {}, [None], [[]], [{}], {"type": "x"}, {"": ""}, {"type": None}, {"type": "text"}, {"type": ["text"]},
    ["a"] * 300, list(range(3000)), {f"k{i}": i for i in range(200)},
    {"role": "user"}, {"role": "user", "content": None}, {"type": "function", "function": {"name": "f"}},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}, {"type": "input_file", "file_data": "%%%"},
    {"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
    _nested(50, "[", "]"), _nested(300, "[", "]"), _nested(1100, "[", "]"), _nested(20_000, "[", "]", ""),
    _nested(60, '{"a":', "}"), _nested(260, '{"items":', "}"), _nested(70, '{"not":', "}"),
    _nested(900, '{"anyOf":[', "]}"),
)  # fmt: skip
"""Values that are wrong nearly everywhere, and right in a place where one does not expect them."""

PATTERNS = (
    "(a*)*b", "(a|a)*$", "a{1000}{1000}", "[", "(?<=x)", "\\p{L}+", "^(?:[^a]{0,50}){0,40}$", "(", "\\", "(?i)x", "[^]",
    "\\u{110000}", "x{,}", "(((((((((((a)))))))))))", "\\d{1,3}", "[\ud800-\udfff]", "",
)  # fmt: skip
GRAMMARS = (
    "root ::= root",
    'root ::= "a" root | "b"',
    "root",
    'x ::= "a"',
    "root ::= (",
    'root ::= [a-z]* [a-z]* "!"',
    "\0",
)

OTHERS: dict[str, Any] = {
    "/v1/embeddings": {"input": [TEXT, "b"], "dimensions": 8, "encoding_format": "base64"},
    "/v1/score": {"text_1": TEXT, "text_2": [TEXT, "b"]},
    "/v1/rerank": {"query": TEXT, "documents": [TEXT, {"text": "b"}], "top_n": 1},
    "/v1/tokenize": {"prompt": TEXT, "add_special_tokens": True},
    "/v1/detokenize": {"tokens": [1, 2, 3]},
    "/v1/conversations": {"items": [{"type": "message", "role": "user", "content": TEXT}], "metadata": {"a": "b"}},
    "/v1/responses/input_tokens": {"input": TEXT, "instructions": TEXT},
    "/v1/responses/compact": {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/conversations/conv_0/items": {"items": [{"role": "user", "content": TEXT}]},
    "/v1/chat/completions/chatcmpl-0": {"metadata": {"a": "b"}},
    "/v1/responses/resp_0/cancel": {},
}
ITEMS: tuple[Any, ...] = (
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"},
    {"type": "function_call_output", "call_id": "c", "output": TEXT},
    {"type": "function_call_output", "call_id": "nobody's", "output": []},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": TEXT}]},
    {"type": "compaction", "encrypted_content": "noria-1.AAAA"},
    {"type": "message", "role": "user", "content": [{"type": "input_file", "file_data": "aGk=", "filename": "\0"}]},
    {"type": "item_reference", "id": "msg_0"},
    {"role": "assistant", "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": [1]}]},
)
GETS = (
    "/v1/models/%00", "/v1/models/a%2Fb", "/v1/openapi.json", "/v1//v1/models", "/openai/deployments/%2e%2e/models",
    "/v1/files?limit=-1", "/v1/files/%ff", "/v1/files/file-0/content", "/v1/batches?after=zz&limit=1e9",
    "/v1/chat/completions?metadata[a]=b&order=up", "/v1/conversations/conv_0/items?limit=0", "/v1/x" + "y" * 3000,
    "/v1/responses/resp_0?starting_after=x", "/v1/responses/resp_0?stream=true&starting_after=99999999999999999999",
    "/v1/responses/resp_0/input_items?include[]=x",
)  # fmt: skip
TYPES = (
    "application/json", "text/plain", "", "application/xml", "application/json; charset=utf-16", "\xff",
    "application/x-www-form-urlencoded", "multipart/form-data", "multipart/form-data; boundary=x",
    'multipart/form-data; boundary="' + "b" * 300 + '"',
)  # fmt: skip
HEADERS: dict[str, tuple[str, ...]] = {
    "idempotency-key": ("", "k", "x" * 300, "\xe9"),
    "last-event-id": ("chatcmpl-0/1", "chatcmpl-" + "0" * 28 + "/-", "x" * 9000, "cmpl-00000000/9t,9e"),
    "x-noria-resumable": ("true", "maybe"),
    "x-noria-queue-info": ("true", "2"),
    "x-request-id": ("a b", "x" * 200, "\xff"),
    "accept-encoding": ("gzip", "br;q=x"),
    "expect": ("100-continue", "x"),
    "api-key": ("sk-no", "\xff"),
}


def spelled(value: Any) -> str:
    """JSON, with what JSON does not allow where the value says so."""
    if isinstance(value, Spelled):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{spelled(item)}" for name, item in value) + "}"
    if isinstance(value, dict):
        return spelled(Pairs(value.items()))
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return json.dumps(value)


Places = list[tuple[Any, Any]]


def _places(value: Any) -> Places:
    """Every member of every object and list inside: the container, and the name or index in it."""
    found: Places = []
    if isinstance(value, dict | list):
        members: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(members):
            found += [(value, key), *_places(inner)]
    return found


def _replaced(place: tuple[Any, Any], strange: Any) -> None:
    place[0][place[1]] = strange


def _dropped(place: tuple[Any, Any], _: Any) -> None:
    del place[0][place[1]]


def _wrapped(place: tuple[Any, Any], strange: Any) -> None:
    container, key = place
    container[key] = (
        [container[key], strange] if isinstance(strange, list) else {"type": strange, "text": container[key]}
    )


def _added(place: tuple[Any, Any], strange: Any) -> None:
    container, key = place
    if isinstance(container, list):
        container.insert(key, strange)
    else:
        container[str(strange)[:40]] = container[key]


def _renamed(place: tuple[Any, Any], _: Any) -> None:
    container, key = place
    if isinstance(container, dict):
        container[f"{key} "] = container.pop(key)


BREAKS: tuple[Callable[[tuple[Any, Any], Any], None], ...] = (
    _replaced,
    _replaced,
    _replaced,
    _dropped,
    _wrapped,
    _added,
    _renamed,
)
_strange = st.one_of(
    st.sampled_from(STRANGE),
    st.sampled_from(STRANGE),
    st.sampled_from(PATTERNS).map(
        lambda p: {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": p}}}
    ),
    st.sampled_from([*PATTERNS, *GRAMMARS]),
    st.sampled_from(ITEMS),
).map(copy.deepcopy)  # what is put into a body may be broken further


def _forms(schema: Any) -> list[tuple[str, Any]]:
    """Requests that hold an answer to the schema."""
    named = {"name": "s", "schema": schema}
    function = {"name": "f", "parameters": schema, "strict": True}
    forced = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 4}
    form = {"format": {"type": "json_schema", **named}}
    return [
        ("/v1/completions", {"prompt": TEXT, "guided_json": schema, "max_tokens": 4}),
        ("/v1/responses", {"input": TEXT, "text": form, "max_output_tokens": 16}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], **forced}),
    ]


@st.composite
def broken_bodies(draw: st.DrawFn, model: str, vocab_size: int) -> tuple[str, str]:
    """Path and JSON of a request with up to three faults."""
    kind = draw(st.integers(0, 11))
    if kind == 0:
        schema = draw(st.sampled_from(SCHEMAS))
        path, body = draw(st.sampled_from(_forms(json.loads(json.dumps(schema)))))
        body = {"model": model, **body}
    elif kind < 8:
        ask = RandomRequests(model, vocab_size, seed=draw(st.integers(0, 10**6)), max_tokens=MAX_TOKENS).ask()
        path, body = ask.path, json.loads(json.dumps(ask.body))
    else:
        path = draw(st.sampled_from(sorted(OTHERS)))
        body = json.loads(json.dumps({"model": model, **OTHERS[path]} if "_0" not in path else OTHERS[path]))
    if draw(st.integers(0, 3)) == 0:
        body["stream"] = True
    if "input" in body and draw(st.integers(0, 2)) == 0:
        body["input"] = draw(st.lists(st.sampled_from(ITEMS).map(copy.deepcopy), min_size=1, max_size=3))
    known = (
        "stop",
        "guided_regex",
        "guided_grammar",
        "response_format",
        "tools",
        "logit_bias",
        "metadata",
        "seed",
        "background",
    )
    if draw(st.integers(0, 4)) == 0:
        body[draw(st.sampled_from(known))] = draw(_strange)
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 3)))):
        places = _places(body)
        if places:
            place = places[draw(st.integers(0, len(places) - 1))]
            draw(st.sampled_from(BREAKS))(place, draw(_strange))
    text = spelled(body)
    if draw(st.integers(0, 9)) == 0:
        text = text[:-1] + "," + spelled({draw(st.sampled_from(sorted(body) or ["a"])): draw(_strange)})[1:]  # twice
    return path, text


def _form(draw: st.DrawFn, content: bytes) -> tuple[bytes, str]:
    """A multipart upload, seldom a good one."""
    purpose = draw(st.sampled_from(("batch", "user_data", "x", "")))
    name = draw(st.sampled_from(("a.jsonl", "", "é\0", "x" * 2000, "../../a")))
    boundary = draw(st.sampled_from(("b", "b" * 70, "--")))
    parts = [
        f'Content-Disposition: form-data; name="purpose"\r\n\r\n{purpose}'.encode(),
        f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode() + content,
        draw(st.sampled_from((b"", b"Content-Disposition: form-data\r\n\r\nx", b"a: b\r\n" * 500 + b"\r\n", b"\xff"))),
    ]
    separator = b"--" + boundary.encode() + b"\r\n"
    body = b"".join(separator + part + b"\r\n" for part in draw(st.permutations(parts)))
    end = draw(st.sampled_from((b"--" + boundary.encode() + b"--\r\n", b"--" + boundary.encode(), b"")))
    return body + end, f"multipart/form-data; boundary={boundary}"


@st.composite
def hostile_requests(draw: st.DrawFn, model: str, vocab_size: int) -> Hostile:
    """Any request of this page."""
    if draw(st.integers(0, 14)) == 0:
        return Hostile(draw(st.sampled_from(("GET", "DELETE", "HEAD", "OPTIONS", "PUT"))), draw(st.sampled_from(GETS)))
    path, text = draw(broken_bodies(model, vocab_size))
    body, headers = text.encode("utf-8", "surrogatepass"), {"content-type": "application/json"}
    kind = draw(st.integers(0, 19))
    if kind == 0:
        body = draw(
            st.sampled_from((b"", b"null", b"[]", b"{", b"\xff\xfe", b"0", b'"a"', b"{}" * 2, b"\0" * 9, body * 2))
        )
    elif kind == 1:
        body = draw(
            st.sampled_from((b"\xef\xbb\xbf" + body, text.encode("utf-16", "surrogatepass"), body[: len(body) // 2]))
        )
    elif kind == 2:
        at = draw(st.integers(0, max(0, len(body) - 1)))
        body = body[:at] + draw(st.binary(min_size=1, max_size=3)) + body[at + 1 :]
    elif kind == 3:
        headers["content-type"] = draw(st.sampled_from(TYPES))
    elif kind == 4:
        headers["content-encoding"] = draw(st.sampled_from(("gzip", "deflate", "br", "gzip, gzip", "\xff")))
        body = draw(st.sampled_from((gzip.compress(body), zlib.compress(body), gzip.compress(body)[:-9], body)))
    elif kind == 5:
        path = "/v1/files"
        body, headers["content-type"] = _form(draw, body)
    elif kind in (6, 7):
        name = draw(st.sampled_from(sorted(HEADERS)))
        headers[name] = draw(st.sampled_from(HEADERS[name]))
    return Hostile("POST", path, body, headers, cut=kind == 8)
