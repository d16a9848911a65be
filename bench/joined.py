"""An answer as a client has it at the end, in one form whether it came whole or as a stream.

Written against OpenAI's description of both, and sharing no code with the gateway. What may differ between two answers
to the same request (ids, times) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

Said = dict[str, Any]


class Malformed(Exception):
    """The stream breaks a rule of its own."""


def events(lines: Iterable[str]) -> Iterator[Said | str]:
    """The data of server-sent events: decoded, or "[DONE]"."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def whole(path: str, body: Said) -> Said:
    """What an answer says that came whole."""
    if path.endswith("/responses"):
        return _response(body)
    choices = [_chat_choice(c) if "message" in c else _text_choice(c) for c in body["choices"]]
    said = {key: body.get(key) for key in ("model", "system_fingerprint", "service_tier", "usage")}
    return said | {"choices": choices, "prompt_token_ids": body.get("prompt_token_ids")}


def streamed(path: str, lines: Iterable[str]) -> Said:
    """What a stream says in all. Raises Malformed."""
    found = list(events(lines))
    if path.endswith("/responses"):
        return _joined_response(found)
    if not found or found[-1] != "[DONE]":
        raise Malformed(f"it ends with {found[-1:]!r}")
    return _joined_chunks([chunk for chunk in found[:-1] if isinstance(chunk, dict)])


def _chat_choice(choice: Said) -> Said:
    message, scores = choice["message"], choice["logprobs"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "index": choice["index"],
        "content": message["content"] or "",
        "thoughts": message.get("reasoning_content", ""),
        "calls": calls + ([message["function_call"]] if message.get("function_call") else []),
        "logprobs": scores["content"] if scores else [],
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids", []),
    }


def _text_choice(choice: Said) -> Said:
    return {
        "index": choice["index"],
        "text": choice["text"],
        "logprobs": choice["logprobs"] or {},
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids", []),
        "prompt_token_ids": choice.get("prompt_token_ids"),
        "prompt_logprobs": choice.get("prompt_logprobs"),
    }


def _joined_chunks(chunks: list[Said]) -> Said:
    choices: dict[int, Said] = {}
    said: Said = {"prompt_token_ids": None, "usage": None}
    heads = {json.dumps([c[key] for key in ("id", "created", "model", "object")]) for c in chunks}
    if len(heads) != 1:
        raise Malformed(f"its chunks differ in id, time, model or object: {heads}")
    for chunk in chunks:
        said |= {key: chunk.get(key) for key in ("model", "system_fingerprint", "service_tier")}
        said["prompt_token_ids"] = said["prompt_token_ids"] or chunk.get("prompt_token_ids")
        if chunk.get("usage"):
            said["usage"] = chunk["usage"]
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "finish_reason": None})
            if choice["finish_reason"] is not None:
                raise Malformed(f"choice {part['index']} goes on behind its end")
            choice["finish_reason"] = part["finish_reason"]
            choice["token_ids"] = choice.get("token_ids", []) + part.get("token_ids", [])
            (_grow_chat if "delta" in part else _grow_text)(choice, part)
    return said | {"choices": [choices[index] for index in sorted(choices)]}


def _grow_chat(choice: Said, part: Said) -> None:
    delta = part["delta"]
    choice["content"] = choice.get("content", "") + (delta.get("content") or "")
    choice["thoughts"] = choice.get("thoughts", "") + delta.get("reasoning_content", "")
    choice["logprobs"] = choice.get("logprobs", []) + (part["logprobs"] or {"content": []})["content"]
    calls = choice.setdefault("calls", [])
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(calls) and call.get("id") and call["function"].get("name"):
            calls.append({"name": call["function"]["name"], "arguments": ""})
        elif call["index"] >= len(calls) or call.keys() & {"id", "type"} or "name" in call["function"]:
            raise Malformed(f"a delta of a call out of order: {call}")
        calls[call["index"]]["arguments"] += call["function"].get("arguments", "")
    if function := delta.get("function_call"):
        if not calls:
            calls.append({"name": function["name"], "arguments": ""})
        calls[0]["arguments"] += function.get("arguments", "")


def _grow_text(choice: Said, part: Said) -> None:
    choice["text"] = choice.get("text", "") + part["text"]
    scores = choice.setdefault("logprobs", {})
    for key, values in (part["logprobs"] or {}).items():
        scores[key] = scores.get(key, []) + values
    for key in ("prompt_token_ids", "prompt_logprobs"):
        choice[key] = part[key] if key in part else choice.get(key)


def _response(body: Said) -> Said:
    left_out = ("id", "created_at", "completed_at", "output")
    output = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in body["output"]]
    return {key: value for key, value in body.items() if key not in left_out} | {"output": output}


def _joined_response(found: list[Any]) -> Said:
    numbers = [event["sequence_number"] for event in found]
    if numbers != list(range(len(found))):
        raise Malformed(f"its events are numbered {numbers}")
    last = found[-1]
    if last["type"] not in ("response.completed", "response.incomplete"):
        raise Malformed(f"it ends with {last['type']}")
    grown: dict[int, str] = {}
    scores: dict[int, list[Said]] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            grown[place] = grown.get(place, "") + event["delta"]
            scores[place] = scores.get(place, []) + event.get("logprobs", [])
    for place, item in enumerate(last["response"]["output"]):
        part = item["content"][0] if "content" in item else {"text": item["arguments"]}
        if grown.get(place, "") != part["text"] or scores.get(place, []) != part.get("logprobs", []):
            raise Malformed(f"its deltas do not add up to item {place}: {grown.get(place)!r} and {part!r}")
    return _response(last["response"])
