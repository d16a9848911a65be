"""A prompt as it is shown before its continuation: its text, and its tokens with their places in it.

Knows no endpoint and no scores.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.schemas.prompted import Prompt
from noria.gateway.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets` are in characters of `text`; `num_hidden` are leading tokens that the client did not write: the BOS."""

    text: str
    token_ids: list[int]
    offsets: list[int]
    num_hidden: int


def echo(tokenizer: Tokenizer, prompt: Prompt, ids: list[int], spelled: Container[int]) -> Echo:
    """How `prompt`, which became `ids`, is shown; a text is shown as it was given."""
    num_hidden = 0
    if isinstance(prompt, str) and ids[0] in (tokenizer.bos_id, tokenizer.eos_id) and (tokenizer.add_bos or not prompt):
        num_hidden = 1
    shown = ids[num_hidden:]
    detokenizer, offsets, num_chars, parts = Detokenizer(tokenizer, spelled), [], 0, []
    for token_id in shown:
        offsets.append(num_chars)
        parts.append(detokenizer.feed((token_id,)))
        num_chars += len(parts[-1])
    text = prompt if isinstance(prompt, str) else "".join(parts) + detokenizer.flush()
    return Echo(text, shown, offsets, num_hidden)
