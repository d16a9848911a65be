"""What a text takes of the KV cache where layers have windows: pages that are still seen, and the most held at once.

Arithmetic on tokens and blocks. Knows no requests and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVGroups:
    """Layers in groups: those of one group see equally far back and share their blocks, so a text has, for each *page*
    of `block_size` tokens, a block in every group, until the page lies wholly behind the group's window.

    `windows`: tokens that the layers of each group see, up to the newest one; 0: all. `max_step`: tokens that a request
    computes in one iteration at most, but for prompts that are read whole.
    """

    def __init__(self, windows: Sequence[int], block_size: int, max_step: int) -> None:
        self.num = len(windows)
        self.block_size = block_size
        self.windows = tuple(windows)
        self.max_step = max_step
        self.limits = tuple(-(-(window + max_step) // block_size) + 1 if window else 0 for window in windows)
        """Blocks of each group that a text holds at most, however long it is; 0: there is no limit."""

    @property
    def is_windowed(self) -> bool:
        return any(self.windows)

    def first_page(self, group: int, num_computed: int) -> int:
        """The first page of which the next token sees something."""
        window = self.windows[group]
        return max(0, (num_computed - window + 1) // self.block_size) if window else 0

    def most(self, num_tokens: int, *, num_computed: int = 0, at_once: int = 0) -> int:
        """Blocks that a text of `num_tokens` holds at once at most, from where `num_computed` of them are computed on.
        `at_once`: tokens of the first iteration, where that is not bound by `max_step`."""
        pages, read = -(-num_tokens // self.block_size), -(-at_once // self.block_size)
        if self.num == 1 and not self.limits[0]:
            return pages
        return sum(
            min(pages - self.first_page(group, num_computed), max(limit, read)) if limit else pages
            for group, limit in enumerate(self.limits)
        )

    def longest(self, num_blocks: int, at_most: int, *, whole_prompts: bool = False) -> int:
        """Tokens of the longest text, of `at_most`, that fits an empty pool, wherever its prompt ends."""
        fits, beyond = 0, at_most + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if self.most(middle, at_once=middle if whole_prompts else 0) <= num_blocks:
                fits = middle
            else:
                beyond = middle
        return fits
