"""A whole engine whose model is a function of the tokens, and a client of it without HTTP."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from noria.engine.engine import Engine
from noria.engine.execution.executor import LocalExecutor
from noria.engine.execution.sampler import sample
from noria.engine.execution.step import RowInput, RowOutput, StepInput
from noria.engine.grammar.grammars import Grammars
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.spans import EngineSpans
from noria.engine.wheel import Wheel
from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import (
    FinishReason,
    GenerationRequest,
    ModelCard,
    SamplingParams,
    TokenFrame,
    TokenizerFiles,
)
from noria.engine.wire.tokenizer import Tokenizer

BAD, BROKEN_LOGITS, EOS = 666, 667, 999
CARD = ModelCard(
    id="tiny",
    aliases=(),
    created=1,
    max_model_len=512,
    vocab_size=1000,
    kv_tokens=64 * 16,
    block_size=16,
    eos_token_ids=(EOS,),
    reserve_output=False,
    policy="paged",
    fingerprint="fp",
)


def byte_files() -> TokenizerFiles:
    """Ids 0 to 255 are bytes; the model's other ids mean nothing."""
    vocab = {symbol: place for place, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return TokenizerFiles(inner.to_str(), None, None, None, False)


FILES = byte_files()
TOKENIZER = Tokenizer.load(FILES)


def next_token(last: int) -> int:
    """The model: each token is followed by one more; 499 by the end of the sequence."""
    return EOS if last == 499 else last + 1


class TinyModel:
    """Fails whole iterations that hold the token BAD, and gives broken logits to rows that hold BROKEN_LOGITS. The
    vector of a pooled row is its token ids, one after the other. Rows with a grammar get logits of noise and the real
    sampler."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.pace = 0.0

    def execute(self, step: StepInput) -> list[RowOutput]:
        time.sleep(self.pace)
        self.batch_sizes.append(len(step.rows))
        if any(BAD in row.token_ids for row in step.rows):
            raise ArithmeticError("planted fault")
        return [self._output(row) for row in step.rows]

    def _output(self, row: RowInput) -> RowOutput:
        if BROKEN_LOGITS in row.token_ids:
            return RowOutput(error="planted")
        if row.pooling:
            return RowOutput(pooled=row.pooling.carried + array("i", row.token_ids).tobytes())
        if row.sampling is not None and row.sampling.mask is not None:
            noise = torch.Generator().manual_seed(row.sampling.position)
            return sample(torch.randn(1, CARD.vocab_size, generator=noise), [row.sampling])[0]
        return RowOutput((next_token(row.token_ids[-1]),) if row.sampling else ())


class RunningEngine:
    def __init__(
        self,
        url: str,
        *,
        lease_seconds: float = 5.0,
        executor: type[LocalExecutor] = LocalExecutor,
        policy: str = "paged",
        grammars: Grammars | None = None,
        wheel: Wheel | None = None,
        spans: EngineSpans | None = None,
    ) -> None:
        self.model = TinyModel()
        self.scheduler = Scheduler(
            POLICIES[policy],
            KVBlocks(64, 16, policy == "paged"),
            max_batch_size=8,
            max_batch_tokens=64,
            max_model_len=512,
            num_stages=executor.depth,
        )
        self.executor = executor(self.model.execute)
        self.broker = EngineBroker(url, "tiny", lease_seconds=lease_seconds)
        self.broker.register(CARD, FILES)
        grammars = grammars or Grammars(FILES, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids)
        self.engine = Engine(self.scheduler, self.executor, self.broker, CARD, grammars, wheel=wheel, spans=spans)
        self._stop, self.hurry = threading.Event(), threading.Event()
        self._drain_seconds = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.engine.step()
        self.engine.run(self._stop, self.hurry, self._drain_seconds)

    def drain(self, seconds: float) -> None:
        """What the first signal does."""
        self._drain_seconds = seconds
        self._stop.set()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.executor.close()

    def halt(self) -> None:
        """Stop turning, as a process that dies would; the lease stays until it lapses."""
        self._stop.set()
        self.join()

    def stop(self) -> None:
        self.halt()
        self.broker.close()


class Client:
    """A gateway's face without HTTP."""

    def __init__(self, broker: GatewayBroker) -> None:
        self.broker = broker
        self._frames = broker.frames()
        self.tokens: dict[str, list[int]] = {}
        self.first: dict[str, TokenFrame] = {}
        self.last: dict[str, TokenFrame] = {}

    async def send(self, request_id: str, prompt: list[int], **fields: object) -> None:
        sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0, **fields.pop("sampling", {})})  # type: ignore[arg-type,dict-item]
        request = GenerationRequest(request_id, "tiny", prompt, sampling, self.broker.boot_id, **fields)  # type: ignore[arg-type]
        await self.broker.enqueue(request, CARD)

    async def read(self, until: Callable[[], bool]) -> None:
        while not until():
            for frame in await anext(self._frames):
                known = self.tokens.setdefault(frame.request_id, [])
                assert frame.seq <= len(known), "a gap"
                known += frame.token_ids[len(known) - frame.seq :]
                assert frame.request_id not in self.last, "two ends"
                self.first.setdefault(frame.request_id, frame)
                if frame.finish is not None:
                    self.last[frame.request_id] = frame

    async def ends(self, *request_ids: str) -> list[FinishReason | None]:
        await self.read(lambda: all(i in self.last for i in request_ids))
        return [self.last[i].finish for i in request_ids]
