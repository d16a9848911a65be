"""What the soak calls growth."""

from __future__ import annotations

import pytest

from bench.soak import GROWTH, SLACK, Samples, grown, report

MIB = 2**20


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ([200 * MIB] * 100, False),
        ([100 * MIB] * 20 + [200 * MIB] * 80, False),  # warm-up
        ([(200 + i) * MIB for i in range(100)], True),
        ([200 * MIB] * 60 + [203 * MIB] * 40, False),  # noise
        ([200 * MIB] * 60 + [215 * MIB] * 40, True),
        ([200 * MIB] * 99 + [900 * MIB], False),  # one sample
    ],
)
def test_growth_is_between_the_quarters_behind_the_warm_up(values: list[int], more: bool) -> None:
    assert grown(values, SLACK, GROWTH)[2] is more


def test_each_process_is_told_and_what_grew_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fine = Samples([100 * MIB] * 50, [10] * 50)
    leaks = Samples([100 * MIB] * 50, [10 + i for i in range(50)])
    assert report({"gateway": fine, "engine": leaks}) == ["engine: descriptors"]
    assert len(capsys.readouterr().out.splitlines()) == 2
