"""What is known of organisations, projects and keys: the records that are stored, and the parts that requests share.

Knows no store and no HTTP.
"""

from __future__ import annotations

import ipaddress
import secrets
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator

from noria.gateway.schemas.strict import Strict, at_most

Amount: TypeAlias = Annotated[int, Field(ge=1, le=10**15)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=128)]
Tier: TypeAlias = Literal["priority", "default", "flex", "batch"]
Endpoint: TypeAlias = Literal[
    "batches", "chat", "completions", "conversations", "detokenize", "embeddings", "files", "messages", "models",
    "openapi.json", "rerank", "responses", "score", "tokenize", "uploads",
]  # fmt: skip
"""The first word of a path behind /v1."""

Labels: TypeAlias = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
                              at_most(16)]  # fmt: skip
Models: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(strict=False)]
Tiers: TypeAlias = Annotated[tuple[Tier, ...], Field(strict=False)]
Endpoints: TypeAlias = Annotated[tuple[Endpoint, ...], Field(strict=False)]


MAX_LIMITED_MODELS = 128


class Rates(Strict):
    """How much at most; what is absent has no limit. Tokens are prompt and output together, unless said."""

    requests_per_minute: Amount | None = None
    requests_per_day: Amount | None = None
    tokens_per_minute: Amount | None = None
    tokens_per_day: Amount | None = None
    input_tokens_per_minute: Amount | None = None
    input_tokens_per_day: Amount | None = None
    output_tokens_per_minute: Amount | None = None
    output_tokens_per_day: Amount | None = None
    concurrent_requests: Amount | None = None
    queued_requests: Amount | None = None
    max_tokens: Amount | None = None


class Limits(Rates):
    """`models` are limits that hold beside the others, for requests of one model."""

    models: Annotated[dict[str, Rates], at_most(MAX_LIMITED_MODELS)] = Field(default_factory=dict)


class Budget(Strict):
    """What may be used in a day or a month (UTC), in tokens or US dollars. At `soft`, a share of it, an event is
    written; at the whole nothing more is let in."""

    period: Literal["day", "month"]
    unit: Literal["tokens", "usd"]
    limit: Annotated[float, Field(gt=0, le=1e15)]
    soft: Annotated[float, Field(gt=0, le=1)] = 0.8


Budgets: TypeAlias = Annotated[tuple[Budget, ...], Field(strict=False, max_length=8)]


class Price(Strict):
    """US dollars per million tokens; a cached prompt token costs as any other where nothing is said."""

    input: Annotated[float, Field(ge=0, le=1e6)]
    cached_input: Annotated[float, Field(ge=0, le=1e6)] | None = None
    output: Annotated[float, Field(ge=0, le=1e6)]


class Record(BaseModel):
    """Of the directory. Fields of a later version are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    id: str


class ListedPrice(Record):
    """Of the model `id`."""

    price: Price


class Stored(Record):
    """Who has rights or limits."""

    name: str
    created_at: int  # Unix seconds


class Organization(Stored):
    archived_at: int | None = None
    limits: Limits = Limits()
    budgets: Budgets = ()
    labels: Labels = Field(default_factory=dict)


class Project(Stored):
    """`models` and `service_tiers`: those that may be used; None: all. `weight` is its share of a busy queue."""

    archived_at: int | None = None
    weight: float = 1.0
    cache_group: str = ""
    models: Models | None = None
    service_tiers: Tiers | None = None
    limits: Limits = Limits()
    budgets: Budgets = ()
    labels: Labels = Field(default_factory=dict)


class FormerSecret(BaseModel):
    """The secret that a rotated key had before, and until when it still opens."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    digest: str
    redacted: str
    until: float  # Unix seconds


class Credential(Stored):
    redacted: str
    digest: str
    expires_at: int | None = None

    def is_expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


class ApiKey(Credential):
    """Of a project. What it may is the least of what it, its project and its organisation may."""

    project: str
    models: Models | None = None
    endpoints: Endpoints | None = None
    service_tiers: Tiers | None = None
    ip_allow_list: tuple[str, ...] = ()
    limits: Limits = Limits()
    budgets: Budgets = ()
    labels: Labels = Field(default_factory=dict)
    former: FormerSecret | None = None
    rotated_at: int | None = None


class AdminKey(Credential):
    """For the admin API. With the scope `instance` it may act for every organisation, and make them."""

    scope: Literal["organization", "instance"] = "organization"


class Networks(Strict):
    """Addresses or networks, as they are written: `10.0.0.0/8`, `2001:db8::/32`, `192.0.2.7`."""

    ip_allow_list: Annotated[list[Annotated[str, Field(max_length=64)]], at_most(256)] = Field(default_factory=list)

    @field_validator("ip_allow_list")
    @classmethod
    def _are_networks(cls, networks: list[str]) -> list[str]:
        for network in networks:
            ipaddress.ip_network(network, strict=False)
        return networks


def is_inside(address: str | None, networks: tuple[str, ...]) -> bool:
    """Whether a client's address lies in one of them. IPv4 in IPv6's clothes is IPv4."""
    if address is None:
        return False
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return any(ip in ipaddress.ip_network(network, strict=False) for network in networks)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
