"""Random numbers that belong to a place, not to a moment: keyed by (request seed, position in the request).

A request therefore draws the same noise alone, in any batch, and after it has moved to another engine.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    key = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53
