"""Strict parsing of request bodies, and the translation of pydantic's findings into OpenAI's error messages.

Ignorant of every endpoint's fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from noria.gateway.errors import InvalidRequest, UnsupportedParameter

MAX_FIELDS = 128
"""Fields of one object at most. Pydantic reports every field it does not know: a million of them would hold up
everybody. For the same reason lists that a client may fill are annotated `FIRST_FAULT`."""


class _FirstFault(FailFast):
    __hash__ = object.__hash__  # a union of annotated types asks for one


FIRST_FAULT = _FirstFault()
"""Annotates a list: its first bad item is reported and no other looked at."""


class Strict(BaseModel):
    """A record of a request: no coercion, no unknown field, no NaN. An explicit null counts as an absent field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "an object has more than {most} fields", {"most": MAX_FIELDS})
        if None in value.values():
            return {name: item for name, item in value.items() if item is not None}
        return value


def at_most(most: int) -> BeforeValidator:
    """Bounds a list or an object before its items are looked at, each of which could be a finding of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise PydanticCustomError("too_many_items", "it has more than {most} items", {"most": most})
        return value

    return BeforeValidator(check)


def deeper_than(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep."""
    if levels < 0:
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(deeper_than(item, levels - 1) for item in items)


def only_kinds(*kinds: str, error: str, message: str) -> BeforeValidator:
    """Names the `type` of a record that is none of `kinds`, instead of listing every field in it that we do not know.
    `message` may hold `{kind}`."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise PydanticCustomError(error, message, {"kind": kind[:64], "param_suffix": "type"})
        return value

    return BeforeValidator(check)


class RequestBody(Strict):
    """A whole request body. `refused` maps the fields that are documented but not served to what to say of them."""

    refused: ClassVar[Mapping[str, str]] = {}


Body = TypeVar("Body", bound=RequestBody)


def parse(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """A typed request from decoded JSON. Raises `InvalidRequest` that names the offending field."""
    present = {name: value for name, value in body.items() if value is not None}
    for name, why in kind.refused.items():
        if name in present:
            raise UnsupportedParameter(f"Unsupported parameter: '{name}' {why}.", param=name)
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        raise _translate(error, present) from None


def _translate(error: ValidationError, body: Mapping[str, Any]) -> InvalidRequest:
    findings = [(_path(finding, body), finding) for finding in error.errors(include_url=False)]
    # A union reports once for each of its branches: the finding deepest inside the body is the telling one.
    findings.sort(key=lambda item: (-item[0].count("[") - item[0].count("."), item[1]["type"] == "extra_forbidden"))
    param, telling = findings[0]
    if telling["type"].endswith("_type"):
        wanted = [_EXPECTED[f["type"]] for p, f in findings if p == param and f["type"] in _EXPECTED]
        got = _json_type(telling["input"])
        expected = " or ".join(dict.fromkeys(wanted)) or "another type"
        message = f"Invalid type for '{param}': expected {expected}, but got {got} instead."
        return InvalidRequest(message, param=param, code="invalid_type")
    message, code = _describe(param, telling)
    return InvalidRequest(message, param=param, code=code)


def _describe(param: str, finding: ErrorDetails) -> tuple[str, str]:
    kind, context, got = finding["type"], finding.get("ctx", {}), _shown(finding["input"])
    if kind == "missing" or kind == "union_tag_not_found":
        return f"Missing required parameter: '{param}'.", "missing_required_parameter"
    if kind == "extra_forbidden":
        return f"Unrecognized request argument supplied: {param}", "unknown_parameter"
    if kind == "literal_error":
        return f"Invalid value for '{param}': {got}. Supported values are: {context['expected']}.", "invalid_value"
    if kind == "union_tag_invalid":
        tag = _shown(context["tag"])
        return f"Invalid value for '{param}': {tag}. Supported values are: {context['expected_tags']}.", "invalid_value"
    if kind == "combination":
        return f"{finding['msg']}.", "invalid_parameter_combination"
    if kind in _BOUNDS:
        sign, key, word = _BOUNDS[kind]
        number = "integer" if isinstance(finding["input"], int) else "decimal"
        message = f"Invalid '{param}': {number} {word} value. Expected a value {sign} {context[key]}, but got {got}."
        return message, f"{number}_{'below_min' if word.startswith('below') else 'above_max'}_value"
    return f"Invalid '{param}': {finding['msg']}.", "invalid_value"


def _path(finding: ErrorDetails, body: Any) -> str:
    """Where in the body the finding lies, spelled `messages[0].content`. Pydantic's own location also names union
    branches, which are no part of the body: only steps that exist in it are kept, and a missing last one."""
    if "param" in finding.get("ctx", {}):
        return str(finding["ctx"]["param"])
    path, here = "", body
    steps: Sequence[int | str] = list(finding["loc"])
    if finding["type"].startswith("union_tag"):
        steps = [*steps, finding["ctx"]["discriminator"].strip("'")]
    for position, step in enumerate(steps):
        last = position == len(steps) - 1
        if isinstance(here, list) and isinstance(step, int) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
        elif isinstance(here, Mapping) and step in here:
            path, here = _dotted(path, str(step)), here[step]
        elif last and finding["type"] in ("missing", "union_tag_not_found"):
            path = _dotted(path, str(step))
    suffix = finding.get("ctx", {}).get("param_suffix")
    return _dotted(path, suffix) if suffix else path or "body"


def _dotted(path: str, name: str) -> str:
    name = re.sub(r"[^ -~]", "?", name[:64])
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."


def _json_type(value: Any) -> str:
    for kind, name in _JSON_TYPES:
        if isinstance(value, kind):
            return name
    return "null"


_JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"), (int, "an integer"), (float, "a decimal"), (str, "a string"),
    (list, "an array"), (Mapping, "an object"),
)  # fmt: skip
_EXPECTED = {
    "string_type": "a string", "int_type": "an integer", "float_type": "a number", "bool_type": "a boolean",
    "list_type": "an array", "tuple_type": "an array", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object",
}  # fmt: skip
_BOUNDS = {
    "greater_than_equal": (">=", "ge", "below minimum"), "greater_than": (">", "gt", "below minimum"),
    "less_than_equal": ("<=", "le", "above maximum"), "less_than": ("<", "lt", "above maximum"),
}  # fmt: skip
