"""Blocks in and out, sharing of prefixes, and what the prefix cache must never confuse. Knows no scheduler."""

from __future__ import annotations

import pytest

from noria.engine.scheduling.kv_blocks import KVBlocks, OutOfBlocks
from noria.engine.scheduling.prefixes import block_names
from noria.engine.scheduling.request import HOLE, Request

TEXT = list(range(100, 110))  # two full blocks of four and a half-filled one


def compute(kv: KVBlocks, tokens: list[int], salt: bytes = b"", *, reuse_prefix: bool = True) -> Request:
    """A request with all its tokens in the cache, as after its prefill."""
    request = Request("r", list(tokens), len(tokens), 10, salt=salt, reuse_prefix=reuse_prefix)
    kv.take_prefix(request, kv.cached_prefix(request))
    kv.grow(request, request.num_tokens)
    request.num_computed = request.num_tokens
    kv.register(request)
    return request


def num_hits(kv: KVBlocks, tokens: list[int], salt: bytes = b"", *, reuse_prefix: bool = True) -> int:
    return len(kv.cached_prefix(Request("q", list(tokens), len(tokens), 10, salt=salt, reuse_prefix=reuse_prefix)))


def test_grow_and_release() -> None:
    kv = KVBlocks(4, 4, prefix_cache=False)
    request = Request("r", TEXT, len(TEXT), 10)
    kv.grow(request, 5)
    assert len(request.blocks) == 2 and kv.num_free == 2 and kv.num_held == 2
    kv.grow(request, 8)  # still two blocks
    assert kv.missing(request, 9) == 1 and kv.num_free == 2
    kv.check([request])
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        kv.grow(request, 17)
    assert kv.num_free == 2
    kv.release(request)
    assert request.blocks == [] and request.num_computed == 0 and kv.num_free == 4
    kv.check([])


def test_a_prefix_is_shared_while_held_and_after() -> None:
    kv = KVBlocks(8, 4, prefix_cache=True)
    first = compute(kv, TEXT)
    second = compute(kv, TEXT)
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] != first.blocks[2]
    assert kv.num_held == 4 and kv.num_cached == 0
    kv.check([first, second])
    kv.release(first)
    assert kv.num_held == 3
    kv.release(second)
    assert kv.num_held == 0 and kv.num_cached == 2 and kv.num_free == 8
    assert num_hits(kv, TEXT) == 2
    kv.check([])


def test_one_token_is_always_left_to_compute() -> None:
    kv = KVBlocks(8, 4, prefix_cache=True)
    compute(kv, TEXT[:8])
    assert num_hits(kv, TEXT[:8]) == 1
    assert num_hits(kv, TEXT[:9]) == 2
    assert num_hits(kv, TEXT[:4]) == 0


def test_a_block_counts_only_behind_its_own_prefix() -> None:
    kv = KVBlocks(8, 4, prefix_cache=True)
    compute(kv, TEXT)
    assert num_hits(kv, [1, 2, 3, 4, *TEXT[4:]]) == 0
    assert num_hits(kv, [*TEXT[:4], 1, *TEXT[5:]]) == 1


def test_what_is_not_computed_is_not_offered() -> None:
    kv = KVBlocks(8, 4, prefix_cache=True)
    request = Request("r", TEXT, len(TEXT), 10)
    kv.grow(request, request.num_tokens)
    request.num_computed = 7
    kv.register(request)
    assert request.num_registered == 1 and num_hits(kv, TEXT) == 1


LONG = b"organisation-with-a-very-long-name/" * 3


@pytest.mark.parametrize(("one", "other"), [(b"", b"a"), (b"a", b"b"), (LONG + b"1", LONG + b"2"), (b"a", b"a\0")])
def test_tenants_share_nothing(one: bytes, other: bytes) -> None:
    kv = KVBlocks(16, 4, prefix_cache=True)
    compute(kv, TEXT, one)
    assert num_hits(kv, TEXT, one) == 2
    assert num_hits(kv, TEXT, other) == 0


def test_a_salt_that_equals_a_digest_is_no_key_to_the_rest_of_the_chain() -> None:
    kv = KVBlocks(16, 4, prefix_cache=True)
    request = compute(kv, TEXT, b"victim")
    assert num_hits(kv, TEXT[4:], request.block_hashes[0]) == 0


def test_reuse_is_refused_where_every_position_must_be_computed() -> None:
    kv = KVBlocks(8, 4, prefix_cache=True)
    compute(kv, TEXT)
    assert num_hits(kv, TEXT, reuse_prefix=False) == 0


def test_no_cache_no_hits() -> None:
    kv = KVBlocks(8, 4, prefix_cache=False)
    kv.release(compute(kv, TEXT))
    assert num_hits(kv, TEXT) == 0 and kv.num_cached == 0


