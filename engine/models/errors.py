"""Why a model cannot be served: one exception, one line, fit to be printed as it is.

Knows nothing of who prints it.
"""

from __future__ import annotations


class ModelError(Exception):
    """The model is missing, broken or not supported. The message is one line and names the file or the model."""
