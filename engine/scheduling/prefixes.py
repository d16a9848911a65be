"""What blocks are called in the prefix cache, and how long a prefix the blocks that are there make.

Knows hashes and numbers of blocks; not who holds them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from noria.engine.scheduling.kv_groups import KVGroups
from noria.engine.scheduling.request import HOLE, Request


def page_digests(request: Request, block_size: int, num_pages: int) -> list[bytes]:
    """Chained digests of the first `num_pages` pages, all full. 128 bits: a tenant can choose its prompts, so a
    collision would be an attack and not an accident. The salt, of any length, is digested to a length of its own, so
    that no salt can pass for the digest of a page."""
    hashes = request.block_hashes
    for index in range(len(hashes), num_pages):
        parent = hashes[-1] if hashes else blake2b(request.salt, digest_size=32).digest()
        chunk = array("q", request.tokens[index * block_size : (index + 1) * block_size]).tobytes()
        hashes.append(blake2b(chunk, key=parent, digest_size=16).digest())
    return hashes[:num_pages] if len(hashes) > num_pages else hashes


def block_names(digest: bytes, num_groups: int) -> list[bytes]:
    """What a page's block is called in each group: in the first one as the page itself."""
    return [digest] + [digest + bytes((group,)) for group in range(1, num_groups)]


def longest_prefix(digests: Sequence[bytes], block_by_name: Mapping[bytes, int], groups: KVGroups) -> list[int]:
    """The blocks of the longest run of pages of which every group has what its layers still see at the end, with holes
    for the rest: all pages where a group has no window, the last ones where it has."""
    runs, longest = [0] * groups.num, 0  # pages without a gap, by group, up to this one
    for page, digest in enumerate(digests, start=1):
        for group, name in enumerate(block_names(digest, groups.num)):
            runs[group] = runs[group] + 1 if name in block_by_name else 0
        firsts = [groups.first_page(group, page * groups.block_size) for group in range(groups.num)]
        if all(run >= page - first for run, first in zip(runs, firsts, strict=True)):
            longest = page
        elif any(run < page and not window for run, window in zip(runs, groups.windows, strict=True)):
            break
    firsts = [groups.first_page(group, longest * groups.block_size) for group in range(groups.num)]
    return [
        block_by_name[name] if page >= firsts[group] else HOLE
        for page, digest in enumerate(digests[:longest])
        for group, name in enumerate(block_names(digest, groups.num))
    ]