def test_reuse_takes_contentless_blocks_first_then_the_oldest_prefix_from_its_end() -> None:
    kv = KVBlocks(5, 4, prefix_cache=True)
    old, new = compute(kv, TEXT[:9]), compute(kv, [*TEXT[5:], 1, 2, 3])
    assert kv.num_free == 0
    kv.release(old)  # two cached, one without content
    kv.release(new)  # two cached
    filler = Request("f", [1], 1, 0)
    hits = []
    for blocks in range(1, 6):
        kv.grow(filler, blocks * 4)
        hits.append((num_hits(kv, TEXT[:9]), num_hits(kv, [*TEXT[5:], 1, 2, 3, 4])))
        kv.check([filler])
    assert hits == [(2, 2), (1, 2), (0, 2), (0, 1), (0, 0)]


def test_twins_computed_side_by_side_keep_one_name() -> None:
    kv = KVBlocks(8, 4, prefix_cache=True)
    twins = [Request(name, list(TEXT), len(TEXT), 1) for name in "ab"]
    for twin in twins:
        kv.grow(twin, twin.num_tokens)
        twin.num_computed = twin.num_tokens
    for twin in twins:
        kv.register(twin)
    kv.check(twins)
    kv.release(twins[0])
    assert num_hits(kv, TEXT) == 2 and kv.num_cached == 2
    kv.release(twins[1])
    assert kv.num_cached == 2
    kv.check([])


def test_check_finds_a_leak() -> None:
    kv = KVBlocks(4, 4, prefix_cache=True)
    request = compute(kv, TEXT)
    with pytest.raises(AssertionError, match="reference counts"):
        kv.check([])
    kv.check([request])


# --- windows ---------------------------------------------------------------------------------------------------------


def windowed(num_blocks: int, *windows: int, step: int = 4) -> KVBlocks:
    return KVBlocks(num_blocks, 4, prefix_cache=True, windows=windows, max_step=step)


def read(kv: KVBlocks, tokens: list[int], chunk: int) -> Request:
    """A request that has read its tokens in chunks."""
    request = Request("r", list(tokens), len(tokens), 10)
    kv.take_prefix(request, kv.cached_prefix(request))
    kv.reserve(request, request.num_tokens)
    while request.num_pending:
        end = min(request.num_computed + chunk, request.num_tokens)
        kv.grow(request, end)
        request.num_computed = end
        kv.register(request)
        kv.trim(request)
        kv.check([request])
    return request


def test_blocks_behind_a_window_go_back_while_a_text_is_read() -> None:
    kv = windowed(8, 6)
    request = read(kv, list(range(100)), 4)  # 25 pages, and never more than 4 of them at once
    assert request.blocks[:23] == [HOLE] * 23 and HOLE not in request.blocks[23:]
    assert kv.num_held == 2 and kv.num_promised == 0
    kv.release(request)
    assert kv.num_free == 8


def test_groups_keep_what_their_own_layers_see() -> None:
    kv = windowed(40, 0, 6)
    request = read(kv, list(range(40)), 4)
    assert HOLE not in request.blocks[::2] and request.blocks[1::2].count(HOLE) == 8
    assert kv.num_held == 12


def test_what_a_text_will_need_is_promised_to_it() -> None:
    kv = windowed(8, 6)
    request = Request("r", list(range(100)), 100, 10)
    kv.reserve(request, 100)
    assert (kv.num_held, kv.num_promised, kv.num_free) == (1, 3, 4)
    kv.check([request])


def test_a_hit_needs_the_last_blocks_of_a_window_and_all_blocks_without() -> None:
    text = list(range(41))  # 10 full pages
    for windows, lost, hits in (
        ((6,), 3, 10),  # behind the window of its end
        ((0,), 3, 3),
        ((0, 6), 3 * 2 + 1, 10),
        ((0, 6), 3 * 2, 3),  # of the three pages before, the windowed ones are still there
        ((6,), 9, 9),
    ):
        kv = windowed(40, *windows)
        request = compute(kv, text)  # in one piece, and over before anything went back
        kv.release(request)
        block = next(b for b, name in enumerate(kv._hash_by_block) if name == page_name(request, lost, len(windows)))
        while kv._hash_by_block[block] is not None:
            kv._cached.move_to_end(block, last=False)
            kv._free.append(kv._evict())
        again = Request("q", text, len(text), 10)
        prefix = kv.cached_prefix(again)
        assert len(prefix) == hits * len(windows)
        kv.take_prefix(again, prefix)
        kv.check([again])


def page_name(request: Request, place: int, num_groups: int) -> bytes:
    return block_names(request.block_hashes[place // num_groups], num_groups)[place % num_groups]


def test_the_longest_text_fits_and_one_token_more_does_not() -> None:
    for windows in ((0,), (6,), (0, 6), (6, 0, 0, 11)):
        kv = windowed(30, *windows)
        for whole in (False, True):
            longest = kv.groups.longest(30, 500, whole_prompts=whole)
            assert kv.groups.most(longest, at_once=longest * whole) <= 30
            assert longest == 500 or kv.groups.most(longest + 1, at_once=(longest + 1) * whole) > 30
    assert windowed(30, 6).groups.longest(30, 500) == 500
