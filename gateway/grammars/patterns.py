"""Regular expressions that a grammar can follow: read by Python's own parser, checked, and written anew.

What engines' grammars would pass over in silence (lookaround) or take differently (anchors, characters that JSON
escapes) is refused or spelled out. Knows no schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from noria.gateway.grammars.errors import Unsupported

MAX_LENGTH = 4096
MAX_SIZE = 20_000
MAX_DEPTH = 64
"""Characters of an expression, the same with its repetitions written out, and levels of nesting, at most."""

Ranges = list[tuple[int, int]]
"""Inclusive ranges of code points, ascending and apart."""

_LATIN_1, _LAST = 0xFF, 0x10FFFF
EVERYTHING: Ranges = [(0, _LAST)]
_CLASSES: dict[Any, Ranges] = {
    op.CATEGORY_DIGIT: [(48, 57)],
    op.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
    op.CATEGORY_SPACE: [(9, 13), (32, 32), (0xA0, 0xA0), (0x2028, 0x2029)],
}  # as in ECMA-262, which JSON Schema goes by: ASCII digits and words; of white space what every library takes for it
_ANY_SPACE: Ranges = [
    (9, 13), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
"""What some library takes for white space: what is none is none of these."""
_NEGATED = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
}
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SURROGATES: Ranges = [(0xD800, 0xDFFF)]
_ESCAPED_IN_JSON: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
_CHARACTERS = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
"""Parts that match one character."""

_REFUSED = {
    op.ASSERT: "lookahead and lookbehind are", op.ASSERT_NOT: "lookahead and lookbehind are",
    op.GROUPREF: "backreferences are", op.GROUPREF_EXISTS: "conditional groups are",
    op.ATOMIC_GROUP: "atomic groups are", op.POSSESSIVE_REPEAT: "possessive quantifiers are",
}  # fmt: skip


def whole(pattern: str) -> str:
    """The expression for a text that matches `pattern` from its first to its last character."""
    return _alternatives(_parsed(pattern), searched=False, in_json=False)


def in_string(pattern: str, lengths: tuple[int, int | None] = (0, None)) -> str:
    """The anchored expression for what stands between the quotes of a JSON string in which `pattern` is found, as JSON
    Schema means it. Characters that JSON escapes are left out. The string's length has to be within `lengths`, by the
    pattern itself or because it is one character repeated."""
    tree = _parsed(pattern)
    low, high = lengths
    if low > 0 or high is not None:
        tree = _of_length(tree, low, high)
    return f"^{_alternatives(tree, searched=True, in_json=True)}$"


def _parsed(pattern: str) -> Any:
    if len(pattern) > MAX_LENGTH:
        raise Unsupported(f"a regular expression has more than {MAX_LENGTH} characters")
    try:
        tree = _parser.parse(re.sub(r"(?<!\\)\(\?<(?![=!])", "(?P<", pattern))
    except (re.error, OverflowError, ValueError) as error:
        raise Unsupported(f"not a regular expression that is understood here: {error}") from None
    except RecursionError:
        raise Unsupported("a regular expression is nested too deep") from None
    if tree.state.flags & ~re.UNICODE:
        raise Unsupported("flags inside regular expressions are not supported")
    if _size(tree) > MAX_SIZE:
        raise Unsupported(f"a regular expression stands for more than {MAX_SIZE} characters")
    return tree


def _size(items: Iterable[Any], depth: int = 0) -> int:
    """Characters of the expression with its repetitions written out."""
    if depth > MAX_DEPTH:
        raise Unsupported("a regular expression is nested too deep")
    total = 0
    for kind, value in items:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, high, inner = value
            total += max(_size(inner, depth + 1), 1) * max(low if high is op.MAXREPEAT else high, 1)
        elif kind is op.BRANCH:
            total += sum(_size(branch, depth + 1) for branch in value[1])
        elif kind is op.SUBPATTERN:
            total += _size(value[3], depth + 1)
        else:
            total += 1
        if total > MAX_SIZE:
            return MAX_SIZE + 1
    return total


def _of_length(tree: Any, low: int, high: int | None) -> Any:
    """The expression narrowed to `low` to `high` characters, where that can be seen or done."""
    items = list(tree)
    anchored = len(items) >= 2 and _is_start(items[0]) and _is_end(items[-1])
    shortest, longest = tree.getwidth()
    if anchored and shortest >= low and (high is None or longest <= high):
        return items
    if anchored and len(items) == 3 and items[1][0] in (op.MAX_REPEAT, op.MIN_REPEAT):
        least, most, inner = items[1][1]
        if len(inner) == 1 and inner[0][0] in _CHARACTERS:
            least = max(least, low)
            most = most if high is None else high if most is op.MAXREPEAT else min(most, high)
            if most is op.MAXREPEAT or least <= most:
                return [items[0], (op.MAX_REPEAT, (least, most, inner)), items[-1]]
    raise Unsupported("'minLength' and 'maxLength' beside this 'pattern' are not supported: put them into the pattern")


def _is_start(item: Any) -> bool:
    return bool(item[0] is op.AT and item[1] in (op.AT_BEGINNING, op.AT_BEGINNING_STRING))


def _is_end(item: Any) -> bool:
    return bool(item[0] is op.AT and item[1] in (op.AT_END, op.AT_END_STRING))


def _alternatives(tree: Sequence[Any], *, searched: bool, in_json: bool) -> str:
    """The outermost alternatives, each anchored by itself: `^a|b$` is found where a begins the text or b ends it."""
    items = list(tree)
    branches = [items]
    if items and items[-1][0] is op.BRANCH and all(map(_is_start, items[:-1])):  # the parser takes out what all share
        branches = [items[:-1] + list(branch) for branch in items[-1][1][1]]
    around = _any_character(in_json) + "*"
    written = []
    for branch in map(list, branches):
        start = bool(branch) and _is_start(branch[0])
        if start:
            branch = branch[1:]
        end = bool(branch) and _is_end(branch[-1])
        if end:
            branch = branch[:-1]
        text = "".join(_write(item, in_json) for item in branch)
        written.append(("" if start or not searched else around) + text + ("" if end or not searched else around))
    return written[0] if len(written) == 1 else f"(?:{'|'.join(written)})"


def _any_character(in_json: bool) -> str:
    return one_of(EVERYTHING, in_json)


def _write(item: Any, in_json: bool) -> str:
    kind, value = item
    if kind is op.LITERAL:
        return one_of([(value, value)], in_json)
    if kind is op.NOT_LITERAL:
        return one_of(without(EVERYTHING, [(value, value)]), in_json)
    if kind is op.ANY:
        return one_of(without(EVERYTHING, _LINE_ENDS), in_json)
    if kind is op.IN:
        return one_of(_members(value), in_json)
    if kind is op.BRANCH:
        return f"(?:{'|'.join(''.join(_write(i, in_json) for i in branch) for branch in value[1])})"
    if kind is op.SUBPATTERN:
        _, added, removed, inner = value
        if added or removed:
            raise Unsupported("flags inside regular expressions are not supported")
        return f"(?:{''.join(_write(i, in_json) for i in inner)})"
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
        low, high, inner = value
        text = "".join(_write(i, in_json) for i in inner)
        is_one = len(inner) == 1 and inner[0][0] in _CHARACTERS
        if (low, high) == (0, 1) and (not is_one or text.startswith("(")):
            # xgrammar 0.2.9 reads `(?:a[0-9]+)?` as `a?` and some digits; an empty alternative it reads as it should.
            return f"(?:{text}|)"
        return (text if is_one else f"(?:{text})") + _count(low, None if high is op.MAXREPEAT else high)
    if kind is op.AT:
        raise Unsupported("anchors and word boundaries inside regular expressions are not supported")
    raise Unsupported(f"{_REFUSED.get(kind, 'such parts of regular expressions are')} not supported")


def _count(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _members(items: Sequence[Any]) -> Ranges:
    found: Ranges = []
    negated = False
    for kind, value in items:
        if kind is op.NEGATE:
            negated = True
        elif kind is op.LITERAL:
            found.append((value, value))
        elif kind is op.RANGE:
            found.append(value)
        else:
            found += _class(value, widely=negated)
    return without(EVERYTHING, found) if negated else found


def _class(name: Any, *, widely: bool) -> Ranges:
    """Characters of `\\d`, `\\S` and the like. `widely`: of those on which libraries differ, too."""
    kind = _NEGATED.get(name, name)
    # What is left out of the widest white space is least, and the other way round.
    wide = _ANY_SPACE if kind is op.CATEGORY_SPACE and widely != (name in _NEGATED) else _CLASSES[kind]
    return without(EVERYTHING, wide) if name in _NEGATED else wide


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """`ranges` less `removed`, in order and merged."""
    kept: Ranges = []
    for low, high in _merged(ranges):
        for first, last in _merged(removed):
            if last < low or first > high:
                continue
            if first > low:
                kept.append((low, first - 1))
            low = last + 1
        if low <= high:
            kept.append((low, high))
    return kept


def _merged(ranges: Ranges) -> Ranges:
    merged: Ranges = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def one_of(ranges: Ranges, in_json: bool) -> str:
    """One character of the set: a class, or a group of two."""
    kept = without(ranges, _SURROGATES + _ESCAPED_IN_JSON if in_json else _SURROGATES)
    if not kept:
        raise Unsupported("a regular expression asks for a character that JSON has to escape")
    if kept[-1][1] == _LAST:  # shorter by what it lacks
        lacks = without(without(EVERYTHING, _SURROGATES), kept)
        return f"[^{_spelled(lacks)}]" if lacks else r"[\s\S]"
    if kept[-1][1] > _LATIN_1:
        return _split(kept)
    return f"[{_spelled(kept)}]"


def _split(ranges: Ranges) -> str:
    """The set as two that are apart. xgrammar 0.2.9 takes `(` for U+0128 where it looks from a repetition at a class
    behind it, and so on for every character whose code has the same last byte; at alternatives it does not look."""
    low, high = ranges[0][0], ranges[-1][1]
    if low == high:
        return chr(low)
    if low <= _LATIN_1:
        middle = _LATIN_1
    else:
        middle = ranges[0][1] if len(ranges) > 1 else (low + high) // 2
    first = without(ranges, [(middle + 1, _LAST)])
    return f"(?:[{_spelled(first)}]|[{_spelled(without(ranges, [(0, middle)]))}])"


def _spelled(ranges: Ranges) -> str:
    return "".join(_character(a) + (f"-{_character(b)}" if b > a else "") for a, b in ranges)


def _character(code: int) -> str:
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    character = chr(code)
    return f"\\{character}" if character in "\\]^[-" else character
