"""One request as the scheduler sees it: token ids, counts and blocks.

Knows no text, no clock and no reason for its class; it has no phase, only numbers of tokens known and computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.engine.scheduling.speculation import Drafter

HOLE = -1
"""Stands in a request's blocks for one that was given back."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt that grows by what is sampled for it.

    `tokens` holds the prompt and every token sampled so far. A request that resumes (on another engine, or after
    preemption) simply has more tokens known than computed: there is no other state to restore.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int  # output tokens at most; 0: compute the prompt and end
    class_rank: int = 1  # index in `CLASSES`; lower is more urgent
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop tokens
    min_tokens: int = 0
    salt: bytes = b""  # separates tenants in the prefix cache
    prediction: Sequence[int] = ()  # a guess of the output, to speculate on
    reuse_prefix: bool = True  # False where every prompt position must be computed (prompt log-probabilities)

    arrival: int = 0  # set by the scheduler; order within a class
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_cached: int = 0  # prompt tokens taken from the prefix cache at the first admission
    blocks: list[int] = field(default_factory=list)  # of each page one for every group of layers, or HOLE
    num_slots: int = 0  # tokens that the blocks have room for, those behind a window included
    num_holes: int = 0  # blocks given back because no layer of their group sees them any more
    num_promised: int = 0  # further blocks that nobody else is given
    num_reserved: int = 0  # tokens for which there are blocks or promises
    is_private: bool = False  # its blocks are nobody else's
    block_hashes: list[bytes] = field(default_factory=list)  # of the full pages, as far as hashed
    num_registered: int = 0  # leading pages already offered to the prefix cache
    num_announced: int = 0  # leading pages that others of the same prefix know to be coming
    num_shared: int = 0  # leading blocks taken from the prefix cache, holes among them
    drafter: Drafter | None = None  # where the scheduler speculates
    in_flight: bool = False  # between select() and complete(): Orca's RUNNING
    cancelled: str | None = None  # the reason, when asked to end while in flight
    finish: str | None = None  # "stop" | "length" | "cancelled" | "expired" | "error", set once
    num_preemptions: int = 0
    num_lost: int = 0  # tokens that had been computed when it was preempted last
    waiting_since: int = 0  # how many requests had been admitted when it began to wait

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_total(self) -> int:
        """Tokens at the end at most: what a reservation is made for."""
        return self.num_prompt + self.max_tokens

    @property
    def wants_more(self) -> bool:
        return len(self.tokens) < self.num_prompt + self.max_tokens

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet computed: more than one while the prompt is read, one while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True when the only pending token is one that was sampled. The last chunk of a prompt is prefill even when
        it is a single token, so that chunking never changes which kernel computes a position."""
        return len(self.tokens) - self.num_computed == 1 and len(self.tokens) > self.num_prompt

    @property
    def num_own_blocks(self) -> int:
        """Blocks held and promised, those from the prefix cache left out: others may hold them."""
        own = len(self.blocks) - self.num_shared + self.num_promised
        return own - self.blocks[self.num_shared :].count(HOLE) if self.num_holes else own

    @property
    def order(self) -> tuple[int, int]:
        """First come first served within a class, urgent classes first."""
        return (self.class_rank, self.arrival)

    def extend(self, sampled: Sequence[int], max_model_len: int) -> tuple[tuple[int, ...], str | None]:
        """Add sampled tokens up to the one that ends the request; returns those, and why it ended if it did."""
        tokens = self.tokens
        longest = self.num_prompt + self.max_tokens
        for count, token in enumerate(sampled, start=1):
            tokens.append(token)
            if token in self.stop_ids and len(tokens) - self.num_prompt > self.min_tokens:
                return tuple(sampled[:count]), "stop"
            if len(tokens) >= longest or len(tokens) >= max_model_len:
                return tuple(sampled[:count]), "length"
        return tuple(sampled), None
