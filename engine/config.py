"""The engine's settings: one frozen record, read from `NORIA_ENGINE_*` and from the command line's flags.

The CLI derives its options from these fields, so a field added here is an option there. Knows no gateway setting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from noria.engine.memory import parse_size
from noria.engine.wire.adapters import check_name
from noria.engine.wire.settings import REPEATABLE, Settings, with_credentials

DEMO_MODEL = "smollm2-135m-instruct"


Kernels = Literal["auto", "triton", "native", "torch"]


class Rendezvous(BaseSettings):
    """Who this process is among the ranks of one model, where torchrun or its like has started them: its variables."""

    model_config = SettingsConfigDict(frozen=True)

    rank: int = Field(0, ge=0)
    world_size: int = Field(0, ge=0)
    local_rank: int = Field(0, ge=0)  # among those of this machine
    local_world_size: int = Field(0, ge=0)
    master_addr: str = ""
    master_port: int = Field(0, ge=0, le=65535)

    @property
    def is_given(self) -> bool:
        return self.world_size > 1 and bool(self.master_addr and self.master_port)


class EngineConfig(Settings):
    """Settings of one engine process. Sizes are tokens or bytes as named; `0` in a size means "choose for me"."""

    table: ClassVar[str] = "engine"
    model_config = SettingsConfigDict(env_prefix="NORIA_ENGINE_", frozen=True, populate_by_name=True)

    model: str = Field(DEMO_MODEL, description="Alias, local folder (safetensors), GGUF file, or hub id")
    served_model_name: str = Field(
        "", description="Name in the API, and aliases after commas; default: the alias, or the file's own name"
    )
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
    redis_url: str = Field("redis://127.0.0.1:6379/0", validation_alias="NORIA_REDIS_URL", description="The store")
    store_wait: float = Field(
        0.0, ge=0, description="Time to wait at the start for a store that does not answer; then the engine gives up"
    )
    policy: Literal["static", "orca", "paged"] = Field("paged", description="Scheduling policy")
    max_batch_size: int = Field(64, ge=1, le=4096, description="Requests in one iteration at most")
    max_batch_tokens: int = Field(512, ge=16, le=1_048_576, description="Token budget of one iteration")
    max_chunk_tokens: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Prompt tokens beside running streams in one iteration, more if many rows idle; 0: by the device",
    )
    max_model_len: int = Field(0, ge=0, description="Prompt plus output in tokens at most; 0: the model's own length")
    kv_memory: str = Field(
        "auto",
        description="Bytes for the KV cache, of each rank, e.g. 512MiB; auto: a quarter of what is free, 2GiB at most",
    )
    kv_dtype: Literal["auto", "fp32", "fp16", "fp8"] = Field(
        "auto",
        description="Precision of the KV cache; auto: fp16 beside the C kernels, bf16 on a GPU, fp32 beside torch; "
        "fp8: on GPUs from 8.9 on",
    )
    kernels: Kernels = Field(
        "auto",
        description="What computes: Triton on a GPU, the C library (native), plain torch, or the first that runs here",
    )
    deterministic: bool = Field(
        False,
        description="The same bits for a token in any batch; on a GPU that is slower, with the C kernels always so",
    )
    cuda_graphs: bool = Field(
        True, description="On a GPU: launch what decode rows alone need as one graph, recorded at the start"
    )
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        "auto",
        description="Precision of weights that are floats; auto: as the files have them, bf16 on a GPU",
    )
    quantize: Literal["none", "int8", "q4", "fp8"] = Field(
        "none",
        description="Round weights that are floats when they are loaded; int8, q4: with the C kernels, fp8: on Hopper",
    )
    tp: int = Field(
        1,
        ge=1,
        le=64,
        description="Ranks (processes) that share each layer: tensor parallelism",
    )
    pp: int = Field(1, ge=1, le=64, description="Stages of layers, each on ranks of its own: pipeline parallelism")
    block_size: int = Field(16, ge=1, le=256, description="Tokens in one KV block")
    lora: Annotated[str, REPEATABLE] = Field(
        "",
        description="LoRA adapter of the model as NAME=FOLDER, served under that name; several: again, or after commas",
    )
    prefix_cache: bool = Field(True, description="Reuse the KV blocks of equal prompt prefixes of one tenant")
    pooling: Literal["auto", "mean", "last"] = Field(
        "auto", description="How a prompt's hidden states become an embedding; auto: as the model's files say, or mean"
    )
    speculate: Literal["off", "ngram"] = Field(
        "off", description="ngram: guess tokens from a request's own text and verify several in one iteration"
    )
    draft_tokens: int = Field(6, ge=1, le=32, description="Tokens guessed for one request and iteration at most")
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Sampling where a request is silent; auto: the model's generation_config.json, none: OpenAI's",
    )
    tool_parser: Literal[
        "auto", "none", "harmony", "deepseek", "mistral", "qwen_xml", "hermes", "pythonic", "llama", "json"
    ] = Field("auto", description="Format of the model's tool calls; auto: as its chat template has it")
    reasoning_parser: Literal["auto", "none", "think", "harmony"] = Field(
        "auto", description="Format of the model's thoughts; auto: as its chat template has it"
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Compute threads of each rank; 0: one per core, divided among ranks",
    )
    grammar_timeout: float = Field(
        5.0, gt=0, le=600, description="Time to compile one grammar or JSON schema; a request whose takes longer fails"
    )
    lease_seconds: float = Field(5.0, gt=0.5, le=600, description="An engine silent for this long is taken for dead")
    stuck_after: float = Field(
        300.0, gt=0, description="A loop that has not turned for so long lets its lease lapse and is no longer alive"
    )
    status_host: str = Field("127.0.0.1", description="Address of the engine's own /livez, /readyz and /metrics")
    status_port: int = Field(0, ge=0, le=65535, description="Port of these pages; 0: they are not served")
    vllm_metrics: bool = Field(False, description="Repeat figures under vLLM's names, for dashboards made for it")
    drain_timeout: float = Field(
        30.0, ge=0, le=86_400, description="Time for running requests to end after SIGTERM; then they are handed back"
    )
    trace_iterations: str = Field("", description="Append a log of every iteration to this file, for `noria trace`")
    progress_fd: int = Field(
        -1, validation_alias="NORIA_PROGRESS_FD", description="Descriptor for load progress as JSON lines; -1: log it"
    )
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

    @field_validator("kv_memory")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        if value.strip().lower() != "auto":
            parse_size(value)
        return value

    @field_validator("served_model_name")
    @classmethod
    def _are_names(cls, value: str) -> str:
        if value.strip() and not all(part.strip() for part in value.split(",")):
            raise ValueError("a name between two commas is empty")
        return value

    @field_validator("lora")
    @classmethod
    def _are_adapters(cls, value: str) -> str:
        _adapters(value)
        return value

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the adapters to begin with, by name."""
        return _adapters(self.lora)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names in the API as given, the model's id first and its aliases after it; empty for the model's own."""
        parts = (part.strip() for part in self.served_model_name.split(","))
        return tuple(dict.fromkeys(part for part in parts if part))


def _adapters(given: str) -> dict[str, Path]:
    """Of `name=folder,name=folder`. Raises ValueError."""
    found: dict[str, Path] = {}
    for part in filter(None, (part.strip() for part in given.split(","))):
        name, equals, folder = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not folder:
            raise ValueError(f"an adapter is given as NAME=FOLDER, not {part!r}")
        if name in found:
            raise ValueError(f"two adapters have the name {name!r}")
        check_name(name)
        found[name] = Path(folder).expanduser().absolute()
    return found
