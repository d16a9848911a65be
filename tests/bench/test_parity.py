"""Token for token the same as `transformers` on the same weights: 8 prompts of 1 to 600 tokens, alone and together."""

from __future__ import annotations

from typing import Any

from bench.parity import measure


def test_greedy_output_equals_the_reference(demo_reference: Any) -> None:
    report = measure("smollm2-135m-instruct", demo_reference, count=8, longest=600, new_tokens=8)
    assert report.tokens > 50 and report.differences == []
    assert len(report.ties) <= 1
