"""Log-probabilities as JSON: chat's entries, rendered once for streams and for whole answers alike.

Knows tokens only through a tokenizer that spells them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import orjson

from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.choice import ScoredToken

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot spell."""

_KNOWN_ENTRIES = 1 << 16
"""Tokens whose spelling is kept: about 200 bytes each."""


def chat_entries(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, *, as_ids: bool = False
) -> list[orjson.Fragment]:
    """One entry per token, with its bytes and its `num_top` best alternatives, best first. `as_ids`: tokens are called
    by their id, as vLLM does."""
    return [_with_alternatives(tokenizer, token, num_top, as_ids) for token in tokens]


def finite(logprob: float) -> float:
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def _with_alternatives(tokenizer: Tokenizer, token: ScoredToken, num_top: int, as_ids: bool) -> orjson.Fragment:
    score = token.score
    top = b",".join([_entry(tokenizer, *pair, as_ids) + b"}" for pair in score.top[:num_top]])
    own = _entry(tokenizer, score.token_id, score.logprob, as_ids)
    return orjson.Fragment(b'%s,"top_logprobs":[%s]}' % (own, top))


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float, as_id: bool) -> bytes:
    """An object that is still open."""
    before, behind = _spelled(tokenizer, token_id, as_id)
    return before + orjson.dumps(finite(logprob)) + behind


@functools.lru_cache(maxsize=_KNOWN_ENTRIES)
def _spelled(tokenizer: Tokenizer, token_id: int, as_id: bool) -> tuple[bytes, bytes]:
    """What stands before and behind the number."""
    name = f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)
    spelled = list(tokenizer.token_bytes(token_id, spell_control=True))
    return b'{"token":%s,"logprob":' % orjson.dumps(name), b',"bytes":%s' % orjson.dumps(spelled)
