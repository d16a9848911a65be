"""A short chaos run: three disturbances, and every request still ends exactly once with its own text."""

from __future__ import annotations

import re

import pytest

from bench import chaos


def test_twenty_requests_survive_three_disturbances(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--requests",
        "20",
        "--disturbances",
        "3",
        "--gap",
        "1.5",
        "--seconds",
        "150",
        "--seed",
        "5",
        "--longest",
        "400",
    ]
    code = chaos.main(options)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "20 passed, 0 failed" in printed
    assert re.search(r"3 disturbances: SIG", printed), printed
