"""Sizes as people write them, and what the KV cache gets."""

from __future__ import annotations

import pytest

from noria.engine import memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123456", 123456),
        ("512MiB", 2**29),
        ("2 GB", 2 * 10**9),
        ("1g", 10**9),
        ("1.5Gi", 3 * 2**29),
        ("4k", 4000),
    ],
)
def test_sizes(text, size):
    assert memory.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 XB", "12MiBs", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="no size"):
        memory.parse_size(text)


def test_auto_takes_what_is_wanted_or_a_share():
    assert memory.kv_bytes("auto", weight_bytes=0, wanted=4096, least=64) == 4096
    huge = memory.kv_bytes("auto", weight_bytes=0, wanted=2**60, least=64)
    assert huge == memory.KV_LIMIT or huge <= memory.available() * 0.3


def test_a_given_size_is_taken_as_it_is():
    assert memory.kv_bytes("1MiB", weight_bytes=0, wanted=64, least=64) == 2**20


@pytest.mark.parametrize(("setting", "weights"), [("auto", 2**60), ("900TiB", 0), ("10", 0)])
def test_too_little_is_said_with_the_numbers(setting, weights):
    with pytest.raises(memory.MemoryTooSmall, match=r"too (little|small).*\d"):
        memory.kv_bytes(setting, weight_bytes=weights, wanted=2**20, least=2**10)
