"""Logging as every process of the house does it: structlog to standard error, text for people or JSON for machines.

Lies on this floor because gateway and engine both import it. Knows no environment variable and no setting but its own.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["auto", "text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure(role: str, log_format: LogFormat = "auto", log_level: LogLevel = "info") -> None:
    """Send structlog's and the standard library's records through one chain to standard error.

    `role` ("gateway", "engine") is written into every JSON line. `auto` is text on a terminal and JSON elsewhere. May
    be called again: the last call holds.
    """
    text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        _without_copies,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if text else "iso", utc=not text),
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_text_tail() if text else _json_tail(role)),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _without_copies(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event.pop("color_message", None)  # uvicorn's second copy of its message, with escape codes
    return event


def _text_tail() -> list[Processor]:
    colors = sys.stderr.isatty()
    # Plain tracebacks: a pretty one prints local variables, and those hold prompts and keys.
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]


def _json_tail(role: str) -> list[Processor]:
    def add_role(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {"role": role, **event}

    return [structlog.processors.format_exc_info, add_role, structlog.processors.JSONRenderer()]
