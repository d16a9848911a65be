"""Ids of responses and their items. An item's id names its response, so that a reference to it needs no index.

Knows nothing of what they stand for.
"""

from __future__ import annotations

import re
import secrets

RESPONSE = "resp_"
CONVERSATION = "conv_"
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
    "compaction": "cmp_",
}
_OUTPUT = 0x8000
_ITEM = re.compile(r"(?:msg|fc|fco|rs|cmp)_(?P<group>[0-9a-f]{28})(?P<place>[0-9a-f]{4})\Z")
_KNOWN = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


def new_group() -> str:
    """What the ids of one response have in common."""
    return secrets.token_hex(14)


def input_item(group: str, kind: str, place: int) -> str:
    return f"{_PREFIXES[kind]}{group}{place:04x}"


def output_item(group: str, kind: str, place: int) -> str:
    return f"{_PREFIXES[kind]}{group}{_OUTPUT + place:04x}"


def response_of(item_id: str) -> str | None:
    """The id of the response that an item belongs to; None for items of conversations and of others' making."""
    found = _ITEM.match(item_id)
    return None if found is None else RESPONSE + found["group"]


def could_be(text: str) -> bool:
    """Whether the text can be an id at all: nothing else is asked of the store."""
    return _KNOWN.match(text) is not None
