"""What `noria serve` itself asks its store: whether it answers, and for the first admin key.

Loads the store's client; who calls, and when, is `serve`'s affair.
"""

from __future__ import annotations

import asyncio
import sys

from noria.engine.wire.connection import BrokerUnavailable, Store
from noria.gateway.errors import GatewayError
from noria.gateway.tenancy.bootstrap import WrongPepper, bootstrap, has_admin


class StoreAway(Exception):
    """Where no store answers, and why: one line."""


def check_store(url: str) -> None:
    """Raises StoreAway unless a store answers at `url`, ValueError for what is no address."""
    store = Store(url)
    try:
        store.run(("PING",))
    except BrokerUnavailable as error:
        raise StoreAway(" ".join(str(error).split())) from None
    finally:
        store.close()


def first_admin_key(redis_url: str, pepper: str, command: str) -> str | None:
    """A line about the first admin key: the key itself on a terminal, for this once; None where there was one. What is
    no terminal may be a log, and no key belongs there: `command` makes one."""
    try:
        if not sys.stdout.isatty():
            return None if asyncio.run(has_admin(redis_url, pepper)) else f"none yet: {command} makes it"
        made = asyncio.run(bootstrap(redis_url, pepper))
    except WrongPepper as error:
        return f"{error}: give it in NORIA_KEY_PEPPER"
    except (BrokerUnavailable, GatewayError) as error:
        return f"not made ({error}); {command} makes it"
    return None if made is None else f"{made}   (for the admin API; shown this once)"
