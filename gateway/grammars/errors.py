"""The one way in which a grammar is refused before any engine sees it."""

from __future__ import annotations


class Unsupported(ValueError):
    """What is asked for cannot be enforced, or makes no sense. `place` is a JSON pointer into the schema ("#" its root)
    where there is one."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"at {place}: {message}" if place else message)


def inside(place: str, *steps: str | int) -> str:
    """The pointer of a part of what lies at `place`."""
    return "/".join([place, *(str(step).replace("~", "~0").replace("/", "~1")[:64] for step in steps)])
