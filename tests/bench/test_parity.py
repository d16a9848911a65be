"""Token for token the same as `transformers` on the same weights: 8 prompts of 1 to 600 tokens, alone and together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_greedy_output_equals_the_reference() -> None:
    command = [sys.executable, str(ROOT / "bench" / "parity.py"), "--prompts", "8", "--new-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = re.search(r"(\d+) tokens compared, (\d+) ties within \S+ (\d+) differences", done.stdout)
    assert found is not None, done.stdout
    tokens, ties, differences = map(int, found.groups())
    assert tokens > 50 and differences == 0
    assert ties <= 1
