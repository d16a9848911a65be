"""The gateway's settings: one frozen record, read from `NORIA_GATEWAY_*`, `NORIA_REDIS_URL` and `NORIA_API_KEY`.

The CLI derives its options from these fields. Knows no engine setting.
"""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class GatewaySettings(BaseSettings):
    """Settings of one gateway process. Sizes are bytes, times are seconds."""

    model_config = SettingsConfigDict(env_prefix="NORIA_GATEWAY_", frozen=True, extra="ignore", populate_by_name=True)

    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("redis_url", "NORIA_REDIS_URL"),
        description="The store",
    )
    api_key: SecretStr = Field(
        SecretStr(""),
        validation_alias=AliasChoices("api_key", "NORIA_API_KEY"),
        description="Keys that are let in, comma-separated; none: open to everybody",
    )
    open_metrics: bool = Field(True, description="Serve /metrics without a key")
    cors_origins: str = Field("", description="Browser origins that may call the API, comma-separated; *: any")
    max_body_bytes: int = Field(10 * 1024 * 1024, ge=1024, description="Largest request body")
    max_head_bytes: int = Field(64 * 1024, ge=1024, description="Largest request line and headers")
    head_timeout: float = Field(20.0, gt=0, description="Time for a client to send its headers")
    body_timeout: float = Field(60.0, gt=0, description="Time for a client to send its body")
    keep_alive: int = Field(75, ge=0, description="Time that an idle connection is kept")
    max_choices: int = Field(128, ge=1, le=4096, description="Prompts times n in one request at most")
    max_stop_strings: int = Field(4, ge=1, le=256, description="Stop strings in one request at most")
    max_stream_backlog: int = Field(16384, ge=256, description="Tokens kept for a client that does not read")
    request_timeout: float = Field(3600.0, gt=0, description="Longest life of a request, waiting included")
    resend_after: float = Field(15.0, gt=0, description="Silence after which a request is offered to the store again")
    shutdown_timeout: int = Field(30, ge=0, description="Time for open answers to end after SIGTERM")
    log_format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else JSON")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe line to log")

    @property
    def api_keys(self) -> tuple[str, ...]:
        return _split(self.api_key.get_secret_value())

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return _split(self.cors_origins)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
