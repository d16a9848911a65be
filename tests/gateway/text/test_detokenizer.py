"""However ids are split over calls, the text is that of the whole. Knows the demo vocabulary only."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.text.detokenizer import Detokenizer


def _pieces(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@given(st.data(), st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 260)), max_size=24))
def test_any_split_of_any_ids(tokenizer: Tokenizer, data: st.DataObject, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.feed(piece) for piece in _pieces(data, ids)) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=40))
def test_one_token_at_a_time_gives_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text)
    whole, pieces = tokenizer.decode(ids), [detokenizer.feed([token_id]) for token_id in ids]
    assert "".join(pieces) == whole  # nothing is left to flush after whole characters
    assert detokenizer.flush() == ""
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_short_ends_in_a_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    first = tokenizer.encode("𝄞")[0]
    assert detokenizer.feed([first]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_white_space_and_control_tokens(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("  \n\t a  \n"), 2]
    assert Detokenizer(tokenizer).feed(ids) == "  \n\t a  \n"
    assert Detokenizer(tokenizer, {1, 2}).feed(ids) == "<|im_start|>  \n\t a  \n<|im_end|>"
    assert Detokenizer(tokenizer, {2}).feed([2]) == "<|im_end|>"
    assert Detokenizer(tokenizer).feed([2]) == Detokenizer(tokenizer).feed([]) == ""


def test_a_token_costs_microseconds(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 1000)
    detokenizer = Detokenizer(tokenizer)
    start = time.process_time()
    for token_id in ids:
        detokenizer.feed([token_id])
    each = (time.process_time() - start) / len(ids)
    assert each < 5e-6, f"{each * 1e6:.2f} us per token"  # about 0.3 us on an idle core
