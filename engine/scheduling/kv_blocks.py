"""The KV cache's blocks as integers: who holds which, which are free, which hold a prefix worth reusing.

Knows nothing of tensors; execution owns the memory that block numbers index. After PagedAttention (Kwon et al., 2023).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from noria.engine.scheduling.request import Request


class OutOfBlocks(Exception):
    """More blocks were asked for than are free: callers ask `num_free` first, so this is a fault of ours."""


class KVBlocks:
    """`num_blocks` blocks of `block_size` tokens, reference counted, with a prefix cache over full blocks.

    A block is *held* (references > 0), *cached* (unheld, but its content is known by hash and may be taken again) or
    *free*. Free ones are handed out first, then cached ones, the least recently released first. Only full blocks are
    shared, so no block is ever written by two requests.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._hash_by_block: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._reader_by_hash: dict[bytes, Request] = {}  # who computes a full block that is to be registered
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order of reuse

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Unheld blocks that still hold a reusable prefix."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give `request` blocks for its first `num_tokens` tokens."""
        missing = self.blocks_for(num_tokens) - len(request.blocks)
        if missing > self.num_free:
            raise OutOfBlocks(f"{missing} blocks wanted, {self.num_free} free")
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            request.blocks.append(block)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks for its first `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(request.blocks))

    def cached_prefix(self, request: Request) -> list[int]:
        """Blocks that already hold the start of `request`'s tokens. At least one token is left to compute, since a
        step must end in logits."""
        if not self.prefix_cache or not request.reuse_prefix:
            return []
        found: list[int] = []
        for digest in self._hashes(request, (request.num_tokens - 1) // self.block_size):
            block = self._block_by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: list[int]) -> int:
        """How many of `blocks` are not held, so that taking them uses up free blocks."""
        return sum(1 for block in blocks if not self._references[block])

    def freed_by(self, requests: Iterable[Request], keep: Sequence[int]) -> Iterator[tuple[Request, int]]:
        """Each of `requests` with the number of blocks, those in `keep` not counted, that would be free once it and all
        before it were released."""
        released: Counter[int] = Counter()
        kept, freed = set(keep), 0
        for request in requests:
            released.update(request.blocks)
            freed += sum(released[block] == self._references[block] for block in request.blocks if block not in kept)
            yield request, freed

    def reader_after(self, request: Request, prefix: list[int]) -> Request | None:
        """Who is computing the block that follows `prefix`, found by `cached_prefix`, in the tokens of `request`."""
        if len(prefix) >= min(len(request.block_hashes), (request.num_tokens - 1) // self.block_size):
            return None
        return self._reader_by_hash.get(request.block_hashes[len(prefix)])

    def announce(self, request: Request) -> None:
        """Let others of the same prefix know that `request`, just admitted, is going to compute its full blocks."""
        if not self.prefix_cache:
            return
        request.num_announced = request.num_tokens // self.block_size
        for digest in self._hashes(request, request.num_announced)[request.num_registered :]:
            if digest not in self._block_by_hash:
                self._reader_by_hash.setdefault(digest, request)

    def take_prefix(self, request: Request, blocks: list[int]) -> None:
        """Start `request` on `blocks` found by `cached_prefix`."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        request.blocks = list(blocks)
        request.num_computed = len(blocks) * self.block_size
        request.num_registered = request.num_shared = len(blocks)

    def register(self, request: Request) -> None:
        """Offer the blocks that `request` has filled to the prefix cache."""
        full = request.num_computed // self.block_size
        if not self.prefix_cache or full <= request.num_registered:
            return
        hashes = self._hashes(request, full)
        for index in range(request.num_registered, full):
            block, digest = request.blocks[index], hashes[index]
            # The first block with a content keeps the name; a later twin stays nameless and is freed first.
            if self._hash_by_block[block] is None and digest not in self._block_by_hash:
                self._hash_by_block[block] = digest
                self._block_by_hash[digest] = block
        self._retract(request, full)
        request.num_registered = full

    def release(self, request: Request) -> None:
        """Take all blocks back. The end of a prefix is freed before its start, so that reuse eats it from the end."""
        for block in reversed(request.blocks):
            self._references[block] -= 1
            if not self._references[block]:
                if self._hash_by_block[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        self._retract(request, request.num_announced)
        request.blocks = []
        request.num_computed = 0
        request.num_registered = request.num_announced = request.num_shared = 0

    def check(self, requests: list[Request]) -> None:
        """Recount everything from the requests alive; raises AssertionError where the books are wrong."""
        references = [0] * self.num_blocks
        for request in requests:
            for block in request.blocks:
                references[block] += 1
        if references != self._references:
            raise AssertionError("reference counts differ from what the requests hold")
        unheld = [block for block, count in enumerate(references) if count == 0]
        if sorted([*self._free, *self._cached]) != unheld:
            raise AssertionError("free and cached blocks are not the unheld ones")
        if any((self._hash_by_block[block] is None) != (block not in self._cached) for block in unheld):
            raise AssertionError("a cached block has no content, or a free one has")
        reading = {id(request) for request in requests if request.blocks}
        if any(id(reader) not in reading for reader in self._reader_by_hash.values()):
            raise AssertionError("a block is expected from somebody who does not compute it")
        names = {block: digest for digest, block in self._block_by_hash.items()}
        if any(names.get(block) != digest for block, digest in enumerate(self._hash_by_block)):
            raise AssertionError("the two directions of the prefix cache disagree")

    def _evict(self) -> int:
        """The cached block that was released longest ago, without its content."""
        block, _ = self._cached.popitem(last=False)
        digest = self._hash_by_block[block]
        assert digest is not None
        del self._block_by_hash[digest]
        self._hash_by_block[block] = None
        return block

    def _retract(self, request: Request, num_full: int) -> None:
        """The blocks up to `num_full` are here, or will not come."""
        for digest in request.block_hashes[request.num_registered : min(num_full, request.num_announced)]:
            if self._reader_by_hash.get(digest) is request:
                del self._reader_by_hash[digest]

    def _hashes(self, request: Request, num_full: int) -> list[bytes]:
        """Chained digests of the first `num_full` blocks. 128 bits: a tenant can choose its prompts, so a collision
        would be an attack and not an accident. The salt, of any length, is digested to a length of its own, so that no
        salt can pass for the digest of a block."""
        hashes = request.block_hashes
        size = self.block_size
        for index in range(len(hashes), num_full):
            parent = hashes[-1] if hashes else blake2b(request.salt, digest_size=32).digest()
            chunk = array("q", request.tokens[index * size : (index + 1) * size]).tobytes()
            hashes.append(blake2b(chunk, key=parent, digest_size=16).digest())
        return hashes[:num_full] if len(hashes) > num_full else hashes
