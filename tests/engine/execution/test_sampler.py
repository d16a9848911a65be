"""The sampler against a plain restatement of each rule, and the independence of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noria.engine.execution import sampler
from noria.engine.execution.noise import exponentials
from noria.engine.execution.step import NoMask, Sampling
from noria.engine.wire.messages import SamplingParams

VOCAB = 50


class Only:
    """A mask of the given ids; None: it cannot be had."""

    def __init__(self, *ids: int | None) -> None:
        self.ids = ids

    def words(self) -> np.ndarray:
        if None in self.ids:
            raise NoMask("too slow")
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[list(self.ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)[None]


def row(
    position: int = 0,
    history: tuple[int, list[int]] | None = None,
    banned: tuple[int, ...] = (),
    mask: Only | None = None,
    **params: object,
):
    return Sampling(SamplingParams(max_tokens=8, **params), position, history, banned, mask)  # type: ignore[arg-type]


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def chosen(logits: torch.Tensor, *rows: Sampling) -> list[int]:
    return [output.token_ids[0] for output in sampler.sample(logits.clone(), rows)]


def frequencies(logits: torch.Tensor, draws: int, **params: object) -> torch.Tensor:
    """How often each token of one row of logits is drawn, over `draws` positions."""
    rows = [row(position=i, seed=7, **params) for i in range(draws)]
    tokens = torch.tensor(chosen(logits.expand(draws, -1), *rows))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


def kept_by(logits: torch.Tensor, **params: object) -> set[int]:
    return set(frequencies(logits, 4000, **params).nonzero()[:, 0].tolist())


def test_temperature_zero_takes_the_best():
    logits = some_logits(3)
    assert chosen(logits, *[row(temperature=0)] * 3) == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 1e-6}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}])
def test_what_leaves_one_token_is_greedy(params):
    logits = some_logits(4, seed=3)
    rows = [row(position=i, seed=i, **params) for i in range(4)]
    assert chosen(logits, *rows) == logits.argmax(dim=1).tolist()


def test_draws_follow_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits[0] / temperature, dim=0)
        assert torch.allclose(frequencies(logits, 20000, temperature=temperature), expected, atol=0.012)


def test_top_k_keeps_the_k_best():
    logits = some_logits(1, seed=5)
    assert kept_by(logits, top_k=3, temperature=5.0) == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p):
    logits = some_logits(1, seed=6, vocab=20)
    probabilities, ids = torch.softmax(logits[0], dim=0).sort(descending=True)
    size = int((probabilities.cumsum(0) < top_p).sum()) + 1
    seen = kept_by(logits, top_p=top_p)
    assert seen <= set(ids[:size].tolist())
    likely = {int(i) for i, p in zip(ids[:size], probabilities[:size], strict=True) if p > 0.005}
    assert likely <= seen


def test_top_p_beyond_the_first_candidates_sorts_the_row():
    vocab = 4 * sampler.CANDIDATES
    logits = torch.zeros(1, vocab) - torch.arange(vocab) * 1e-4  # nearly flat: 256 candidates hold a quarter
    floor = sampler._floors(torch.softmax(logits, dim=1), [SamplingParams(max_tokens=1, top_p=0.5)])
    kept = int((torch.softmax(logits, dim=1)[0] >= floor[0]).sum())
    probabilities = torch.softmax(logits[0].double(), dim=0)
    assert kept == int((probabilities.cumsum(0) < 0.5).sum()) + 1


def test_min_p_is_relative_to_the_best():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert kept_by(logits, min_p=0.25) == {0, 1, 2}


def test_filters_are_applied_one_after_the_other():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    # top-k leaves 0.4 and 0.3, that is 0.57 and 0.43 of what is left: top-p 0.55 keeps the first alone.
    assert kept_by(logits, top_k=2, top_p=0.55) == {0}


def test_repetition_penalty_counts_the_prompt_and_flips_with_the_sign():
    logits = torch.tensor([[3.0, 2.9, -1.0, -1.1]])
    assert chosen(logits, row(temperature=0, repetition_penalty=1.5, history=(1, [0]))) == [1]
    only_negative = torch.tensor([[-1.0, -1.1]])
    assert chosen(only_negative, row(temperature=0, repetition_penalty=1.5, history=(1, [0]))) == [1]


def test_frequency_and_presence_penalties_count_output_only():
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    prompt_only = row(temperature=0, frequency_penalty=2.0, presence_penalty=2.0, history=(2, [0, 0]))
    once = row(temperature=0, presence_penalty=1.0, history=(1, [2, 0]))
    thrice = row(temperature=0, frequency_penalty=0.2, history=(1, [2, 0, 0, 0]))
    assert chosen(logits.expand(3, -1), prompt_only, once, thrice) == [0, 1, 1]


def test_bias_and_bans():
    logits = torch.tensor([[1.0, 0.0, 0.0]])
    assert chosen(logits, row(temperature=0, logit_bias={2: 100.0})) == [2]
    assert chosen(logits, row(temperature=0, logit_bias={0: -100.0, 1: -1.0})) == [2]
    assert chosen(logits, row(temperature=0, banned=(0, 1))) == [2]
    assert 0 not in kept_by(logits, banned=(0,))


def test_logprobs_are_the_models_own():
    logits = some_logits(1, seed=9)
    params = {"temperature": 0.7, "top_k": 2, "logit_bias": {3: 50.0}, "logprobs": 4}
    output = sampler.sample(logits.clone(), [row(**params)])[0]
    assert output.token_ids == (3,) and output.logprobs is not None
    entry = output.logprobs[0]
    expected = torch.log_softmax(logits[0], dim=0)
    assert math.isclose(entry.logprob, float(expected[3]), abs_tol=1e-5)
    assert [i for i, _ in entry.top] == expected.topk(4).indices.tolist()
    assert entry.rank == expected.argsort(descending=True).tolist().index(3) + 1


def test_a_row_that_is_not_finite_fails_alone():
    logits = some_logits(3)
    logits[1, 4] = math.nan
    good, bad, also_good = sampler.sample(logits.clone(), [row(temperature=0), row(logprobs=2), row(temperature=0)])
    assert bad.error and not bad.token_ids
    assert [good.token_ids[0], also_good.token_ids[0]] == logits[[0, 2]].argmax(dim=1).tolist()


KINDS = [
    {"temperature": 0},
    {},
    {"temperature": 1.7, "top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1, "temperature": 0.6},
    {"logit_bias": {1: 3.0}, "top_p": 0.3},
]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**63), st.integers(0, 1000)), min_size=1, max_size=8))
def test_mates_do_not_change_a_row(rows):
    logits = some_logits(len(rows), seed=11)
    together = [row(position=p, seed=s, **KINDS[k]) for k, s, p in rows]
    alone = [chosen(logits[i : i + 1], r)[0] for i, r in enumerate(together)]
    assert chosen(logits, *together) == alone


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 100_000))
def test_noise_is_a_function_of_seed_position_and_token(seed, position):
    draws = exponentials(seed, position, 64)
    assert bool((draws > 0).all()) and torch.equal(draws, exponentials(seed, position, 64))
    assert torch.equal(draws[:7], exponentials(seed, position, 7))


def test_noise_is_exponential_over_tokens_positions_and_seeds():
    samples = (
        exponentials(1, 2, 20_000),
        torch.stack([exponentials(1, i, 2)[1] for i in range(20_000)]),
        torch.stack([exponentials(i, 3, 2)[0] for i in range(20_000)]),
    )
    for draws in samples:
        counts = torch.histc(torch.exp(-draws), bins=20, min=0, max=1)
        assert (counts - 1000).abs().max() < 150  # 4.9 standard deviations
    apart = torch.stack([exponentials(5, 9, 20_000), exponentials(5, 10, 20_000), exponentials(6, 9, 20_000)])
    assert (torch.corrcoef(apart) - torch.eye(3)).abs().max() < 0.03


def test_a_draw_survives_rounding():
    """Differences of the size that another batch or engine brings flip next to no draw, long tail or not."""
    logits = some_logits(1, seed=21, vocab=5000)
    rows = [row(position=i, seed=3, temperature=1.5) for i in range(1000)]
    noise = torch.randn(1000, 5000, generator=torch.Generator().manual_seed(1)) * 2e-5
    flips = sum(
        a != b for a, b in zip(chosen(logits.expand(1000, -1), *rows), chosen(logits + noise, *rows), strict=True)
    )
    assert flips <= 2


def test_a_mask_goes_before_everything_else():
    logits = some_logits(3)
    masked = row(mask=Only(3, 7, 33), logit_bias={5: 100.0, 7: -100.0}, top_k=1, temperature=0.7)
    expected = max((3, 33), key=lambda i: logits[1, i])
    assert chosen(logits, row(temperature=0), masked, row(temperature=0))[1] == expected
    assert chosen(logits[:1], row(mask=Only(49), temperature=0)) == [49]


def test_draws_under_a_mask_follow_what_is_left_of_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, *[-3.0] * 46]])
    found = torch.tensor(chosen(logits.expand(4000, -1), *[row(i, seed=3, mask=Only(1, 2)) for i in range(4000)]))
    share = (found == 1).float().mean().item()
    assert set(found.tolist()) == {1, 2} and abs(share - math.e / (1 + math.e)) < 0.03


def test_banned_tokens_come_where_the_mask_leaves_nothing_else():
    logits = some_logits(2)
    rows = [row(mask=Only(4, 9), banned=(9,), logit_bias={9: 100.0}), row(mask=Only(9), banned=(9,))]
    assert chosen(logits, *rows) == [4, 9]


def test_a_mask_of_nothing_and_one_that_cannot_be_had_are_faults_of_their_rows_alone():
    logits = some_logits(4)
    rows = [row(temperature=0), row(mask=Only()), row(mask=Only(None)), row(mask=Only(8))]
    outputs = sampler.sample(logits.clone(), rows)
    assert [output.error for output in outputs] == [None, "the grammar allows no token here", "too slow", None]
    assert outputs[0].token_ids == (int(logits[0].argmax()),) and outputs[3].token_ids == (8,)


def test_logprobs_under_a_mask_are_the_models_own():
    logits = some_logits(1)
    (output,) = sampler.sample(logits.clone(), [row(mask=Only(6), logprobs=2)])
    table = torch.log_softmax(logits[0], dim=0)
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == pytest.approx(float(table[6]))
    assert [i for i, _ in output.logprobs[0].top] == table.topk(2).indices.tolist()
