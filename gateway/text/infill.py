"""A prompt for filling in the middle, in the formats that models were trained on; told from the vocabulary.

Knows token ids and spellings; no request and no network.
"""

from __future__ import annotations

from dataclasses import dataclass

from noria.engine.wire.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Format:
    """Spellings of the tokens before the text ahead of the gap, before the text behind it, and before what fills it.
    `suffix_first`: the text behind comes first, and what fills the gap follows the text ahead of it."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


_FORMATS = (
    _Format("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Format("[PREFIX]", "[SUFFIX]", "[MIDDLE]", suffix_first=True),  # Codestral
)


def infill_prompt(tokenizer: Tokenizer, before: list[int], after: str) -> list[int] | None:
    """Ids that ask for what stands between the tokens `before` and the text `after`; None where the vocabulary has no
    tokens for it. A BOS token at the start of `before` stays first."""
    for form in _FORMATS:
        prefix, suffix, middle = map(tokenizer.added_tokens.get, (form.prefix, form.suffix, form.middle))
        if prefix is None or suffix is None or middle is None:
            continue
        start, rest = _without_bos(tokenizer, before)
        behind = tokenizer.encode(after, first=False)
        if form.suffix_first:
            return [*start, suffix, *behind, prefix, *rest]
        return [*start, prefix, *rest, suffix, *behind, middle]
    return None


def _without_bos(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[int], list[int]]:
    has_bos = tokenizer.add_bos and ids[:1] == [tokenizer.bos_id]
    return (ids[:1], ids[1:]) if has_bos else ([], ids)
