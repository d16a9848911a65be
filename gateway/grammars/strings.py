"""JSON Schema's strings: lengths, patterns and formats, as an engine enforces them. Knows no other type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noria.gateway.grammars.errors import Unsupported
from noria.gateway.grammars.patterns import in_string

MAX_LENGTH = 1_000_000
"""Largest `minLength` and `maxLength`: far beyond any context."""

# Days that every month and year has: what is written is always a day, though not every day can be written.
_MONTH_DAY = "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_DATE = f"[1-9][0-9]{{3}}-{_MONTH_DAY}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_ATOM = r"[A-Za-z0-9_+\-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_HEX = "[0-9a-fA-F]"
_NUMBER = "[0-9]{1,6}"
_UNITS = f"(?:{_NUMBER}H(?:{_NUMBER}M)?(?:{_NUMBER}S)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"

_NAME = "[A-Za-z][A-Za-z0-9]{0,15}(?:-[A-Za-z0-9]{1,15}){0,2}"  # labels of a host have 63 characters at most

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_NUMBER}W|(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)(?:T{_UNITS})?|T{_UNITS})",  # noqa: E501
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_NAME}(?:\.{_NAME}){{0,3}}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,3}}(?::{_GROUP}){{1,3}}|::(?:{_GROUP}:){{0,5}}{_GROUP}|::",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""What each format that OpenAI documents is narrowed to, so that whatever is written passes any validator."""


def string(node: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The enforced form of a string's keywords."""
    low, high = _lengths(node, place)
    pattern, form = node.get("pattern"), node.get("format")
    bounded = low > 0 or high is not None
    if form is not None:
        if not isinstance(form, str) or form not in FORMATS:
            raise Unsupported(f"'format' {str(form)[:64]!r} is not supported: {', '.join(FORMATS)} are", place)
        if bounded or pattern is not None:
            raise Unsupported("'format' beside 'pattern', 'minLength' or 'maxLength' is not supported", place)
        return {"type": "string", "pattern": in_string(f"^(?:{FORMATS[form]})$")}
    if pattern is not None:
        if not isinstance(pattern, str):
            raise Unsupported("'pattern' must be a string", place)
        try:
            return {"type": "string", "pattern": in_string(pattern, (low, high))}
        except Unsupported as error:
            raise Unsupported(str(error), place) from None
    return {"type": "string"} | ({"minLength": low} if low else {}) | ({} if high is None else {"maxLength": high})


def _lengths(node: Mapping[str, Any], place: str) -> tuple[int, int | None]:
    found = []
    for key in ("minLength", "maxLength"):
        value = node.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_LENGTH):
            raise Unsupported(f"'{key}' must be a whole number from 0 to {MAX_LENGTH:,}", place)
        found.append(value)
    low, high = found[0] or 0, found[1]
    if high is not None and low > high:
        raise Unsupported("'minLength' is more than 'maxLength'", place)
    return low, high
