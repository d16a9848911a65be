"""One choice's reading of frames: each token once, whatever comes twice, and log-probabilities in step with text."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.engine.wire.messages import FinishReason, TokenFrame, TokenLogprob, Usage
from noria.gateway.choice import ChoiceReader, Delta, TextOptions
from noria.gateway.errors import DeadlineExpired, EngineFault, Overloaded, RequestCancelled
from noria.gateway.text.pieces import Piece, ReasoningPiece, TextPiece, ToolCallPiece, joined

TEXT = "Hell🎉 wörld, one two three."


def frames(ids, cuts, *, epoch=1, finish=FinishReason.LENGTH, scored=False):
    """The ids in frames cut at these places."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    made = []
    for start, end in itertools.pairwise(edges):
        last = end == len(ids)
        scores = [TokenLogprob(i, -0.5, [(i, -0.5)]) for i in ids[start:end]] if scored else None
        usage = Usage(3, len(ids), 1) if last else None
        made.append(TokenFrame("r", epoch, start, ids[start:end], scores, finish if last else None, usage))
    return made


def read(reader, given_frames) -> Delta:
    whole = Delta(0)
    for frame in given_frames:
        delta = reader.accept(frame)
        assert whole.finish is None or not delta, "something came after the end"
        whole.extend(delta) if delta else None
    return whole


@given(st.lists(st.integers(1, 40)), st.lists(st.integers(1, 40)), st.integers(0, 8))
def test_a_request_taken_over_by_another_engine_reads_as_if_nothing_had_happened(tokenizer, cuts, other_cuts, heard):
    ids = tokenizer.encode(TEXT)
    first = frames(ids, cuts)[:-1][:heard]
    again = frames(ids, other_cuts, epoch=2)
    zombie = frames(ids, cuts)[:heard]  # the old engine still speaks
    again[-1] = msgspec.structs.replace(again[-1], predicted=(2, 1))
    reader = ChoiceReader(0, tokenizer, TextOptions())
    whole = read(reader, [*first, *first, *again, *zombie, *again])
    assert (reader.predicted_right, reader.predicted_wrong) == (2, 1)
    assert whole.text == TEXT
    assert whole.finish == "length"
    assert (reader.num_tokens, reader.prompt_tokens, reader.cached_tokens) == (len(ids), 3, 1)


@given(
    st.lists(st.integers(1, 40)),
    st.lists(st.sampled_from(["🎉", " w", "ld, one", "two", "xyz", "three.?"]), max_size=3),
)
def test_text_and_logprobs_do_not_depend_on_how_frames_are_cut(tokenizer, cuts, stops):
    ids = tokenizer.encode(TEXT)
    options = TextOptions(stop=tuple(dict.fromkeys(stops)), logprobs=True)
    one_by_one = ChoiceReader(0, tokenizer, options)
    batched = ChoiceReader(0, tokenizer, options)
    want = read(one_by_one, frames(ids, range(40), scored=True))
    assert read(batched, frames(ids, cuts, scored=True)) == want
    assert batched.num_tokens == one_by_one.num_tokens
    found = [TEXT.index(stop) for stop in stops if stop in TEXT]
    assert want.text == TEXT[: min(found, default=len(TEXT))]
    assert want.finish == ("stop" if found else "length")
    spelled = b"".join(tokenizer.token_bytes(token.score.token_id) for token in want.tokens).decode("utf-8")
    assert spelled.startswith(want.text), "entries spell at least the text"
    assert all(token.offset < len(want.text) for token in want.tokens), "no entry lies past the text"


def test_a_stop_string_ends_the_choice_at_the_token_that_completes_it(tokenizer):
    ids = tokenizer.encode(TEXT)
    reader = ChoiceReader(0, tokenizer, TextOptions(stop=("two",)))
    whole = read(reader, frames(ids, []))
    assert (whole.text, whole.finish) == (TEXT[: TEXT.index("two")], "stop")
    assert reader.num_tokens == len(tokenizer.encode(TEXT[: TEXT.index("two") + 3]))
    assert reader.stopped_by_text, "the engine has to be told, had it not ended by itself"


def test_the_end_token_is_counted_but_neither_shown_nor_listed(tokenizer):
    eos = tokenizer.control_tokens["<|im_end|>"]
    ids = [*tokenizer.encode("Hi"), eos]
    options = TextOptions(end_ids=frozenset((eos,)), logprobs=True)
    reader = ChoiceReader(0, tokenizer, options)
    whole = read(reader, frames(ids, range(9), finish=FinishReason.STOP, scored=True))
    assert (whole.text, whole.finish, len(whole.tokens)) == ("Hi", "stop", len(ids) - 1)
    assert reader.num_tokens == len(ids)


