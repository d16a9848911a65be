"""The key names that Python uses (scripts make theirs from the same pool prefix, see docs), and every lifetime.

Knows names and times only: no client, no message.
"""

from __future__ import annotations

from urllib.parse import quote

POOLS = "noria:pools"
"""ZSET of model ids; the score is when an id is forgotten unless an engine renews it."""

CARD_TTL = 600.0
"""Seconds that a pool stays known (503, not 404) after its last engine went."""

REGISTER_EVERY = 60.0
"""Seconds between renewals of a pool's entry in `POOLS`."""


def pool(model_id: str) -> str:
    """Prefix of all keys of one model's pool. The braces are the cluster's hash tag, so the id's own are quoted."""
    return f"noria:{{{quote(model_id, safe='/:@+=,~. ')}}}:"


def card(model_id: str) -> str:
    """STRING: the model card."""
    return pool(model_id) + "card"


def tokenizer(model_id: str) -> str:
    """STRING: the tokenizer and template files."""
    return pool(model_id) + "tokenizer"


def engines(model_id: str) -> str:
    """ZSET: engine -> when its lease ends, in milliseconds."""
    return pool(model_id) + "engines"


def adapters(model_id: str) -> str:
    """HASH: the pool's LoRA adapters by name."""
    return pool(model_id) + "adapters"


def adapter_reports(model_id: str, engine_id: str) -> str:
    """STRING: what an engine says became of the pool's adapters; it expires unless the engine renews it."""
    return f"{pool(model_id)}adapter_reports:{engine_id}"


def bell(model_id: str) -> str:
    """LIST of at most one element: an idle engine blocks here."""
    return pool(model_id) + "bell"


def dead(model_id: str) -> str:
    """STREAM: requests that took too many engines with them."""
    return pool(model_id) + "dead"


def request(model_id: str, request_id: str) -> str:
    """HASH: a request that has not ended."""
    return f"{pool(model_id)}request:{request_id}"


def ledger(model_id: str) -> str:
    """STREAM: requests that have ended and belong to an account, each written with its end; taken off it once it is on
    the account's own books."""
    return pool(model_id) + "ledger"


def wheel(model_id: str) -> str:
    """Channel on which an engine tells watchers of its iterations."""
    return pool(model_id) + "wheel"


WHEELS = "noria:{*}:wheel"
"""The pattern of all `wheel` channels."""

_FRAMES = "noria:frames:"


def frames(gateway: str) -> str:
    """STREAM: packed frames for one gateway process; it expires unless that process renews it."""
    return _FRAMES + gateway


def gateway_of(key: str) -> str:
    """The gateway whose `frames` the key is."""
    return key.removeprefix(_FRAMES)


_LOG = "noria:log:"


def log(request_id: str) -> str:
    """STREAM: all frames of one logged request, in a slot of its own."""
    return _LOG + request_id


def is_log(key: str) -> bool:
    """Whether the key is one of `log`."""
    return key.startswith(_LOG)


def record(tenant: str, name: str) -> str:
    """STRING: what a gateway remembers for a tenant under a name."""
    return f"noria:{{{quote(tenant, safe='/:@+=,~. ')}}}:record:{name}"


def watches(purpose: str) -> str:
    """ZSET: what some gateway must see to its end, and until when it holds it."""
    return f"noria:watches:{purpose}"


def records(tenant: str, kind: str) -> str:
    """Prefix of the keys under which all records of one kind lie, in the tenant's slot."""
    return f"noria:{{{quote(tenant, safe='/:@+=,~. ')}}}:records:{kind}:"


def entry(tenant: str, kind: str, part: str, record_id: str) -> str:
    """HASH: one record (`body`, `version`, `created`)."""
    return f"{records(tenant, kind)}entry:{part}/{record_id}"


def chunks(tenant: str, kind: str, part: str, record_id: str) -> str:
    """LIST: the bytes that belong to a record, in pieces."""
    return f"{records(tenant, kind)}chunks:{part}/{record_id}"


BATCHES = "noria:batches"
"""HASH: `batch_member` of every batch that is not over -> when it was put there."""


def batch_member(tenant: str, batch_id: str) -> str:
    """How `BATCHES` names a batch."""
    return f"{batch_id}/{tenant}"


def batch(tenant: str, batch_id: str, part: str) -> str:
    """What is known of a batch while it runs, in the tenant's slot. `lease`, STRING: which runner has it; `done`,
    STRING: one bit per line of its input; `counts`, HASH: lines and tokens so far."""
    return f"noria:{{{quote(tenant, safe='/:@+=,~. ')}}}:batch:{batch_id}:{part}"
