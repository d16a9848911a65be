"""The KV cache's blocks as integers: who holds which, which are free, which hold a prefix worth reusing.

Knows nothing of tensors; execution owns the memory that block numbers index. After PagedAttention (Kwon et al., 2023).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from noria.engine.scheduling.kv_groups import KVGroups
from noria.engine.scheduling.prefixes import block_names, longest_prefix, page_digests
from noria.engine.scheduling.request import HOLE, Request


class OutOfBlocks(Exception):
    """More blocks were asked for than are free: callers ask `num_free` first, so this is a fault of ours."""


class KVBlocks:
    """`num_blocks` blocks of `block_size` tokens, reference counted, with a prefix cache over full blocks.

    A block is *held* (references > 0), *cached* (unheld, but its content is known by hash and may be taken again) or
    *free*. Free ones are handed out first, then cached ones, the least recently released first. Only full blocks are
    shared, so no block is ever written by two requests.

    Where layers have windows (`KVGroups`), all groups take their blocks from this one pool. A request has blocks for
    the same pages in each of them, but for holes where it has let go of what lies behind a window; it takes them as it
    goes on, and what it will need is *promised*: neither held nor anybody else's.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: bool, windows: Sequence[int] = (0,), max_step: int = 1
    ) -> None:
        self.groups = KVGroups(windows, block_size, max_step)
        self.is_windowed = self.groups.is_windowed
        self.num_promised = 0
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
        """Blocks that can be handed out to anybody, cached ones included."""
        return len(self._free) + len(self._cached) - self.num_promised

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unheld blocks that still hold a reusable prefix."""
        return len(self._cached)

    def reserve(self, request: Request, num_tokens: int, at_once: int = 0) -> None:
        """Give `request` blocks for its first `num_tokens` tokens; with windows some now, and for the rest a promise of
        as many as it holds at once at most, `at_once` tokens of them being computed in its first iteration."""
        if not self.is_windowed:
            return self.grow(request, num_tokens)
        most = self.groups.most(num_tokens, num_computed=request.num_computed, at_once=at_once)
        request.num_reserved = num_tokens
        self._promise(request, most - (len(request.blocks) - request.num_holes))
        self.grow(request, request.num_computed + 1)  # whoever runs has a block

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give `request` blocks for its first `num_tokens` tokens, those promised to it first."""
        missing = self._lacking(request, num_tokens)
        if missing > self.num_free + request.num_promised:
            raise OutOfBlocks(f"{missing} blocks wanted, {self.num_free + request.num_promised} free")
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            request.blocks.append(block)
        if request.num_promised:
            self._promise(request, request.num_promised - missing)
        request.num_slots = len(request.blocks) // self.groups.num * self.block_size

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks beyond those promised that `request` lacks for its first `num_tokens` tokens."""
        return max(0, self._lacking(request, num_tokens) - request.num_promised)

    def room_for(self, request: Request) -> int:
        """For how many tokens in all there can be blocks for `request` without taking anybody's."""
        pages = (self.num_free + request.num_promised) // self.groups.num
        return request.num_slots + pages * self.block_size

    def trim(self, request: Request) -> None:
        """Let go of what lies wholly behind the windows, the start of the text first. What comes back is promised to
        `request` as far as it will need it."""
        groups, num_freed, num_holes = self.groups, 0, request.num_holes
        computed = min(request.num_computed, request.num_tokens - 1)  # as padding, the newest is computed once more
        for group, window in enumerate(groups.windows):
            if not window:
                continue
            end = groups.first_page(group, computed) * groups.num + group
            places = range(group, min(end, len(request.blocks)), groups.num)
            behind = list(takewhile(lambda place: request.blocks[place] != HOLE, reversed(places)))
            for place in reversed(behind):
                num_freed += self._let_go(request.blocks[place])
                request.blocks[place] = HOLE
            request.num_holes += len(behind)
        if request.num_holes > num_holes:
            self._promise(request, min(self.still_needed(request), request.num_promised + num_freed))

    def still_needed(self, request: Request) -> int:
        """Blocks beside those held that `request` needs at most of what was reserved for it."""
        computed = min(request.num_computed, request.num_tokens - 1)
        held = len(request.blocks) - request.num_holes
        return self.groups.most(request.num_reserved, num_computed=computed) - held

    def cached_prefix(self, request: Request) -> list[int]:
        """Blocks that already hold the start of `request`'s tokens. At least one token is left to compute, since a
        step must end in logits."""
        if not self.prefix_cache or not request.reuse_prefix:
            return []
        digests = self._digests(request, (request.num_tokens - 1) // self.block_size)
        if self.is_windowed:
            return longest_prefix(digests, self._block_by_hash, self.groups)
        found: list[int] = []
        for digest in digests:
            block = self._block_by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_holding(self, block: int) -> int:
        """How many requests hold it."""
        return self._references[block]

    def free_among(self, blocks: list[int]) -> int:
        """How many of `blocks` are not held, so that taking them uses up free blocks."""
        return sum(1 for block in blocks if block != HOLE and not self._references[block])

    def freed_by(self, requests: Iterable[Request], keep: Sequence[int]) -> Iterator[tuple[Request, int]]:
        """Each of `requests` with the number of blocks, those in `keep` not counted, that would be free once it and all
        before it were released."""
        released: Counter[int] = Counter()
        kept, freed = set(keep), 0
        for request in requests:
            blocks = [block for block in request.blocks if block != HOLE]
            released.update(blocks)
            freed += sum(released[block] == self._references[block] for block in blocks if block not in kept)
            freed += request.num_promised
            yield request, freed

    def reader_after(self, request: Request, prefix: list[int]) -> Request | None:
        """Who is computing the page that follows `prefix`, found by `cached_prefix`, in the tokens of `request`."""
        pages = len(prefix) // self.groups.num
        if pages >= min(len(request.block_hashes), (request.num_tokens - 1) // self.block_size):
            return None
        return self._reader_by_hash.get(request.block_hashes[pages])

    def announce(self, request: Request) -> None:
        """Let others of the same prefix know that `request`, just admitted, is going to compute its full blocks."""
        if not self.prefix_cache or request.is_private:
            return
        request.num_announced = request.num_tokens // self.block_size
        for digest in self._digests(request, request.num_announced)[request.num_registered :]:
            if any(name not in self._block_by_hash for name in self._names(digest)):
                self._reader_by_hash.setdefault(digest, request)

    def take_prefix(self, request: Request, blocks: list[int]) -> None:
        """Start `request` on `blocks` found by `cached_prefix`."""
        for block in blocks:
            if block == HOLE:
                request.num_holes += 1
                continue
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        request.blocks = list(blocks)
        request.num_registered = len(blocks) // self.groups.num
        request.num_shared = len(blocks)
        request.num_computed = request.num_slots = request.num_registered * self.block_size

    def register(self, request: Request) -> None:
        """Offer the blocks that `request` has filled to the prefix cache."""
        full = request.num_computed // self.block_size
        if not self.prefix_cache or full <= request.num_registered or request.is_private:
            return
        digests = self._digests(request, full)
        for page in range(request.num_registered, full):
            for group, name in enumerate(self._names(digests[page])):
                block = request.blocks[page * self.groups.num + group]
                # The first block with a content keeps the name; a later twin stays nameless and is freed first.
                if self._hash_by_block[block] is None and name not in self._block_by_hash:
                    self._hash_by_block[block] = name
                    self._block_by_hash[name] = block
        self._retract(request, full)
        request.num_registered = full

    def release(self, request: Request) -> None:
        """Take all blocks back. The end of a prefix is freed before its start, so that reuse eats it from the end."""
        for block in reversed(request.blocks):
            if block != HOLE:
                self._let_go(block)
        self._retract(request, request.num_announced)
        self._promise(request, 0)
        request.blocks = []
        request.num_computed = request.num_slots = request.num_holes = request.num_reserved = 0
        request.is_private = False
        request.num_registered = request.num_announced = request.num_shared = 0

    def check(self, requests: list[Request]) -> None:
        """Recount everything from the requests alive; raises AssertionError where the books are wrong."""
        references = [0] * self.num_blocks
        for request in requests:
            for block in request.blocks:
                references[block] += block != HOLE
            self._check_windows(request)
        if references != self._references:
            raise AssertionError("reference counts differ from what the requests hold")
        promised = sum(request.num_promised for request in requests)
        if self.num_promised != promised or self.num_free < 0:
            raise AssertionError("promises differ from what the requests have, or cannot be kept")
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

    def _check_windows(self, request: Request) -> None:
        groups, blocks = self.groups, request.blocks
        if blocks.count(HOLE) != request.num_holes or len(blocks) * self.block_size != request.num_slots * groups.num:
            raise AssertionError(f"request {request.id} miscounts its blocks")
        for group in range(groups.num):
            if HOLE in blocks[groups.first_page(group, request.num_computed) * groups.num + group :: groups.num]:
                raise AssertionError(f"request {request.id} lacks a block that its next token sees")

    def _lacking(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) * self.groups.num - len(request.blocks))

    def _promise(self, request: Request, num_blocks: int) -> None:
        num_blocks = max(0, num_blocks)
        self.num_promised += num_blocks - request.num_promised
        request.num_promised = num_blocks

    def _let_go(self, block: int) -> bool:
        """One that held `block` does no more; whether nobody does now."""
        self._references[block] -= 1
        if self._references[block]:
            return False
        if self._hash_by_block[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None
        return True

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

    def _digests(self, request: Request, num_pages: int) -> list[bytes]:
        return page_digests(request, self.block_size, num_pages)

    def _names(self, digest: bytes) -> list[bytes]:
        return block_names(digest, self.groups.num)
