"""The sampler on a device against the one on the CPU: the same tokens, faults and log-probabilities for every setting;
and that it never waits for the device before its ids are read."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.engine.execution import device_sampler, sampler
from noria.engine.execution.noise import exponentials, exponentials_of, keys_of
from noria.engine.execution.step import Sampling
from noria.engine.wire.messages import SamplingParams
from tests.engine.execution.test_sampler import VOCAB, Only, row, some_logits

ids = st.integers(0, VOCAB - 1)


@st.composite
def any_row(draw: st.DrawFn) -> Sampling:
    return row(
        draw(st.integers(0, 99)),
        draw(st.none() | st.lists(ids, min_size=1, max_size=9).map(lambda tokens: (len(tokens) // 2, tokens))),
        tuple(draw(st.lists(ids, max_size=2, unique=True))),
        draw(st.none() | st.lists(ids, max_size=2, unique=True).map(lambda some: Only(*some)) | st.just(Only(None))),
        seed=draw(st.integers(0, 2**63)),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 7, 99])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, -0.4])),
        logit_bias=draw(st.sampled_from([None, {3: 2.5, 9: -100.0}])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@settings(deadline=None)
@given(st.lists(any_row(), max_size=5), st.integers(0, 99), st.sets(st.integers(0, 4), max_size=2))
def test_it_chooses_what_the_cpu_chooses(rows: list[Sampling], seed: int, broken: set[int]) -> None:
    logits = some_logits(len(rows), seed)
    for place in broken & set(range(len(rows))):
        logits[place, 7] = torch.nan
    assert device_sampler.sample_on_device(logits.clone(), rows) == sampler.sample(logits.clone(), rows)


def test_what_a_graph_has_chosen_is_taken_where_all_rows_are_plain() -> None:
    plain, logits = row(temperature=0.0), some_logits(2)
    found = torch.tensor([[4, 5], [0, 1]])
    outputs = device_sampler.sample_on_device(logits, [plain, plain], found)
    assert [output.token_ids for output in outputs] == [(4,), ()] and outputs[1].error == sampler.NOT_FINITE
    for changed in (row(temperature=1.0), row(temperature=0.0, banned=(1,)), row(temperature=0.0, mask=Only(1))):
        assert not device_sampler.is_plain(changed)
        again = device_sampler.sample_on_device(logits.clone(), [plain, changed], found)
        assert again == sampler.sample(logits.clone(), [plain, changed])


def test_nothing_is_read_back_before_the_ids() -> None:
    """A tensor of the meta device has no numbers: whoever asks for one, or for how many there are of a kind, fails."""
    everything = SamplingParams(
        max_tokens=8,
        temperature=0.7,
        top_k=5,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={3: 1.0},
    )
    rows = [Sampling(everything, 4, (1, [2, 3, 3]), (5,), mask) for mask in (None, Only(1, 5))]
    masks, faults = sampler.masks_of(rows)
    chosen = device_sampler.launch(torch.empty(2, VOCAB, device="meta"), rows, masks)
    assert chosen.shape == (2, 2) and chosen.device.type == "meta" and not faults
    assert device_sampler.likeliest(torch.empty(2, VOCAB, device="meta")).shape == (2, 2)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 100_000))
def test_noise_is_the_same_by_either_way(seed: int, position: int) -> None:
    keys = torch.tensor([keys_of(seed, position), keys_of(seed, position + 1)])
    made = exponentials_of(keys, 1000)
    assert torch.equal(made[0], exponentials(seed, position, 1000))
    assert torch.equal(made[1], exponentials(seed, position + 1, 1000))
