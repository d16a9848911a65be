"""What hypothesis draws: engines where everything is scarce, and requests that share prefixes all the time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from noria.engine.scheduling.request import Request
from tests.engine.scheduling.simulated_engine import STOP, VOCABULARY, Shape, expected_output


def shapes(policy: str) -> st.SearchStrategy[Shape]:
    windows = st.sampled_from([(0,), (0,), (5,), (0, 3), (2, 0, 7)])
    return windows.flatmap(lambda windows: _shapes(policy, windows))


def _shapes(policy: str, windows: tuple[int, ...]) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        policy=st.just(policy),
        prefix_cache=st.booleans(),
        num_stages=st.integers(1, 2),
        num_blocks=st.integers(4 * len(windows), 14 * len(windows)),
        block_size=st.sampled_from([2, 3, 4, 1]),
        max_batch_size=st.sampled_from([2, 1, 3, 5]),
        max_batch_tokens=st.sampled_from([6, 1, 3, 12]),
        max_draft=st.sampled_from([0, 3, 5, 1]),
        max_chunk_tokens=st.sampled_from([0, 2, 4]),
        windows=st.just(windows),
    )


@dataclass(frozen=True)
class Arrival:
    """A request to come; resumed ones arrive with `num_delivered` output tokens that the model has said before."""

    prompt: tuple[int, ...]
    max_tokens: int
    class_rank: int
    salt: bytes
    min_tokens: int
    reuse_prefix: bool
    num_delivered: int
    predicts: bool

    def request(self, name: str, capacity: int) -> Request:
        prompt = list(self.prompt[:capacity])
        request = Request(
            name,
            prompt,
            len(prompt),
            min(self.max_tokens, capacity - len(prompt)),
            class_rank=self.class_rank,
            stop_ids=STOP,
            min_tokens=self.min_tokens,
            salt=self.salt,
            reuse_prefix=self.reuse_prefix,
        )
        if self.predicts:
            request.prediction = [*expected_output(request)[:5], 0, *expected_output(request)[5:]]
        delivered = expected_output(request)
        if delivered and delivered[-1] in STOP and len(delivered) > self.min_tokens:
            delivered.pop()  # its end would have been delivered too
        request.tokens = prompt + delivered[: self.num_delivered]
        return request


# Few distinct prompts with long common starts, so that prefixes are shared all the time.
prompts = st.builds(
    lambda start, end: tuple((0, 1, 2, 3) * 8)[:start] + tuple(end),
    st.integers(0, 14),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
)
arrivals = st.builds(
    Arrival,
    prompt=prompts,
    max_tokens=st.integers(0, 16),
    class_rank=st.sampled_from([0, 1, 1, 1, 3]),
    salt=st.sampled_from([b"", b"", b"a", b"x" * 70 + b"1", b"x" * 70 + b"2"]),
    min_tokens=st.integers(0, 3),
    reuse_prefix=st.sampled_from([True, True, True, False]),
    num_delivered=st.sampled_from([0, 0, 0, 1, 5, 20]),
    predicts=st.booleans(),
)
