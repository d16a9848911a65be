"""Ids to text as they come, never a broken character, never a lost space.

This file knows no stop strings, requests or network.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from noria.engine.wire.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one growing sequence of output ids.

    However the ids are split over calls, the pieces and the final `flush` join to the text of the whole. A character
    whose bytes are spread over several tokens is held back until it is whole; bytes that can no longer become one
    give U+FFFD. Control tokens add nothing unless `spell_control`.
    """

    def __init__(self, tokenizer: Tokenizer, *, spell_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._strings = tokenizer.token_strings
        self._spell_control = spell_control
        self._decoder = _utf8_decoder("replace")
        self._open = False  # bytes of an unfinished character are held in the decoder

    def feed(self, ids: Sequence[int]) -> str:
        """New text that `ids` complete; "" while a character is unfinished."""
        if len(ids) == 1 and not self._open and not self._spell_control:
            token_id = ids[0]
            if 0 <= token_id < len(self._strings):
                text = self._strings[token_id]
                if text is not None:
                    return text
        token_bytes = self._tokenizer.token_bytes
        spell = self._spell_control
        text = self._decoder.decode(b"".join([token_bytes(token_id, spell_control=spell) for token_id in ids]))
        self._open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is held back at the end of the sequence: U+FFFD for a character cut short, else ""."""
        if not self._open:
            return ""
        self._open = False
        return self._decoder.decode(b"", True)
