"""The gateway's settings: one frozen record, read from `NORIA_GATEWAY_*`, `NORIA_REDIS_URL`, `NORIA_API_KEY` and the
places of `engine/wire/settings.py`.

The CLI derives its options from these fields. Knows no engine setting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from noria.engine.wire.settings import Settings, with_credentials
from noria.gateway.tenancy.credentials import Pepper

MAX_WEIGHT = 1000.0
_ENTRY = re.compile(
    r"(?P<tenant>[A-Za-z0-9_.-]{1,64})(?:\*(?P<weight>[0-9]+(?:\.[0-9]+)?))?(?:@(?P<group>[A-Za-z0-9_.-]{1,64}))?"
    r"=(?P<key>.*[^=].*)\Z"
)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One accepted key, and for whom: `weight` is the tenant's share of a busy queue against other tenants'. Tenants of
    one `cache_group` use each other's cached prefixes, and can tell by the time whether a prefix is cached; by default
    a tenant shares with nobody."""

    key: str
    tenant: str = "default"
    weight: float = 1.0
    cache_group: str = ""


class GatewaySettings(Settings):
    """Settings of one gateway process. Sizes are bytes, times are seconds."""

    table: ClassVar[str] = "gateway"

    model_config = SettingsConfigDict(
        env_prefix="NORIA_GATEWAY_", frozen=True, extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one")
    tls_cert: str = Field(
        "", description="PEM file of a certificate and its chain: then HTTPS is spoken, and only that"
    )
    tls_key: str = Field("", validate_default=True, description="PEM file of the certificate's private key")
    redis_password: SecretStr = Field(
        SecretStr(""), validation_alias="NORIA_REDIS_PASSWORD", description="The store's, where its URL has none"
    )
    redis_tls_ca: str = Field(
        "", validation_alias="NORIA_REDIS_TLS_CA", description="PEM file of who vouches for a rediss:// store"
    )
    redis_tls_cert: str = Field(
        "", validation_alias="NORIA_REDIS_TLS_CERT", description="PEM file of our own certificate, where the store asks"
    )
    redis_tls_key: str = Field("", validation_alias="NORIA_REDIS_TLS_KEY", description="PEM file of its private key")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("redis_url", "NORIA_REDIS_URL"),
        description="The store",
    )
    api_key: SecretStr = Field(
        SecretStr(""),
        validation_alias=AliasChoices("api_key", "NORIA_API_KEY"),
        description="Keys that are let in, comma-separated: KEY or TENANT*WEIGHT@CACHE_GROUP=KEY; none: everybody is",
    )
    key_pepper: SecretStr = Field(
        SecretStr(""),
        validation_alias=AliasChoices("key_pepper", "NORIA_KEY_PEPPER"),
        description="Secret that stored API keys are hashed with; with it the admin API and its keys are there",
    )
    aliases: str = Field("", description="More names of models, comma-separated: NAME=MODEL")
    limits_fail: Literal["closed", "open"] = Field(
        "closed", description="What becomes of requests while their limits cannot be asked: refused, or let in"
    )
    ledger_days: int = Field(30, ge=1, le=3650, description="Days that each request's entry in the ledger is kept")
    usage_days: int = Field(400, ge=32, le=3650, description="Days that usage by day is kept")
    open_metrics: bool = Field(True, description="Serve /metrics without a key")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of /metrics, which then is at no other; 0: it is beside the API"
    )
    metrics_host: str = Field("", description="Address of that port; empty: that of the API")
    vllm_metrics: bool = Field(False, description="Repeat figures under vLLM's names, for dashboards made for it")
    cors_origins: str = Field(
        "auto",
        description="Browser origins that may call the API, comma-separated; *: any; auto: any if a key is asked for",
    )
    max_body_bytes: int = Field(10 * 1024 * 1024, ge=1024, description="Largest request body")
    max_head_bytes: int = Field(64 * 1024, ge=1024, description="Largest request line and headers")
    head_timeout: float = Field(20.0, gt=0, description="Time for a client to send its headers")
    body_timeout: float = Field(60.0, gt=0, description="Time for a client to send its body")
    keep_alive: int = Field(75, ge=0, description="Time that an idle connection is kept")
    max_choices: int = Field(128, ge=1, le=4096, description="Prompts times n in one request at most")
    max_stop_strings: int = Field(4, ge=1, le=256, description="Stop strings in one request at most")
    max_stream_backlog: int = Field(16384, ge=256, description="Tokens kept for a client that does not read")
    max_queued: int = Field(10_000, ge=1, description="Requests waiting for one model at most: then 503")
    max_queued_per_tenant: int = Field(5_000, ge=1, description="Of these, one tenant's at most: then 429")
    request_timeout: float = Field(3600.0, gt=0, description="Longest life of a request, waiting included")
    resend_after: float = Field(15.0, gt=0, description="Silence after which a request is offered to the store again")
    resume_window: float = Field(
        30.0, gt=0, le=3600, description="Time that a resumable answer runs on without its client"
    )
    response_ttl: float = Field(
        30 * 86_400.0, gt=0, description="Time that a stored response or chat completion is kept"
    )
    conversation_ttl: float = Field(365 * 86_400.0, gt=0, description="Time that a conversation outlives its last use")
    max_response_bytes: int = Field(
        256 * 1024 * 1024, ge=1024, description="Stored answers of one tenant and kind at most: then the oldest go"
    )
    max_conversation_bytes: int = Field(
        256 * 1024 * 1024, ge=1024, description="Conversations of one tenant at most: then 400"
    )
    max_file_bytes: int = Field(200 * 1024 * 1024, ge=1024, description="Largest file that may be uploaded")
    max_stored_file_bytes: int = Field(1024 * 1024 * 1024, ge=1024, description="Files of one tenant at most: then 400")
    batch_concurrency: int = Field(16, ge=0, le=1024, description="Lines of batches that run here at once; 0: none do")
    shutdown_timeout: int = Field(30, ge=0, description="Time for open answers to end after SIGTERM")
    traces: str = Field(
        "",
        description="OTLP/HTTP address to send traces to, like http://collector:4318/v1/traces; empty: none are made",
    )
    log_format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else JSON")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe line to log")

    @field_validator("redis_url")
    @classmethod
    def _has_credentials(cls, value: str, info: ValidationInfo) -> str:
        return with_credentials(value, info)

    @field_validator("tls_key")
    @classmethod
    def _belong_together(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("tls_cert")):
            raise ValueError("tls_cert and tls_key are given together or not at all")
        return value

    @field_validator("metrics_port")
    @classmethod
    def _is_another(cls, value: int, info: ValidationInfo) -> int:
        if value and value == info.data.get("port"):
            raise ValueError("metrics_port is another one than port, or 0")
        return value

    @field_validator("api_key")
    @classmethod
    def _are_entries(cls, value: SecretStr) -> SecretStr:
        parse_keys(value.get_secret_value())
        return value

    @field_validator("aliases")
    @classmethod
    def _are_aliases(cls, value: str) -> str:
        parse_aliases(value)
        return value

    @field_validator("key_pepper")
    @classmethod
    def _is_long_enough(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            Pepper(value.get_secret_value())
        return value

    @property
    def doors(self) -> tuple[tuple[str, int], ...]:
        """Hosts and ports to listen on: the API's, and that of the figures where they are apart."""
        api = (self.host, self.port)
        return (api, (self.metrics_host or self.host, self.metrics_port)) if self.metrics_port else (api,)

    @property
    def pepper(self) -> Pepper | None:
        """None: there are no stored keys."""
        text = self.key_pepper.get_secret_value()
        return Pepper(text) if text else None

    @property
    def key_entries(self) -> tuple[KeyEntry, ...]:
        return parse_keys(self.api_key.get_secret_value())

    @property
    def model_by_alias(self) -> dict[str, str]:
        return parse_aliases(self.aliases)

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(entry.key for entry in self.key_entries)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Any page may call a server that asks for a key, which no page has unless it was told; a server open to
        everybody who can reach it would be open to every page in their browsers."""
        if self.cors_origins == "auto":
            return ("*",) if self.api_keys or self.key_pepper.get_secret_value() else ()
        return _split(self.cors_origins)


def parse_keys(text: str) -> tuple[KeyEntry, ...]:
    """The entries of a list of keys. A key that only ends in `=` (base64) is a key alone. Raises ValueError, which
    repeats no key."""
    entries = tuple(_entry(part) for part in _split(text))
    weights: dict[str, float] = {}
    groups: dict[str, str] = {}
    tenants: dict[str, str] = {}
    for entry in entries:
        if weights.setdefault(entry.tenant, entry.weight) != entry.weight:
            raise ValueError(f"the tenant {entry.tenant} is given two weights")
        if groups.setdefault(entry.tenant, entry.cache_group) != entry.cache_group:
            raise ValueError(f"the tenant {entry.tenant} is given two cache groups")
        if tenants.setdefault(entry.key, entry.tenant) != entry.tenant:
            raise ValueError(f"one key is given to two tenants: {tenants[entry.key]} and {entry.tenant}")
    return entries


def parse_aliases(text: str) -> dict[str, str]:
    """Model by alias. Raises ValueError."""
    models: dict[str, str] = {}
    for part in _split(text):
        alias, equals, model = (piece.strip() for piece in part.partition("="))
        if not (alias and equals and model):
            raise ValueError(f"an alias is written NAME=MODEL, which {part} is not")
        if models.setdefault(alias, model) != model:
            raise ValueError(f"the alias {alias} is given to two models")
    return models


def _entry(part: str) -> KeyEntry:
    found = _ENTRY.match(part)
    if found is None:
        head, equals, _ = part.partition("=")
        if equals and (not head or "*" in head or "@" in head):  # no key looks so, least of all base64
            raise ValueError("an entry is neither KEY nor TENANT*WEIGHT@CACHE_GROUP=KEY, with a plain number as WEIGHT")
        return KeyEntry(part)
    weight = float(found["weight"] or 1.0)
    if not 0.001 <= weight <= MAX_WEIGHT:
        raise ValueError(f"the weight of tenant {found['tenant']} is not between 0.001 and {MAX_WEIGHT:g}")
    return KeyEntry(found["key"].strip(), found["tenant"], weight, found["group"] or "")


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
