"""Settings that change while the gateway runs: read again on SIGHUP, taken over as a whole or not at all.

Knows which settings can change and who must be told; not where settings come from.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from noria.gateway.config import GatewaySettings

log = structlog.get_logger(__name__)

RELOADABLE = (
    "api_key",
    "aliases",
    "max_queued",
    "max_queued_per_tenant",
    "max_choices",
    "max_stop_strings",
    "max_stream_backlog",
    "max_body_bytes",
    "body_timeout",
    "resend_after",
    "shutdown_timeout",
    "log_level",
)
"""Everything else is built into parts that live as long as the process."""


class LiveSettings:
    """The settings that hold `now`. Whoever keeps something made from them asks to be told of changes."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.now = settings
        self._watchers: list[Callable[[GatewaySettings], None]] = []

    def watch(self, apply: Callable[[GatewaySettings], None]) -> None:
        """Call `apply` with the settings now, and after each change."""
        self._watchers.append(apply)
        apply(self.now)

    def take(self, read: GatewaySettings) -> None:
        """Take over what can change, and name in the log what did and what waits for a restart. Raises ValueError,
        and changes nothing, where the change would let everybody in."""
        if self.now.api_keys and not read.api_keys and self.now.pepper is None:
            raise ValueError("there is no API key any more: everybody would be let in")
        differ = [name for name in GatewaySettings.model_fields if getattr(read, name) != getattr(self.now, name)]
        changed = {name: getattr(read, name) for name in differ if name in RELOADABLE}
        waiting = [name for name in differ if name not in RELOADABLE]
        if waiting:
            log.warning("settings that take effect at the next start", settings=waiting)
        self.now = self.now.model_copy(update=changed)
        for apply in self._watchers:
            apply(self.now)
        log.info("settings read again", changed=list(changed))


def reload(live: LiveSettings, read_again: Callable[[], GatewaySettings]) -> None:
    """Never raises: what is wrong with the settings is said, and those that were hold on."""
    try:
        live.take(read_again())
    except ValueError as error:
        log.error("settings cannot be used; nothing has changed", reason=str(error))
