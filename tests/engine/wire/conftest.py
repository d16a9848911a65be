"""Real stores for the broker's tests: a Redis 7 server and the embedded Valkey, each on a unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from bench.store import Store, running_store
from noria.engine.wire.broker import EngineBroker, Exchange, GatewayBroker
from noria.engine.wire.messages import (
    Claimed,
    FinishReason,
    GenerationRequest,
    ModelCard,
    SamplingParams,
    TokenFrame,
    TokenizerFiles,
    Usage,
)

MODEL = "demo/model"


@pytest.fixture(scope="module", params=["redis", "valkey"])
def running_server(request: pytest.FixtureRequest) -> Iterator[Store]:
    with running_store(request.param) as store:
        yield store


@pytest.fixture
def server(running_server: Store) -> Store:
    """An empty store."""
    running_server.client.flushall()
    return running_server


@pytest.fixture
def card() -> ModelCard:
    return ModelCard(
        id=MODEL,
        aliases=("demo",),
        created=1,
        max_model_len=2048,
        vocab_size=1000,
        kv_tokens=16_000,
        block_size=16,
        eos_token_ids=(2,),
        reserve_output=False,
        policy="paged",
        fingerprint="fp",
    )


@pytest.fixture
def tokenizer_files() -> TokenizerFiles:
    return TokenizerFiles(tokenizer_json="{}", chat_template="{{ x }}", bos_token=None, eos_token="</s>", add_bos=False)


@pytest.fixture
async def gateway(server: Store) -> AsyncIterator[GatewayBroker]:
    broker = GatewayBroker(server.url)
    await broker.start()
    yield broker
    await broker.close()


@pytest.fixture
def make_engine(
    server: Store, card: ModelCard, tokenizer_files: TokenizerFiles
) -> Iterator[Callable[..., EngineBroker]]:
    """Registered engines of one pool; closed at the end."""
    engines: list[EngineBroker] = []

    def make(**options: object) -> EngineBroker:
        engine = EngineBroker(server.url, MODEL, **options)  # type: ignore[arg-type]
        engine.register(card, tokenizer_files)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_request(gateway: GatewayBroker) -> Callable[..., GenerationRequest]:
    """Requests with a prompt of `prompt` tokens, of `gateway` unless another is named."""

    def make(request_id: str, *, prompt: int = 4, max_tokens: int = 8, **fields: object) -> GenerationRequest:
        whole = {"gateway": gateway.boot_id, **fields}
        sampling = SamplingParams(max_tokens=max_tokens)
        return GenerationRequest(  # type: ignore[misc]
            id=request_id, model=MODEL, prompt=list(range(prompt)), sampling=sampling, **whole
        )

    return make


class FrameReader:
    """Everything that a gateway's stream has given so far."""

    def __init__(self, gateway: GatewayBroker) -> None:
        self._frames = gateway.frames()
        self.all: list[TokenFrame] = []

    async def until(self, enough: Callable[[list[TokenFrame]], bool], timeout: float = 10.0) -> list[TokenFrame]:
        async with asyncio.timeout(timeout):
            while not enough(self.all):
                self.all += await anext(self._frames)
        return self.all

    async def last_of(self, *request_ids: str) -> list[TokenFrame]:
        """The last frame of each request, once all have come."""

        def lasts() -> dict[str, TokenFrame]:
            return {f.request_id: f for f in self.all if f.finish is not None}

        await self.until(lambda _: set(request_ids) <= set(lasts()))
        return [lasts()[request_id] for request_id in request_ids]


@pytest.fixture
def reader(gateway: GatewayBroker) -> FrameReader:
    return FrameReader(gateway)


def _step(engine: EngineBroker, *rows: tuple[Claimed, TokenFrame], max_requests: int = 0, max_blocks: int = 1000):  # type: ignore[no-untyped-def]
    frames: dict[str, list[TokenFrame]] = {}
    for claimed, frame in rows:
        frames.setdefault(claimed.request.gateway, []).append(frame)
    return engine.exchange(frames, None, max_requests=max_requests, max_blocks=max_blocks)


@pytest.fixture
def step() -> Callable[..., Exchange]:
    """One exchange: (claimed, frame) pairs go out, up to `max_requests` come in."""
    return _step


def _row(claimed: Claimed, seq: int, token_ids: list[int], finish: FinishReason | None = None) -> object:
    usage = Usage(len(claimed.request.prompt), seq + len(token_ids)) if finish else None
    return claimed, TokenFrame(claimed.request.id, claimed.epoch, seq, token_ids, finish=finish, usage=usage)


@pytest.fixture
def row() -> Callable[..., object]:
    """What `step` sends for one request: tokens from `seq` on, with `finish` the last ones."""
    return _row


@pytest.fixture
def lapse(server: Store) -> Callable[[EngineBroker], None]:
    """Let an engine's lease run out on the server's clock."""
    return lambda engine: server.client.zadd("noria:{demo/model}:engines", {engine.engine_id: 1})
