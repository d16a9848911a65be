"""The control message of one iteration and its answer: integers and sampling settings, no tensors.

What every rank needs to compute a batch travels here; workers keep no state of requests. Knows no policy.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from noria.engine.wire.messages import SamplingParams, TokenLogprob

NO_TOKEN = "the grammar allows no token here"
"""The error of a row whose grammar goes on with what the model's vocabulary cannot write."""


class NoMask(Exception):
    """A row's mask cannot be had; the message says why."""


@runtime_checkable
class Mask(Protocol):
    """Which tokens may come next, being found out while the model computes."""

    def words(self) -> NDArray[np.int32]:
        """Bits of the allowed ids, lowest first: [positions, ceil(vocab / 32)]. Raises NoMask."""


class Sampling(msgspec.Struct, frozen=True):
    """How one row chooses its next token.

    `position` is the index that the token will have in the request; together with the seed it keys the noise.
    `history` is (prompt length, all tokens) where a penalty needs it, else None. `banned` are ids that must not come
    now: the stop tokens, until `min_tokens` is reached or for ever under `ignore_eos`. `mask` is set where a grammar
    says what may come (`mask_row` in its words); it goes before everything else that is asked of a token.
    """

    params: SamplingParams
    position: int
    history: tuple[int, list[int]] | None = None
    banned: tuple[int, ...] = ()
    mask: Mask | None = None
    mask_row: int = 0


class Pooling(msgspec.Struct, frozen=True):
    """How a row's hidden states become its request's vector. `kind` is "mean" or "last". `carried` is what the chunk
    before gave (empty: there was none); `is_last` asks for the vector."""

    kind: str
    carried: bytes = b""
    is_last: bool = False


class RowInput(msgspec.Struct, frozen=True):
    """New tokens of one request: `token_ids` stand at positions `start`, `start + 1`, …

    `blocks` are those of the KV cache: of each page one for every group of layers, negative where it was given back.
    The last `len(draft)` tokens of a decode row are guesses: how the token after each of them is chosen. The row gives
    the tokens that are chosen as long as they are the guessed ones, and one more.
    `prompt_targets` are the tokens that the row's positions should have predicted, for prompt log-probabilities.
    `adapter` is the digest of the LoRA adapter that the row is computed with; empty: the model alone.
    """

    token_ids: list[int]
    start: int
    blocks: list[int]
    sampling: Sampling | None  # None: the row does not reach the end of what is known
    prompt_targets: list[int] | None = None
    prompt_alternatives: int = 0
    pooling: Pooling | None = None
    draft: list[Sampling] = []
    adapter: str = ""


class StepInput(msgspec.Struct, frozen=True):
    """Rows of one iteration, `decode_rows` decode rows first."""

    rows: list[RowInput]
    decode_rows: int


class RowOutput(msgspec.Struct, frozen=True):
    """What one row gave. `error` names a fault of this row alone; its other fields are then empty. `pooled` is the
    vector (little-endian float32), or what the next chunk of the prompt must carry."""

    token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    pooled: bytes | None = None
