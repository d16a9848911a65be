"""Compiling, following and masking with the demo model's own vocabulary; what a bad grammar does to the next one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from bench.grammar_walk import allowed
from noria.engine.execution.step import NoMask
from noria.engine.grammar import matcher as matcher_module
from noria.engine.grammar.binding import GrammarError, GrammarsUnavailable
from noria.engine.grammar.grammars import Grammars
from noria.engine.grammar.matcher import MaskFiller, Matcher, PendingMask, Words
from noria.engine.wire.messages import Grammar, TokenizerFiles

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "tags": {"type": "array", "items": {"enum": ["ä", 1]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
# Over a minute of an idle core.
SLOW = Grammar("json_schema", json.dumps({"type": "string", "pattern": "^(?:[^x]{0,50}){0,40}$"}))
LARGE = Grammar("choice", json.dumps([f"{i * 7919 % 100_003:05} {'x' * 60}" for i in range(20_000)]))
AMBIGUOUS = Grammar("ebnf", 'root ::= a a a a a a\na ::= [a-z]* b\nb ::= [a-z]* a | ""')


def refusal(grammars: Grammars, grammar: Grammar) -> str:
    with pytest.raises(GrammarError) as caught:
        grammars.compile(grammar).result(60)
    return str(caught.value)


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CHOICES = ["yes", 'no, "thanks"\n', "naïve 🎉", "a\\b"]
CALL = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
    "end": "</f>",
}


@pytest.mark.parametrize(
    ("grammar", "holds"),
    [
        (Grammar("json_schema", json.dumps(SCHEMA)), fits_schema),
        (Grammar("json_object"), is_object),
        (Grammar("regex", r"[a-c]{2,3}-\d+"), lambda text: re.fullmatch(r"[a-c]{2,3}-[0-9]+", text)),
        (Grammar("ebnf", 'root ::= "<" inner ">"\ninner ::= "é" | "x" inner'), lambda t: re.fullmatch("<x*é>", t)),
        (Grammar("choice", json.dumps(CHOICES)), lambda text: text in CHOICES),
        (
            Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": CALL})),
            lambda text: isinstance(json.loads(text.removeprefix("<f>").removesuffix("</f>")), int),
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_whatever_the_masks_allow_matches(smollm_grammars, smollm_walker, grammar, holds) -> None:
    texts = list(smollm_walker.texts(smollm_grammars.compile(grammar).result(60), 12))
    assert len(texts) >= 6
    assert all(holds(text) for text in texts)


def test_white_space_in_json_is_bounded(smollm_grammars, smollm_tokenizer) -> None:
    matcher = smollm_grammars.compile(Grammar("json_object")).result(60).matcher(smollm_tokenizer.encode("{"))
    space = smollm_tokenizer.encode(" ")
    assert sum(matcher.accept(space) for _ in range(50)) == 8


def test_strings_of_bounded_length_hold_no_raw_control_character(smollm_grammars, smollm_tokenizer) -> None:
    compiled = smollm_grammars.compile(Grammar("json_schema", '{"type":"string","maxLength":9}')).result(60)
    words = compiled.matcher(smollm_tokenizer.encode('"a')).mask().words()[0]
    texts = [smollm_tokenizer.token_bytes(token) for token in allowed(words, 49152)]
    assert len(texts) > 10_000 and not any(byte < 32 for text in texts for byte in text)


def test_control_tokens_are_never_allowed(smollm_grammars, smollm_tokenizer) -> None:
    compiled = smollm_grammars.compile(Grammar("regex", "(.|\n)*")).result(60)
    ids = set(allowed(compiled.matcher().mask().words()[0], 49152).tolist())
    assert len(ids) > 48_000 and ids & set(smollm_tokenizer.control_tokens.values()) == {EOS}


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("regex", "a("), "Regex parsing error"),
        (Grammar("ebnf", 'root ::= "a'), "EBNF lexer error at line 1"),
        (Grammar("ebnf", 'other ::= "a"'), 'The root rule with name "root" is not found'),
        (Grammar("json_schema", '{"type":"thing"}'), "Unsupported type"),
        (Grammar("json_schema", "[" * 3000), ""),
        (Grammar("structural_tag", "{}"), "must have a format field"),
        (Grammar("haiku", "5-7-5"), "unknown kind"),
        (AMBIGUOUS, "too ambiguous"),
        (Grammar("ebnf", "root ::= [^\\x00-\\U0010FFFF]"), ""),
    ],
)
def test_a_refusal_says_why_and_nothing_of_the_library(smollm_grammars, grammar, says) -> None:
    message = refusal(smollm_grammars, grammar)
    assert says in message and "/project" not in message and "Check failed" not in message


def test_two_that_ask_for_one_grammar_pay_once(smollm_grammars: Grammars) -> None:
    grammar = Grammar("regex", "[0-9]{3}")
    before = smollm_grammars.counts.compiled
    first, second = smollm_grammars.compile(grammar), smollm_grammars.compile(grammar)
    assert first is second and first.result(60)
    assert smollm_grammars.compile(Grammar("regex", "[0-9]{3}", param="other")) is first
    assert smollm_grammars.counts.compiled == before + 1 and smollm_grammars.counts.hits >= 2


@pytest.mark.parametrize(
    ("limits", "grammar", "says"),
    [({"seconds": 1.0}, SLOW, "longer than 1 seconds"), ({"seconds": 60.0, "num_bytes": 16 * 2**20}, LARGE, "memory")],
    ids=["time", "memory"],
)
def test_a_limit_ends_a_grammar_and_not_the_next(smollm_files: TokenizerFiles, limits, grammar, says) -> None:
    grammars = Grammars(smollm_files, vocab_size=49152, stop_token_ids=[EOS], **limits)
    try:
        assert says in refusal(grammars, grammar)
        assert grammars.compile(Grammar("regex", "[g-k]+")).result(60)
        assert grammars.compile(grammar).done(), "what hit a limit is not tried again at once"
        assert (grammars.counts.failed, grammars.counts.compiled) == (1, 1)
    finally:
        grammars.close()


def test_what_was_given_up_takes_no_turn_and_can_be_asked_for_again(smollm_files: TokenizerFiles) -> None:
    grammars = Grammars(smollm_files, vocab_size=49152, stop_token_ids=[EOS], seconds=20)
    try:
        patience = grammars.patience
        first = [grammars.compile(Grammar("regex", text)) for text in "ab"]  # both turns, while processes start
        given_up = Grammar("regex", "[a-f]+")
        assert grammars.compile(given_up).cancel()
        assert grammars.compile(given_up).result(60)
        assert all(future.result(60) for future in first) and grammars.counts.compiled == 3
        assert grammars.patience < patience, "the first of all waits for the process as well"
    finally:
        grammars.close()


def test_a_library_that_is_not_there_is_the_servers_fault(
    smollm_files: TokenizerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tvm_ffi.py").write_text("raise ModuleNotFoundError('No module named tvm_ffi')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    grammars = Grammars(smollm_files, vocab_size=49152, stop_token_ids=[EOS])
    try:
        with pytest.raises(GrammarsUnavailable, match="cannot be loaded here: No module named tvm_ffi"):
            grammars.compile(Grammar("regex", "a")).result(60)
        (tmp_path / "tvm_ffi.py").unlink()
        assert grammars.compile(Grammar("regex", "a")).result(60), "mended while the engine runs"
    finally:
        grammars.close()


def test_masks_after_drafts_are_those_after_the_tokens(smollm_grammars, smollm_tokenizer) -> None:
    compiled = smollm_grammars.compile(Grammar("json_schema", json.dumps(SCHEMA))).result(60)
    drafts = smollm_tokenizer.encode('{"name": "ab')
    ahead, step_by_step = compiled.matcher(), compiled.matcher()
    words = ahead.mask(drafts).words()
    assert words.shape == (len(drafts) + 1, 49152 // 32)
    for place, token in enumerate([*drafts, None]):
        assert np.array_equal(words[place], step_by_step.mask().words()[0])
        if token is not None:
            assert step_by_step.accept([token])
    assert np.array_equal(ahead.mask().words()[0], words[0]), "looking ahead changed the state"


def test_nothing_is_allowed_after_a_draft_that_does_not_match(smollm_grammars, smollm_tokenizer) -> None:
    compiled = smollm_grammars.compile(Grammar("regex", "abc|abd")).result(60)
    words = compiled.matcher().mask([*smollm_tokenizer.encode("x"), *smollm_tokenizer.encode("y")]).words()
    assert words[0].any() and not words[1].any() and not words[2].any()


def test_a_matcher_goes_on_after_what_was_delivered(smollm_grammars, smollm_tokenizer) -> None:
    compiled = smollm_grammars.compile(Grammar("regex", "[a-z]+-[0-9]{2}")).result(60)
    delivered = smollm_tokenizer.encode("ship-4")
    matcher = compiled.matcher(delivered)
    assert matcher.accept(smollm_tokenizer.encode("2"))
    assert allowed(matcher.mask().words()[0], 49152).tolist() == [EOS]
    with pytest.raises(GrammarError):
        compiled.matcher(smollm_tokenizer.encode("ship 4"))


class _Stuck(Matcher):
    """Its masks take longer than anybody waits."""

    def __init__(self, filler: MaskFiller, seconds: float) -> None:
        self._filler = filler
        self._seconds = seconds

    def fill(self, drafts: Sequence[int] = ()) -> Words:
        time.sleep(self._seconds)
        return np.ones((1, 2), np.int32)


def test_a_mask_that_does_not_come_costs_its_own_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "PATIENCE", 0.1)
    filler = MaskFiller()
    masks: list[PendingMask] = [_Stuck(filler, s).mask() for s in (0.0, 1.0, 0.0, 0.0)]
    started = time.monotonic()
    assert masks[0].words().all()
    with pytest.raises(NoMask):
        masks[1].words()
    assert all(mask.words().all() for mask in masks[2:])
    assert _Stuck(filler, 0.0).mask().words().all(), "another thread has taken over"
    assert time.monotonic() - started < 0.8
    filler.close()
