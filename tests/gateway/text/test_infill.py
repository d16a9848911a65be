"""Prompts for filling in the middle, in the order that each format was trained with."""

from __future__ import annotations

import msgspec
import pytest

from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.text.infill import infill_prompt
from tests.gateway.conftest import tokenizer_files

FORMATS = {
    "qwen": ["<|fim_prefix|>", "ab", "<|fim_suffix|>", "cd", "<|fim_middle|>"],
    "starcoder": ["<fim_prefix>", "ab", "<fim_suffix>", "cd", "<fim_middle>"],
    "deepseek": ["<｜fim▁begin｜>", "ab", "<｜fim▁hole｜>", "cd", "<｜fim▁end｜>"],
    "code llama": ["▁<PRE>", "ab", "▁<SUF>", "cd", "▁<MID>"],
    "codestral": ["[SUFFIX]", "cd", "[PREFIX]", "ab"],
}


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, add_bos: bool) -> None:
    parts = FORMATS[name]
    specials = [part for part in parts if part not in ("ab", "cd")]
    files = tokenizer_files(*specials, *(["[MIDDLE]"] if name == "codestral" else []))
    tokenizer = Tokenizer.load(msgspec.structs.replace(files, add_bos=add_bos))
    start = [tokenizer.bos_id] if add_bos else []
    ids = [[tokenizer.control_tokens[part]] if part in specials else tokenizer.encode(part) for part in parts]
    expected = [token_id for part in ids for token_id in part]
    assert infill_prompt(tokenizer, [*start, *tokenizer.encode("ab")], "cd") == [*start, *expected]


def test_a_vocabulary_without_the_tokens_has_no_such_prompt(tokenizer: Tokenizer) -> None:
    assert infill_prompt(tokenizer, tokenizer.encode("ab"), "cd") is None
