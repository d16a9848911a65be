"""One request that ended, as the pool's ledger has it and as it is kept on its organisation's books.

Knows fields and time buckets; no store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog

from noria.gateway.tenancy.limits import Tariff, period_of

WIDTHS = {"1m": 60, "1h": 3600, "1d": 86_400}
"""Seconds of a bucket of counts."""

FIELDS = (
    "id", "at", "project", "key", "model", "class", "prompt", "cached", "output", "cost", "reason", "engine",
    "queue_ms", "prefill_ms", "decode_ms",
)  # fmt: skip
"""Of an entry on an organisation's books. `at` is Unix milliseconds, `cost` billionths of a US dollar."""

NUMBERS = frozenset(("at", "prompt", "cached", "output", "cost", "queue_ms", "prefill_ms", "decode_ms"))

_SEPARATOR = "\x1f"
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """`place` is its id in the pool's ledger; `fields` are those of `FIELDS`."""

    place: str
    organization: str
    fields: dict[str, Any]

    @property
    def project(self) -> str:
        return str(self.fields["project"])

    @property
    def key(self) -> str:
        return str(self.fields["key"])

    def packed(self) -> list[Any]:
        """As POST takes it."""
        f = self.fields
        seconds = f["at"] // 1000
        buckets = [(width, seconds - seconds % length) for width, length in WIDTHS.items()]
        periods = [period_of(period, seconds) for period in ("day", "month")]
        flat = [str(part) for name in FIELDS for part in (name, f[name])]
        reservation = f["id"].rpartition("-")[0]
        return [
            self.place, reservation, f["id"], f["prompt"], f["cached"], f["output"], f["cost"], f["project"], f["key"],
            group(f["project"], f["key"], f["model"], f["class"]), buckets, periods, *flat,
        ]  # fmt: skip


def read_entry(model: str, place: bytes, flat: Any, tariff: Tariff) -> Entry | None:
    """An entry of the model's ledger, priced; None for one that cannot be read."""
    try:
        found = _texts(flat)
        organization, project, key = found.pop("account").split("/", 3)[:3]
        fields: dict[str, Any] = {n: int(float(v)) if n in NUMBERS else v for n, v in found.items()}
        fields |= {"project": project, "key": key, "model": model}
        fields["cost"] = tariff.cost(fields["prompt"], fields["cached"], fields["output"])
        missing = [name for name in FIELDS if name not in fields]
        if missing:
            raise ValueError(f"without {', '.join(missing)}")
    except (KeyError, ValueError, OverflowError) as error:
        log.error("an entry of a ledger cannot be read", model=model, place=place.decode(), reason=str(error))
        return None
    return Entry(place.decode(), organization, fields)


def asked_for(flat: Any, model: str) -> str:
    """What the entry's request asked for by name: an adapter that its account tells, or the ledger's model."""
    account = _texts(flat).get("account", "").split("/", 3)
    return account[3] if len(account) > 3 else model


def kept_entry(flat: Any) -> dict[str, Any]:
    """An entry of an organisation's ledger."""
    return {name: int(value) if name in NUMBERS else value for name, value in _texts(flat).items()}


def group(project: str, key: str, model: str, service_class: str) -> str:
    """What counts are kept by."""
    return _SEPARATOR.join((project, key, model, service_class))


def of_group(name: str) -> tuple[str, str, str, str]:
    """Project, key, model and class."""
    project, key, model, service_class = name.split(_SEPARATOR)
    return project, key, model, service_class


def _texts(flat: Any) -> dict[str, str]:
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): value.decode() for name, value in pairs}
