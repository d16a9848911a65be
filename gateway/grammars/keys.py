"""Names of undeclared properties: any but the declared ones, and never one of these spelled with escapes.

Knows no schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from noria.gateway.grammars.patterns import EVERYTHING, one_of, without

MAX_PREFIX = 48
"""Characters of a declared name that are looked at: what begins with so many of its characters is not written."""


_ANYTHING = one_of(EVERYTHING, in_json=True) + "*"


def other_than(names: Iterable[str]) -> str:
    """The anchored expression for what stands between the quotes of a JSON string that is none of `names`, without
    characters that JSON escapes."""
    return f"^{_rest(list(dict.fromkeys(names)), 0)}$"


def _rest(names: Sequence[str], depth: int) -> str:
    """What may follow a beginning that would be a forbidden name with one of `names` behind it."""
    tails: dict[str, list[str]] = {}
    for name in names:
        if name:
            tails.setdefault(name[0], []).append(name[1:])
    others = without(EVERYTHING, [(ord(head), ord(head)) for head in tails])
    parts = [one_of(others, in_json=True) + _ANYTHING]
    if depth < MAX_PREFIX:
        parts += [_literal(head) + _rest(tail, depth + 1) for head, tail in tails.items() if _is_plain(head)]
    if "" not in names:
        parts.append("")
    return f"(?:{'|'.join(parts)})"


@lru_cache(maxsize=1024)
def _literal(character: str) -> str:
    return one_of([(ord(character), ord(character))], in_json=True)


def _is_plain(character: str) -> bool:
    """Whether JSON writes it as it is: a name with another one cannot be written in any case."""
    return character >= " " and character not in '"\\' and not "\ud800" <= character <= "\udfff"
