"""Every key of tenancy in the store. All of one organisation lies in its own cluster slot, `{organisation}`.

Knows names only.
"""

from __future__ import annotations

ORGANIZATIONS = "noria:organizations"
"""SET of their ids."""

DEFAULT_ORGANIZATION = "org-default"
"""The installation's own: the first admin key is its, and its directory has the price list."""

LEDGERS = "noria:ledgers"
"""SET of the models whose ledger may hold something."""

PEPPER = "noria:pepper"
"""STRING: the fingerprint of the pepper that keys were made with."""


def key(digest: str) -> str:
    """STRING: `organisation/kind/id` of the key with this digest (`kind`: `key` or `admin`); in a slot of its own."""
    return f"noria:key:{digest}"


def organization(organization_id: str) -> str:
    """Prefix of all keys of one organisation; scripts make theirs from it."""
    return f"noria:{{{organization_id}}}:"


def directory(organization_id: str) -> str:
    """HASH: `organization`, `project/<id>`, `key/<id>`, `admin/<id>` as JSON, and in that of the installation's own
    organisation `price/<model>` (`*`: all that are not named); `version`, one more with every change."""
    return organization(organization_id) + "directory"


def audit(organization_id: str) -> str:
    """STREAM: one entry per change."""
    return organization(organization_id) + "audit"


def ledger(organization_id: str) -> str:
    """STREAM: one entry per request that ended."""
    return organization(organization_id) + "ledger"


def last_used(organization_id: str) -> str:
    """HASH: key id -> Unix seconds of the end of its last request."""
    return organization(organization_id) + "last_used"


def usage(organization_id: str, width: str, start: int) -> str:
    """HASH: what was used in one minute, hour or day (`width`: 1m, 1h, 1d) that began at `start`, Unix seconds."""
    return f"{organization(organization_id)}usage:{width}:{start}"


def spent(organization_id: str, period: str) -> str:
    """HASH: what counts against budgets in one period, such as `day:2026-11-30`."""
    return f"{organization(organization_id)}spent:{period}"


def reservations(organization_id: str) -> str:
    """ZSET: id of a reservation -> milliseconds at which somebody looks whether its request is still there."""
    return organization(organization_id) + "reservations"


def reservation(organization_id: str, reservation_id: str) -> str:
    """STRING: what one request has reserved, packed by ADMIT."""
    return f"{organization(organization_id)}reservation:{reservation_id}"


def meters(organization_id: str, subject: str) -> str:
    """HASH: limits of one key, project or organisation and where they stand."""
    return f"{organization(organization_id)}meters:{subject}"
