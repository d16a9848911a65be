"""The records that cross between gateways and engines, and their one codec (msgpack through msgspec).

Every record is frozen and versioned by `WIRE_VERSION`; nothing is pickled. This file knows no Redis, HTTP or torch.
"""

from __future__ import annotations

import enum
from math import ceil

import msgspec

WIRE_VERSION = 1

CLASSES = ("priority", "default", "flex", "batch")
"""Queue classes, most urgent first; the index of a class is its rank in the scheduler."""


class FinishReason(enum.StrEnum):
    """Why a request ended. Text conditions (stop strings) are the gateway's and reach the engine as a cancel."""

    STOP = "stop"  # end-of-sequence or a stop token id
    LENGTH = "length"  # max_tokens, or the end of the model's context
    CANCELLED = "cancelled"  # asked for by the gateway
    EXPIRED = "expired"  # its deadline passed before it ended
    OVERLOADED = "overloaded"  # not begun: it waited for its turn in vain, and may try again
    ERROR = "error"  # its own fault inside a step, or two engines died with it


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output must match. `kind` says how to read `text`: "json_schema" (a schema as JSON), "json_object"
    (`text` is empty), "regex", "ebnf" (GBNF as llama.cpp and xgrammar read it; the rule `root` starts), "choice" (a
    JSON array of strings), "structural_tag" (xgrammar's structural tag format as JSON). `param` is the field of the
    client's request that it came from, for the error of one that cannot be compiled."""

    kind: str
    text: str = ""
    param: str = "response_format"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Ranges are checked at the gateway's door and again by `Request` in the engine.

    `seed` is always set (the gateway draws one when the client gives none), so that a request that moves to another
    engine goes on with the same noise. `top_k == 0`, `min_p == 0`, `top_p == 1` switch those filters off.
    `temperature == 0` is greedy. `logprobs` is None for none, else the number of alternatives per token (0 is legal:
    the chosen token alone). `prompt_logprobs` likewise, for the prompt's own tokens.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter: its name in the API, the folder where engines find it, and the digest of its files. An engine
    that has not got it, be it started later, finds all that it needs here."""

    name: str
    path: str
    digest: str


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt, one completion. `n > 1` and lists of prompts are several of these.

    `deadline_ms` is Unix time in milliseconds on Redis' clock (None: none). `gateway` is the boot id of the gateway
    process whose frame stream carries the answer. `priority` orders the requests of one tenant within its class: the
    lower value first. `weight` is the tenant's share against other tenants of the class. Cached
    prefixes are shared by requests of one tenant, or of one `cache_group` where the administrator set one, and of one
    `cache_salt`, which the client may choose to keep some of its own apart. The frames of a `logged`
    request are also kept in a log of its own, and it outlives its gateway. `pooling` ("mean" or "last") asks for one
    vector of the prompt's hidden states instead of tokens. `prediction` is a guess of the output, to speculate on. The
    end of a request with an `account` is written to the pool's ledger; a `copy` is one more choice for a prompt that
    another request pays for. Who traces gives `traceparent`, the gateway's span as W3C writes it, and `sent_ms`, Unix
    time in milliseconds. With an `adapter` the pool's model computes the request under that one.
    """

    id: str
    model: str
    prompt: list[int]
    sampling: SamplingParams
    gateway: str
    tenant: str = "default"
    service_class: str = "default"
    priority: int = 0
    deadline_ms: int | None = None
    cache_salt: str = ""
    weight: float = 1.0
    logged: bool = False
    pooling: str | None = None
    prediction: list[int] | None = None
    cache_group: str = ""
    account: str = ""
    copy: bool = False
    traceparent: str = ""
    sent_ms: int = 0
    adapter: AdapterRef | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token under the model's own distribution, with the best alternatives, best first. `rank` is
    the token's place among all, 1 for the best; 0: not counted."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of one request: the engine's count is the truth. How many of the output are thoughts only the
    gateway can tell; of a client's prediction, what was tried and was right or wrong, it adds up from the frames."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """What one iteration gave one request.

    `seq` is the number of output tokens before this frame; with `epoch` (one more at every claim) it lets the gateway
    drop what it has seen. `finish` is set exactly once, on the last frame; `usage` comes with it, and with an engine's
    first frame where part of the prompt was cached. `prompt_logprobs` comes with the first
    frame of a request that asked for it: one entry per prompt token, None for the first token. `error_param` names the
    field of the client's request that is at fault, where the error is the client's. `embedding` is a pooled request's
    vector, little-endian float32. `predicted`: how many tokens of the request's prediction were tried for this frame,
    right ones and wrong ones.
    """

    request_id: str
    epoch: int
    seq: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error_param: str | None = None
    embedding: bytes | None = None
    predicted: tuple[int, int] | None = None


TOOL_PARSERS = (
    "auto", "none", "harmony", "deepseek", "mistral", "qwen_xml", "hermes", "pythonic", "llama", "json",
)  # fmt: skip
"""Formats of tool calls that a gateway can read; "auto": as the model's chat template has it."""

REASONING_PARSERS = ("auto", "none", "think", "harmony")
"""Formats of thoughts that a gateway can read."""


class ModelCard(msgspec.Struct, frozen=True):
    """What a gateway must know of a model to validate, render and encode without having its files.

    Gateways make cards of adapters from that of their pool's model: those have an `adapter` and the pool's id as
    `base`.
    """

    id: str
    aliases: tuple[str, ...]
    created: int  # Unix seconds
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    kv_tokens: int  # of the longest text that the KV pool holds: a request above this can never run
    block_size: int  # tokens per KV block
    eos_token_ids: tuple[int, ...]
    reserve_output: bool  # True where admission reserves prompt + max_tokens (policies static and orca)
    policy: str
    fingerprint: str  # system_fingerprint: weights, precision and version
    embedding_size: int = 0  # numbers in a pooled request's vector; 0: this model gives none
    pooling: str = "mean"  # how this model's vectors are to be made: "mean" or "last"
    deterministic: bool = False  # whether a token has the same bits alone and in any batch
    tool_parser: str = "auto"  # one of TOOL_PARSERS
    reasoning_parser: str = "auto"  # one of REASONING_PARSERS
    sampling_defaults: dict[str, float] = {}  # of a request that is silent: temperature, top_p, top_k, ...
    wire_version: int = WIRE_VERSION
    takes_adapters: bool = False  # whether LoRA adapters can be loaded beside it
    adapter: AdapterRef | None = None
    base: str = ""
    kv_limits: tuple[int, ...] = ()
    """Where layers have windows: for each group of them the KV blocks that a text holds there at most; 0: no limit."""

    @property
    def pool(self) -> str:
        """The model whose engines compute this one."""
        return self.base or self.id

    def kv_blocks(self, num_tokens: int, num_prompt: int) -> int:
        """KV blocks that a request of so many tokens holds at once at most."""
        pages = ceil(num_tokens / self.block_size)
        read = ceil(num_prompt / self.block_size) if self.reserve_output else 0  # prompts are read whole there
        return sum(min(pages, max(limit, read)) if limit else pages for limit in self.kv_limits or (0,))


class TokenizerFiles(msgspec.Struct, frozen=True):
    """A tokenizer as published: `tokenizer_json` is the `tokenizers` library's format."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool  # prefix plain completions with the BOS token
    special_tokens: dict[str, str] = {}  # further names that a template may use, e.g. pad_token


ITERATION_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ITERATION_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Upper bounds of the buckets in which engines count their iterations; one more bucket holds what is above."""


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges, counters and histograms of one engine since its start, as published for /metrics."""

    running: int = 0  # admitted requests
    waiting: int = 0  # claimed from the queue, not yet admitted, or preempted
    batch_size: int = 0  # rows of the last iteration
    batch_tokens: int = 0  # tokens of the last iteration
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by requests
    kv_blocks_cached: int = 0  # free, but still holding a reusable prefix
    iterations_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0
    memory_preemptions_total: int = 0  # for lack of KV blocks
    class_preemptions_total: int = 0  # by requests of a higher class
    recomputed_tokens_total: int = 0  # computed again after a preemption
    drafted_tokens_total: int = 0  # guessed
    accepted_tokens_total: int = 0  # guessed right
    requests_finished_total: int = 0
    requests_failed_total: int = 0
    iteration_seconds: tuple[int, ...] = (0,) * (len(ITERATION_SECONDS) + 1)  # iterations by bucket
    iteration_seconds_sum: float = 0.0
    iteration_rows: tuple[int, ...] = (0,) * (len(ITERATION_ROWS) + 1)
    iteration_rows_sum: int = 0
    select_seconds_total: float = 0.0  # the scheduler's choice of rows
    exchange_seconds_total: float = 0.0  # with the store, waiting for work left out
    draining: bool = False  # it claims nothing more and will go
    grammars_compiled_total: int = 0
    grammars_failed_total: int = 0  # refused, or cut off at a limit
    grammar_cache_hits_total: int = 0
    grammar_seconds_total: float = 0.0  # from asking for a grammar that is not in the cache to the answer
    kernel_compiles_total: int = 0  # after the warm-up: each held up an iteration
    adapters: int = 0  # loaded
    adapter_bytes: int = 0
    adapter_loads_total: int = 0
    adapter_load_failures_total: int = 0


class Claimed(msgspec.Struct, frozen=True):
    """A request that this engine now owns. `delivered` are the frames that earlier engines recorded for it, in order;
    generation resumes after them, and they are published again (the gateway drops what it has seen)."""

    request: GenerationRequest
    epoch: int
    delivered: list[TokenFrame]


def encode(record: msgspec.Struct | list[TokenFrame]) -> bytes:
    """Msgpack bytes of a record or of a list of frames."""
    return _encoder.encode(record)


_encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(GenerationRequest).decode
decode_frame = msgspec.msgpack.Decoder(TokenFrame).decode
decode_frames = msgspec.msgpack.Decoder(list[TokenFrame]).decode
decode_card = msgspec.msgpack.Decoder(ModelCard).decode
decode_tokenizer = msgspec.msgpack.Decoder(TokenizerFiles).decode
decode_stats = msgspec.msgpack.Decoder(EngineStats).decode
