"""Ids <-> text of one model, from the files that its engine published; ids mean nothing without it.

This file knows no chat template, network or torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import tokenizers

from noria.engine.wire.control_tokens import ControlTokens
from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.tiktoken_encoder import TiktokenEncoder, tiktoken_encoder
from noria.engine.wire.token_bytes import UnsupportedTokenizer, bytes_by_id

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Encoder and byte tables of one model. Immutable after `load`, and safe to use from several threads.

    `backend` says who encodes: "tiktoken" where it gives exactly the ids of the model's own tokenizer, else
    "tokenizers". Both release the interpreter lock while they work.
    """

    vocab_size: int  # highest id + 1
    control: ControlTokens
    control_tokens: dict[str, int]  # spelling -> id
    added_tokens: dict[str, int]  # spelling -> id: the control tokens, and others that stand beside the vocabulary
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    backend: Literal["tiktoken", "tokenizers"]
    token_strings: list[str | None]
    """Text of each token that is whole UTF-8 by itself (control tokens: ""), None for the others."""

    @staticmethod
    def load(files: TokenizerFiles) -> Tokenizer:
        """A tokenizer from published files. Raises UnsupportedTokenizer (a ValueError) where they cannot be used."""
        try:
            spec = json.loads(files.tokenizer_json)
            library = _library(files.tokenizer_json)
            inner = _library(json.dumps(_without_first_space(spec))) if _prepends_to_first(spec) else library
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedTokenizer(f"the tokenizer's files cannot be read: {error}") from error
        return Tokenizer(files, spec, library, inner)

    def __init__(
        self, files: TokenizerFiles, spec: dict[str, Any], library: tokenizers.Tokenizer, inner: tokenizers.Tokenizer
    ) -> None:
        """Use `load`. `inner` encodes pieces that do not start the text (no space is put before them)."""
        added: list[dict[str, Any]] = spec.get("added_tokens") or []
        self._library = library
        self._inner = inner
        self.control = ControlTokens(added)
        self.control_tokens = self.control.ids
        self.added_tokens = {str(token["content"]): int(token["id"]) for token in added}
        self._spelling_by_id = {token_id: spelling for spelling, token_id in self.control.ids.items()}
        vocabulary = {token_id: token for token, token_id in library.get_vocab(with_added_tokens=True).items()}
        self._bytes = bytes_by_id(spec, vocabulary)
        for token_id in self._spelling_by_id:
            self._bytes[token_id] = b""
        self.token_strings = [_whole_text(token) for token in self._bytes]
        self.vocab_size = len(self._bytes)
        self.bos_id = None if files.bos_token is None else library.token_to_id(files.bos_token)
        self.eos_id = None if files.eos_token is None else library.token_to_id(files.eos_token)
        self.add_bos = files.add_bos
        self._plain_added = _plain_added(added)
        usable = self._plain_added is not None or all(token.get("special") for token in added)
        self._tiktoken: TiktokenEncoder | None = tiktoken_encoder(spec, library) if usable else None
        self.backend = "tokenizers" if self._tiktoken is None else "tiktoken"
        # Some vocabularies hold the spelling of a control token as an ordinary piece.
        unknown = {library.token_to_id(token) for token in (_unknown_token(spec),) if token is not None}
        self._control_ids = frozenset(self._spelling_by_id) - unknown
        self._spellings_leak = any(
            not self._control_ids.isdisjoint(self._encode(before + spelling, first=True))
            for spelling in self.control.ids
            for before in ("", " ")
        )

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Ids of plain text: spellings of control tokens inside stay text; no BOS is added. `first` is False for a
        text that goes on another: some vocabularies put a space before the first word.

        Lone surrogates, which no UTF-8 can carry, become U+FFFD.
        """
        return self._encode_text(text, first=first)

    def encode_template(self, text: str, guard: str | None = None) -> list[int]:
        """Ids of a rendered template: control tokens where they are spelled without a guard inside, text elsewhere.

        `guard` is the character that `control.guard` put into the users' strings; it is removed. Without any guarded
        spelling the ids are those of the library's own encoding of the text.
        """
        ids: list[int] = []
        for offset, piece, control_id in self.control.cut(text, guard or ""):
            if piece:
                ids += self._encode_text(piece.replace(guard, "") if guard else piece, first=offset == 0)
            if control_id is not None:
                ids.append(control_id)
        return ids

    def token_bytes(self, token_id: int, *, spell_control: bool = False) -> bytes:
        """Exact bytes that the token adds to a text; b"" for control tokens (unless asked) and for unknown ids."""
        if spell_control and token_id in self._spelling_by_id:
            return self._spelling_by_id[token_id].encode()
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token for a reader: control tokens spelled, U+FFFD where its bytes are no whole UTF-8."""
        return self.token_bytes(token_id, spell_control=True).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens left out, U+FFFD for broken UTF-8.

        Differs from the library for SentencePiece vocabularies alone: the space before the first word is kept, since
        the ids may go on a text, and a broken run of byte tokens follows the rules of UTF-8 decoding.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        if not text:
            return []
        if not text.isascii() and _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids = self._encode(text, first=first)
        if self._spellings_leak and not self._control_ids.isdisjoint(ids):
            pieces = self.control.break_spellings(text)
            ids = [
                token_id for n, piece in enumerate(pieces) for token_id in self._encode(piece, first=first and not n)
            ]
        return ids

    def _encode(self, text: str, *, first: bool) -> list[int]:
        if self._tiktoken is not None:
            ids = self._encode_fast(text)
            if ids is not None:
                return ids
        library = self._library if first else self._inner
        return library.encode(text, add_special_tokens=False).ids

    def _encode_fast(self, text: str) -> list[int] | None:
        assert self._tiktoken is not None
        if self._plain_added is None:
            return self._tiktoken.encode(text)
        pattern, id_by_spelling = self._plain_added
        ids: list[int] = []
        for n, piece in enumerate(pattern.split(text)):
            if n % 2:
                ids.append(id_by_spelling[piece])
            elif piece:
                part = self._tiktoken.encode(piece)
                if part is None:
                    return None
                ids += part
        return ids


