"""A request as the pool knows it, and what is left to publish of one that ended in the store.

Knows no key, no script and no client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from noria.engine.wire.messages import CLASSES, TokenFrame


@dataclass
class Request:
    """`tokens` are prompt + max_tokens, what the request is charged with when it is claimed."""

    id: str
    body: bytes
    service_class: str
    tenant: str
    gateway: str
    cost: int  # KV blocks
    block_size: int  # 0: `cost` is for all that it may ever need
    prompt: int
    tokens: int
    weight: float
    deadline: int | None  # ms
    priority: int
    logged: bool
    account: str  # whom the ledger names; "": nobody
    billed: int  # prompt tokens that it counts
    accepted: int  # ms
    since: int  # ms: for how long it waits, or waited last
    arrival: int = 0
    engine: str = ""  # who runs it; "": it waits
    epoch: int = 0
    frames: list[bytes] = field(default_factory=list)  # recorded, each encoded behind its length
    seq: int = 0  # output tokens in them
    done: bool = False  # its last frame is among them
    engines: list[str] = field(default_factory=list)  # those that died and were counted against it
    lives: list[str] = field(default_factory=list)  # the lives of theirs that ended so
    suspect: bool = False
    cancelled: bool = False
    misfit_since: int | None = None  # ms
    claimed: int | None = None  # ms: for the first time
    counted: int | None = None  # output tokens that its client has had, where that was told
    why: str = ""  # it was cancelled

    @property
    def waits(self) -> bool:
        return not self.engine

    @property
    def queued(self) -> bool:
        """It waits in its class; suspects wait apart."""
        return self.waits and not self.suspect

    @property
    def place(self) -> tuple[int, int]:
        """Its place among the requests of its tenant."""
        return self.priority, self.arrival

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among suspects."""
        return CLASSES.index(self.service_class), self.arrival

    @property
    def state(self) -> str:
        """What the store keeps of its progress while it runs."""
        return f"{self.epoch} {self.seq}" + " done" * self.done

    def record(self, encoded: bytes, frame: TokenFrame) -> bool:
        """Take in a frame that continues what is recorded; any other is no matter."""
        fresh = (frame.epoch, frame.seq) == (self.epoch, self.seq) and not self.done
        if fresh:
            self.frames.append(encoded)
            self.seq += len(frame.token_ids)
            self.done = frame.finish is not None
        return fresh

    def needs(self) -> int:
        """Blocks that its next engine has to have free, now that it has generated something."""
        return math.ceil((self.prompt + self.seq + 1) / self.block_size) if self.block_size else self.cost


def ending(request: Request, reason: str) -> list[object]:
    """What its last frame is made from, under an epoch that outranks every engine that ever held it."""
    r = request
    return [r.id, r.gateway, r.epoch + 1, r.seq, r.prompt, int(r.logged), reason, b"".join(r.frames)]
