"""Output items: whatever way an answer arrives, its items are the same, and its events tell of them alone."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.engine.wire.messages import TokenLogprob
from noria.gateway.choice import Delta, ScoredToken
from noria.gateway.responses.events import EventWriter
from noria.gateway.responses.output import OutputItems, replay
from noria.gateway.text.pieces import Piece, ReasoningPiece, TextPiece, ToolCallPiece

GROUP = "0" * 28


def delta(*pieces: Piece, tokens: int = 0, finish: Any = None) -> Delta:
    scored = [ScoredToken(TokenLogprob(n, -0.5, []), 0) for n in range(tokens)]
    text = "".join("" if isinstance(piece, ToolCallPiece) else piece.text for piece in pieces)
    return Delta(0, text=text, tokens=scored, pieces=list(pieces), finish=finish)


def run(deltas: list[Delta], finish: Any = "stop") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Items and events."""
    events = EventWriter()
    output = OutputItems(GROUP, parsed=True, logprobs=lambda tokens: [{"token": len(tokens)}], events=events)
    for one in deltas:
        output.add(one)
    output.end(finish)
    return output.items, parsed(events)


def parsed(events: EventWriter) -> list[dict[str, Any]]:
    lines = events.take().decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as the deltas alone tell of them: (type, text)."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            found.append({"type": event["item"]["type"], "text": ""})
        elif "delta" in event:
            assert event["output_index"] == len(found) - 1
            found[-1]["text"] += event["delta"]
    return found


def summed(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": item["type"], "text": item["arguments"] if "arguments" in item else item["content"][0]["text"]}
        for item in items
    ]


texts = st.text(max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[Piece]:
    """Pieces as a parser gives them: thoughts, text and calls, calls numbered from 0 and never gone back to."""
    pieces: list[Piece] = []
    calls = -1
    for kind in draw(st.lists(st.sampled_from("trcm"), max_size=12)):
        if kind == "t":
            pieces.append(TextPiece(draw(texts)))
        elif kind == "r":
            pieces.append(ReasoningPiece(draw(texts)))
        elif kind == "m" and pieces and isinstance(pieces[-1], ToolCallPiece):
            pieces.append(ToolCallPiece(calls, None, None, draw(texts)))
        else:
            calls += 1
            pieces.append(ToolCallPiece(calls, f"call_{calls}", f"f{calls}", draw(texts)))
    return pieces


@settings(max_examples=150)
@given(answers(), st.data())
def test_items_do_not_depend_on_how_they_arrive(pieces: list[Piece], data: st.DataObject) -> None:
    singly, events = run([delta(piece) for piece in pieces])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=4)))
    groups = [pieces[a:b] for a, b in zip([0, *cuts], [*cuts, len(pieces)], strict=True)]
    merged, _ = run([delta(*group) for group in groups])
    assert merged == singly
    assert told(events) == summed(singly)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == singly and len({item["id"] for item in done}) == len(done)


@settings(max_examples=50)
@given(answers())
def test_a_replay_tells_of_the_same_items(pieces: list[Piece]) -> None:
    items, events = run([delta(piece) for piece in pieces])
    again = EventWriter()
    replay(items, again)
    replayed = parsed(again)
    assert [e["item"] for e in replayed if e["type"].endswith("item.done")] == items
    kinds = [e["type"] for e in events if "delta" not in e]
    assert [e["type"] for e in replayed if "delta" not in e] == kinds


def test_only_text_for_the_user_has_scores() -> None:
    thought = delta(ReasoningPiece("hm"), tokens=2)
    marks = Delta(0, text="</think>", tokens=[ScoredToken(TokenLogprob(9, -0.5, []), 0)])
    held, said = delta(tokens=1), delta(TextPiece("so"), tokens=1)
    call = delta(ToolCallPiece(0, "call_0", "f", "{}"), tokens=3)
    items, events = run([thought, held, said, call, marks])
    assert items[1]["content"][0]["logprobs"] == [{"token": 2}]
    assert [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"] == [[{"token": 2}]]


def test_what_is_cut_off_is_incomplete() -> None:
    items, _ = run([delta(TextPiece("a")), delta(ToolCallPiece(0, "call_0", "f", '{"a'))], "length")
    assert [item["status"] for item in items] == ["completed", "incomplete"]
    assert items[1]["arguments"] == '{"a'


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    items, _ = run([])
    assert [item["type"] for item in items] == ["message"] and items[0]["content"][0]["text"] == ""
