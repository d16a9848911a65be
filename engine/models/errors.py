"""Why a model cannot be served: one exception, one line, fit to be printed as it is.

Knows nothing of who prints it.
"""

from __future__ import annotations

_LONGEST = 500  # characters


class ModelError(Exception):
    """The model is missing, broken or not supported. The message is one line and names the file or the model; what it
    repeats of a file may be anything, so characters that a terminal would obey become question marks."""

    def __init__(self, message: str) -> None:
        shown = "".join(character if character.isprintable() else "?" for character in message[: _LONGEST + 1])
        super().__init__(shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…")
