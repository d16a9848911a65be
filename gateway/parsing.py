"""Typed requests of decoded bodies, read beside the event loop where a large form makes that slow.

Knows which fields hold forms, and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson

from noria.gateway.schemas.strict import RequestBody, parse

T = TypeVar("T")
Body = TypeVar("Body", bound=RequestBody)

LARGE = 4096
"""Bytes of forms that take some milliseconds: streams would stand still meanwhile."""

_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice")
_TOOLS = ("tools", "functions")

_beside = ThreadPoolExecutor(1, thread_name_prefix="noria-forms")
"""One thread: the event loop shares the interpreter with it, and would wait for each of several."""


async def parsed(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """As `parse`."""
    return await unhurried(lambda: parse(kind, body), body)


async def unhurried(work: Callable[[], T], body: Mapping[str, Any]) -> T:
    """The result of `work`, which takes long where the forms and tools in `body` are large."""
    if not any(_is_large(body[name]) for name in (*_FORMS, *_TOOLS) if body.get(name) is not None):
        return work()
    return await asyncio.get_running_loop().run_in_executor(_beside, work)


def _is_large(form: Any) -> bool:
    try:
        text = orjson.dumps(form)
        return len(text) > LARGE or b'"$ref"' in text  # a few references can stand for thousands of schemas
    except orjson.JSONEncodeError:  # nested deep, or a lone surrogate
        return True
