"""The lines of a batch's input: read one by one, checked before anything runs, and the line that each leaves behind.

Knows no store and no endpoint's fields.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from noria.gateway.schemas.batches import Fault

MAX_LINES = 50_000
"""Requests in a batch at most, and inputs in a batch of embeddings, as OpenAI has it."""

MAX_FAULTS = 100
"""Faults told of one input at most."""

_MAX_CUSTOM_ID = 512
_BOM = b"\xef\xbb\xbf"
_TIERS = (None, "auto", "default")


class Faulty(Exception):
    """A line that cannot run."""

    def __init__(self, code: str, message: str, *, line: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.fault = Fault(code, message, line, param)


@dataclass(frozen=True, slots=True)
class Line:
    """One request: `number` counts the input's lines from 1."""

    number: int
    custom_id: str
    model: str
    body: dict[str, Any]


async def numbered(chunks: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number. Raises `Faulty` for a line longer than `max_bytes`."""
    rest, number = b"", 0
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for raw in whole:
            number += 1
            _check_length(number, raw, max_bytes)
            if raw.strip():
                yield number, raw
        _check_length(number + 1, rest, max_bytes)
    if rest.strip():
        yield number + 1, rest


def _check_length(number: int, raw: bytes, max_bytes: int) -> None:
    if len(raw) > max_bytes:
        raise Faulty("invalid_request", f"This line has more than {max_bytes} bytes.", line=number)


def parsed(number: int, raw: bytes, endpoint: str) -> Line:
    """Raises `Faulty`."""
    try:
        given = orjson.loads(raw.removeprefix(_BOM) if number == 1 else raw)
    except orjson.JSONDecodeError:
        raise Faulty("invalid_json_line", "This line is not parseable as valid JSON.", line=number) from None
    if not isinstance(given, dict):
        raise Faulty("invalid_json_line", "This line is not a JSON object.", line=number)
    custom_id = _text(given, "custom_id", number)
    if len(custom_id) > _MAX_CUSTOM_ID:
        message = f"'custom_id' is longer than {_MAX_CUSTOM_ID} characters."
        raise Faulty("invalid_request", message, line=number, param="custom_id")
    if _text(given, "method", number) != "POST":
        raise Faulty("invalid_method", "The method must be POST.", line=number, param="method")
    if _text(given, "url", number) != endpoint:
        message = f"The URL provided for this request does not match the batch endpoint '{endpoint}'."
        raise Faulty("url_mismatch", message, line=number, param="url")
    body = given.get("body")
    if not isinstance(body, dict):
        raise Faulty("missing_required_parameter", "'body' must be an object.", line=number, param="body")
    for name in given.keys() - {"custom_id", "method", "url", "body"}:
        raise Faulty("unknown_parameter", f"Unknown field '{name[:64]}'.", line=number, param=name[:64])
    model = _text(body, "model", number, "body.model")
    for name, fine in (("stream", (None, False)), ("background", (None, False)), ("service_tier", _TIERS)):
        if body.get(name) not in fine:
            message = f"'{name}' may not be set so in a batch, which has one way of running its requests."
            raise Faulty("invalid_request", message, line=number, param=f"body.{name}")
    return Line(number, custom_id, model, body)


def _text(given: Mapping[str, Any], name: str, number: int, param: str | None = None) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        message = f"Missing required parameter: '{param or name}'." if value is None else f"'{name}' must be a string."
        raise Faulty("missing_required_parameter", message, line=number, param=param or name)
    return value


@dataclass(slots=True)
class Check:
    """Goes through an input; afterwards `faults` says what is wrong with it, and `model` and `total` what it asks."""

    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    model: str | None = None
    total: int = 0
    _custom_ids: set[str] = field(default_factory=set)
    _num_inputs: int = 0

    async def run(self, lines: AsyncIterable[tuple[int, bytes]]) -> None:
        try:
            async for number, raw in lines:
                try:
                    self._take(parsed(number, raw, self.endpoint))
                except Faulty as faulty:
                    self.faults.append(faulty.fault)
                if len(self.faults) >= MAX_FAULTS or self._too_many():
                    return
        except Faulty as faulty:
            self.faults.append(faulty.fault)
        if not self.total and not self.faults:
            self.faults.append(Fault("empty_file", "The input file is empty. Please ensure that it is not.", None))

    def _take(self, line: Line) -> None:
        self.total += 1
        if line.custom_id in self._custom_ids:
            message = "The custom_id for this request is a duplicate of another request's."
            raise Faulty("duplicate_custom_id", message, line=line.number, param="custom_id")
        self._custom_ids.add(line.custom_id)
        self.model = self.model or line.model
        if line.model != self.model:
            message = f"The model of this request does not match the other requests': '{self.model}'."
            raise Faulty("model_mismatch", message, line=line.number, param="body.model")
        if self.endpoint.endswith("/embeddings"):
            given = line.body.get("input")
            several = isinstance(given, list) and not (given and isinstance(given[0], int))
            self._num_inputs += len(given) if isinstance(given, list) and several else 1

    def _too_many(self) -> bool:
        if self.total > MAX_LINES:
            self.faults.append(Fault("too_many_tasks", f"The input has more than {MAX_LINES} requests."))
        elif self._num_inputs > MAX_LINES:
            self.faults.append(Fault("too_many_tasks", f"The input has more than {MAX_LINES} inputs to embed."))
        else:
            return False
        return True


def answered(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A result: what the endpoint answered, whatever it was. `body` is JSON."""
    response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    return _result(custom_id, response, None)


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """The result of a request that no endpoint answered."""
    return _result(custom_id, None, {"code": code, "message": message})


def _result(custom_id: str, response: Any, error: Any) -> bytes:
    fields = {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
