"""Ids to text as they come, never a broken character, never a lost space.

This file knows no stop strings, requests or network.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence

from noria.engine.wire.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one growing sequence of output ids.

    However the ids are split over calls, the pieces and the final `flush` join to the text of the whole. A character
    whose bytes are spread over several tokens is held back until it is whole; bytes that can no longer become one
    give U+FFFD. Control tokens add nothing but for those `spelled`.
    """

    def __init__(self, tokenizer: Tokenizer, spelled: Container[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._strings = tokenizer.token_strings
        self._spelled = spelled
        self._decoder = _utf8_decoder("replace")
        self._open = False  # bytes of an unfinished character are held in the decoder

    def feed(self, ids: Sequence[int]) -> str:
        """New text that `ids` complete; "" while a character is unfinished."""
        spelled = self._spelled
        if len(ids) == 1 and not self._open:
            token_id = ids[0]
            if 0 <= token_id < len(self._strings) and token_id not in spelled:
                text = self._strings[token_id]
                if text is not None:
                    return text
        token_bytes = self._tokenizer.token_bytes
        parts = [token_bytes(token_id, spell_control=token_id in spelled) for token_id in ids]
        text = self._decoder.decode(b"".join(parts))
        self._open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is held back at the end of the sequence: U+FFFD for a character cut short, else ""."""
        if not self._open:
            return ""
        self._open = False
        return self._decoder.decode(b"", True)
