"""Generation without a queue: the same scheduler, executor and rows as in serving, driven by a plain loop.

For benchmarks, tests and scripts. Knows no store and no network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from noria.engine.assembly import assemble, open_trace
from noria.engine.config import EngineConfig
from noria.engine.execution.step import StepInput
from noria.engine.live import LiveRequest
from noria.engine.plan import plan
from noria.engine.scheduling.batch import Batch
from noria.engine.trace import Times
from noria.engine.wire.messages import Claimed, GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens of one request and why it ended ("stop" or "length")."""

    token_ids: list[int]
    finish: str


class OfflineEngine:
    """A model in this process. Raises what `assembly.plan` raises."""

    def __init__(self, config: EngineConfig) -> None:
        planned = plan(config)
        self._trace = open_trace(planned)
        self._assembly = assembly = assemble(planned)
        self.card = assembly.card
        self.tokenizer_files = assembly.tokenizer_files
        self._scheduler = assembly.scheduler
        self._executor = assembly.executor

    def embed(self, prompts: Sequence[list[int]], pooling: str) -> list[bytes]:
        """One vector per prompt, each little-endian float32, not normalised. Raises as `generate`."""
        params = SamplingParams(max_tokens=0)
        requests = [
            GenerationRequest(str(index), self.card.id, prompt, params, gateway="", pooling=pooling)
            for index, prompt in enumerate(prompts)
        ]
        return [live.pooled for live in self._run(requests)]

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        adapters: Sequence[str] = (),
    ) -> list[Generated]:
        """Run all prompts together, as one server would; results in the order of the prompts.

        `params` is one for all or one for each. `adapters` are names of the settings' `lora`, one for each prompt, ""
        for the model alone. Raises KeyError for a name that is none of them, CannotEverFit for a request that is too
        large, GrammarError for a grammar that is no good, RuntimeError for a request that the model cannot compute.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        own = self._assembly.adapters.own if self._assembly.adapters is not None else []
        refs = {ref.name: ref for ref in own}
        whose = [refs[name] if name else None for name in adapters or [""] * len(prompts)]
        requests = [
            GenerationRequest(str(index), self.card.id, prompt, sampling, gateway="", adapter=adapter)
            for index, (prompt, sampling, adapter) in enumerate(zip(prompts, each, whose, strict=True))
        ]
        done = [live.scheduled for live in self._run(requests)]
        return [Generated(r.tokens[r.num_prompt :], r.finish or "") for r in done]

    def _run(self, requests: Sequence[GenerationRequest]) -> list[LiveRequest]:
        live: dict[str, LiveRequest] = {}
        for request in requests:
            live[request.id] = LiveRequest.start(Claimed(request, 1, []), self.card, request.id)
            grammar = request.sampling.grammar
            if grammar is not None:
                live[request.id].follow(self._assembly.grammars.compile(grammar).result())
            self._scheduler.add(live[request.id].scheduled)
        out: deque[tuple[Batch, float, float]] = deque()
        while len(self._scheduler):
            while self._executor.in_flight < self._executor.depth:
                started = perf_counter()
                batch = self._scheduler.select()
                if batch is None:
                    break
                rows = [live[row.request.id].row(row, self.card) for row in batch.rows]
                out.append((batch, perf_counter() - started, perf_counter()))
                self._executor.submit(StepInput(rows, batch.num_decode_rows))
            if not out:
                raise RuntimeError("the scheduler stands still with requests alive")
            batch, select, submitted = out.popleft()
            outputs = self._executor.collect()
            times = Times(select, perf_counter() - submitted)
            if failed := [output.error for output in outputs if output.error]:
                raise RuntimeError(failed[0])
            for row, output in zip(batch.rows, outputs, strict=True):
                live[row.request.id].note_prompt(row, output)
            for progress in self._scheduler.complete(batch, [output.token_ids for output in outputs]):
                live[progress.request.id].note_output(progress)
            if self._trace is not None:
                self._trace.record(batch, outputs, self._scheduler, times)
        self._scheduler.check()
        return list(live.values())

    def close(self) -> None:
        self._assembly.close()
        if self._trace is not None:
            self._trace.close()
