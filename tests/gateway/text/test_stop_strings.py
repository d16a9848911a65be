"""Stop strings against a plain search of the whole text. Knows no tokens."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.gateway.text.stop_strings import StopStrings


def _expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    start, length = min(found)
    return text[: start + length * include], True


def _streamed(pieces: list[str], stops: list[str], include: bool) -> tuple[str, bool]:
    watch = StopStrings(stops, include_stop_str_in_output=include)
    shown = ""
    for piece in pieces:
        emit, stopped = watch.feed(piece)
        shown += emit
        assert stopped == watch.stopped
    shown += watch.flush()
    assert watch.flush() == ""
    assert (watch.matched is not None) == watch.stopped
    return shown, watch.stopped


@settings(max_examples=800)
@given(
    st.lists(st.text("ab.", max_size=5), max_size=10),
    st.lists(st.text("ab.", min_size=1, max_size=6), max_size=4),
    st.booleans(),
)
def test_any_split_is_cut_as_the_whole(pieces: list[str], stops: list[str], include: bool) -> None:
    assert _streamed(pieces, stops, include) == _expected("".join(pieces), stops, include)


@given(st.lists(st.text(max_size=8), max_size=6), st.data())
def test_stops_taken_from_the_text(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stops.append(text[start : start + data.draw(st.integers(1, 9))] or "unseen")
    assert _streamed(pieces, stops, False) == _expected(text, stops, False)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    shown = ""
    for end, char in enumerate(text, 1):
        emit, stopped = watch.feed(char)
        shown += emit
        if stopped:
            return
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_an_earlier_start_is_waited_for() -> None:
    watch = StopStrings(["cd", "abcdef"])
    assert watch.feed("xabcde") == ("x", False)
    assert watch.feed("f") == ("", True)
    assert watch.matched == "abcdef"
    watch = StopStrings(["cd", "abcdef"])
    assert watch.feed("xabcd") == ("x", False)
    assert watch.feed("!") == ("ab", True)
    assert watch.matched == "cd"
    watch = StopStrings(["cd", "abcdef"])
    assert watch.feed("abcde") == ("", False)
    assert watch.flush() == "ab" and watch.stopped


def test_the_shorter_of_two_that_start_together_ends_the_text() -> None:
    watch = StopStrings(["END", "EN"])
    assert watch.feed("the EN") == ("the ", True)
    assert watch.matched == "EN"
    assert watch.feed("D more") == ("", True)
    assert watch.flush() == ""


def test_no_stops_pass_everything() -> None:
    watch = StopStrings()
    assert watch.feed("any text") == ("any text", False)
    assert watch.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_cost_is_linear_for_a_nasty_text() -> None:
    watch = StopStrings(["a" * 2000 + "b", "a" * 1999 + "c"])
    start = time.process_time()
    shown = "".join(watch.feed("a" * 5)[0] for _ in range(20_000))
    assert time.process_time() - start < 3
    assert len(shown) + len(watch.flush()) == 100_000