def test_a_stop_token_that_is_text_is_not_shown_either(tokenizer):
    ids = tokenizer.encode("Hi!")
    reader = ChoiceReader(0, tokenizer, TextOptions(end_ids=frozenset((ids[-1],))))
    assert read(reader, frames(ids, [], finish=FinishReason.STOP)).text == "Hi"


def test_a_character_cut_short_at_the_end_becomes_one_replacement_character(tokenizer):
    ids = tokenizer.encode("a🎉")[:-1]
    reader = ChoiceReader(0, tokenizer, TextOptions())
    assert read(reader, frames(ids, range(9))).text == "a�"


def test_min_tokens_keeps_stop_strings_waiting(tokenizer):
    ids = tokenizer.encode("a.b.c.")
    reader = ChoiceReader(0, tokenizer, TextOptions(stop=(".",), min_tokens=3))
    assert read(reader, frames(ids, range(9))).text == "a.b"


def test_a_gap_is_an_error_and_no_silent_loss(tokenizer):
    ids = tokenizer.encode(TEXT)
    first, *_, last = frames(ids, range(40))
    reader = ChoiceReader(0, tokenizer, TextOptions())
    reader.accept(first)
    with pytest.raises(EngineFault):
        reader.accept(last)


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (FinishReason.ERROR, EngineFault),
        (FinishReason.EXPIRED, DeadlineExpired),
        (FinishReason.OVERLOADED, Overloaded),
        (FinishReason.CANCELLED, RequestCancelled),
    ],
)
def test_bad_endings_are_raised(tokenizer, finish, error):
    reader = ChoiceReader(0, tokenizer, TextOptions())
    with pytest.raises(error):
        reader.accept(TokenFrame("r", 1, 0, [], finish=finish, error="why"))
    assert reader.ended


def test_a_forgotten_request_may_start_again_under_a_lower_epoch(tokenizer):
    ids = tokenizer.encode(TEXT)
    reader = ChoiceReader(0, tokenizer, TextOptions())
    early = read(reader, frames(ids, [4], epoch=7)[:1]).text
    reader.restart_epoch()
    assert early + read(reader, frames(ids, [9], epoch=1)).text == TEXT


class Slashes:
    """Thoughts up to the first slash, text up to the second, then one call."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._slashes = 0
        self._held = ""

    @property
    def reasoning(self) -> bool:
        return self._slashes == 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for n, part in enumerate((self._held + text).split("/")):
            if n:
                self._slashes += 1
                if self._slashes == 2:
                    pieces.append(ToolCallPiece(0, self._id, "f", ""))
            if part and self._slashes < 2:
                pieces.append((ReasoningPiece, TextPiece)[self._slashes](part))
            elif part:
                pieces.append(ToolCallPiece(0, None, None, part))
        return pieces

    def finish(self) -> list[Piece]:
        return [ToolCallPiece(0, None, None, "!")]


@given(st.lists(st.integers(1, 40)), st.sampled_from([(), ("two",), ("/x",)]), st.booleans())
def test_a_parser_sees_the_visible_text_however_frames_are_cut(tokenizer, cuts, stops, logprobs):
    eos = tokenizer.control_tokens["<|im_end|>"]
    ids = [*tokenizer.encode("Hmm 🎉/One"), eos, *tokenizer.encode("/two x")]
    options = TextOptions(stop=stops, logprobs=logprobs, spelled=frozenset((eos,)), parser=Slashes)
    reader = ChoiceReader(0, tokenizer, options, "id")
    whole = read(reader, frames(ids, cuts, scored=logprobs))
    parts = joined(whole.pieces)
    assert (parts.reasoning, parts.text) == ("Hmm 🎉", "One<|im_end|>")
    assert whole.text == "Hmm 🎉/One<|im_end|>/" + ("" if stops == ("two",) else "two x")
    (call,) = parts.calls
    assert (call.id, call.name, call.arguments) == ("id", "f", "!" if stops == ("two",) else "two x!")
    held_by_a_stop = stops == ("/x",)  # the slash is seen a token later
    assert reader.reasoning_tokens == len(tokenizer.encode("Hmm 🎉")) + held_by_a_stop


def test_without_a_parser_there_are_no_pieces(tokenizer):
    assert read(ChoiceReader(0, tokenizer, TextOptions()), frames(tokenizer.encode("a/b/c"), [2])).pieces == []
