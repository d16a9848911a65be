"""What the books of an organisation say, read straight from the store."""

from __future__ import annotations

import redis

ORG = "org-default"


class Store:
    """Of the module's store."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)

    def held(self) -> dict[str, float]:
        """All that is reserved, of every meter and budget; empty at rest."""
        found = {}
        for key in self.client.scan_iter(f"noria:{{{ORG}}}:meters:*"):
            for field, value in self.client.hgetall(key).items():
                if float(value.split()[2]):
                    found[f"{key}/{field}"] = float(value.split()[2])
        for key in self.client.scan_iter(f"noria:{{{ORG}}}:spent:*"):
            found |= {
                f"{key}/{f}": float(v) for f, v in self.client.hgetall(key).items() if f.endswith(":held") and int(v)
            }
        return found

    def running(self) -> list[str]:
        """Reservations, and what waits at a gate for them to end."""
        patterns = [f"noria:{{{ORG}}}:{kind}:*" for kind in ("reservation", "running", "waiting")]
        return [key for pattern in patterns for key in self.client.scan_iter(pattern)]

    def ledger(self, project: str) -> list[dict[str, str]]:
        """Entries of a project, the oldest first."""
        entries = self.client.xrange(f"noria:{{{ORG}}}:ledger")
        return [fields for _, fields in entries if fields["project"] == project]

    def unposted(self) -> int:
        return sum(self.client.xlen(key) for key in self.client.scan_iter("noria:{*}:ledger") if "org-" not in key)

    @property
    def is_at_rest(self) -> bool:
        return not self.unposted() and not self.held() and not self.running()