def _library(tokenizer_json: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(tokenizer_json)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # spellings in text stay text
    return library


def _plain_added(added: list[dict[str, Any]]) -> tuple[re.Pattern[str], dict[str, int]] | None:
    """Pattern and ids of the added tokens that are not special: the model's tokenizer finds them in any text.

    None where there are none, or where one of them asks for more than plain matching.
    """
    plain = {token["content"]: int(token["id"]) for token in added if not token.get("special")}
    asks = ("single_word", "lstrip", "rstrip", "normalized")
    if not plain or any(token.get(ask) for token in added if not token.get("special") for ask in asks):
        return None
    return re.compile(f"({'|'.join(map(re.escape, sorted(plain, key=len, reverse=True)))})"), plain


def _prepends_to_first(node: Any) -> bool:
    if isinstance(node, list):
        return any(map(_prepends_to_first, node))
    return isinstance(node, dict) and (
        node.get("prepend_scheme") == "first" or any(_prepends_to_first(node.get(k)) for k in _NESTED)
    )


def _without_first_space(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_first_space(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = node | {key: _without_first_space(node[key]) for key in _NESTED if key in node}
    return node | {"prepend_scheme": "never"} if node.get("prepend_scheme") == "first" else node


_NESTED = ("pre_tokenizer", "pretokenizers")


def _unknown_token(spec: dict[str, Any]) -> str | None:
    model = spec["model"]
    if model.get("type") == "Unigram":
        unknown_id = model.get("unk_id")
        return None if unknown_id is None else str(model["vocab"][unknown_id][0])
    token: str | None = model.get("unk_token")
    return token


def _whole_text(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None
