"""A short chaos run: three disturbances, and every request still ends exactly once with its own text."""

from __future__ import annotations

import re

import pytest

from bench import chaos


def test_twenty_requests_survive_three_disturbances(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--requests 20 --disturbances 3 --gap 1.5 --away 6 --seconds 150 --seed 5 --longest 400"
    code = chaos.main(options.split())
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "3 disturbances: SIG" in printed, printed
    passed = re.search(r"^(\d+) passed, 0 failed$", printed, re.MULTILINE)
    assert passed, printed
    assert int(passed[1]) >= 20, printed  # all of them, and again while disturbances were left
