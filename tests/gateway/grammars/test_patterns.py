"""Patterns written anew match what they matched: against Python's own matching, character for character."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.gateway.grammars.errors import Unsupported
from noria.gateway.grammars.keys import other_than
from noria.gateway.grammars.patterns import in_string, whole

PATTERNS = [
    "abc", "^abc$", "^a", "b$", "^a|b$", "a|b|cd", "^(a|b)c$", "[a-c]", "[^a-c]", "^[^a]$", ".", "^..$", "a*", "^a+$",
    "^a{2,3}$", "^(ab){1,2}$", "^a?b$", r"\d", r"^\D$", r"^\w+$", r"^\W$", r"\s", r"^\S+$", r"^a\.b$", "^(?:a|)b$", "",
    "^$", "^(?P<n>a)b$", "^(?<n>a)b$", r"^[\w-]+$", "^a.*b$", "^[a-zé]+$", r"^\/a$", r"^[\]\[^-]+$", "^a$|^b$",
    r"^\x41$",
]  # fmt: skip
TEXTS = st.text(alphabet="abcdAé0_. -/][^\t", max_size=5)


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=60)
@given(text=TEXTS)
def test_a_pattern_finds_what_it_found(pattern: str, text: str) -> None:
    python = pattern.replace("(?<n>", "(?P<n>")
    flags = re.ASCII  # what \d and \w mean in JSON Schema
    escaped = json.dumps(text, ensure_ascii=False)[1:-1] != text
    found = re.search(python, text, flags) is not None
    assert (re.fullmatch(in_string(pattern), text) is not None) == (found and not escaped)
    assert (re.fullmatch(whole(pattern), text) is not None) == (re.fullmatch(python, text, flags) is not None)


@pytest.mark.parametrize(
    ("pattern", "lengths", "right", "wrong"),
    [
        ("^[ab]*$", (2, 3), ["ab", "aba"], ["a", "abab"]),
        ("^[ab]+$", (0, 2), ["a", "ab"], ["", "aba"]),
        ("^a{2,9}$", (3, None), ["aaa"], ["aa"]),
        ("^ab$", (1, 5), ["ab"], ["a"]),
    ],
)
def test_lengths_are_worked_into_a_pattern(pattern, lengths, right, wrong) -> None:
    written = in_string(pattern, lengths)
    assert all(re.fullmatch(written, text) for text in right) and not any(re.fullmatch(written, text) for text in wrong)


@given(names=st.lists(st.text(alphabet='ab名"', max_size=4), min_size=1, max_size=4), text=st.text('ab名"', max_size=5))
def test_other_names_are_all_but_the_declared(names, text) -> None:
    written = re.fullmatch(other_than(names), text) is not None
    assert written == (text not in names and '"' not in text)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\s$", "\t\u00a0\u2028", "a\ufeff\u3000\x1c"),
        (r"^\S$", "aé", " \ufeff\u3000\x1c"),
        (r"^[^\s]$", "aé", " \ufeff\u3000\x1c"),
        (r"^[^\S]$", "\t\u00a0\u2028", "a\ufeff\u3000\x1c"),
    ],
)
def test_white_space_is_what_all_libraries_say(pattern: str, right: str, wrong: str) -> None:
    written = whole(pattern[1:-1])
    assert all(re.fullmatch(written, c) for c in right) and not any(re.fullmatch(written, c) for c in wrong)


REFUSED = ["(?=a)b", "(?!a)b", "(?<=a)b", r"(a)\1", r"\bab", "a^b", "(?i)a", "(?i:a)b", r"\p{L}", "(a", "a{999999}"]


@pytest.mark.parametrize("pattern", [*REFUSED, "x" * 5000, "(" * 200 + "a" + ")" * 200])
def test_what_a_grammar_cannot_follow_is_refused(pattern: str) -> None:
    for read in (whole, in_string):
        with pytest.raises(Unsupported):
            read(pattern)
