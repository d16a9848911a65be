"""200 JSON schemas: whatever the model writes at temperature 1 is valid, and nobody else waits while one compiles.

    python -m bench.json_schemas                      # the demo model; --walks N instead: random outputs, no model
    python -m bench.json_schemas --stall              # iterations of other requests while slow grammars compile

Valid by the judgement of the `jsonschema` library. Exits with 1 where a figure misses its bar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import jsonschema

from bench.grammar_walk import Walker
from bench.schema_suite import SUPPORTED, UNSUPPORTED, generated
from noria.engine.assembly import Assembly, assemble
from noria.engine.config import EngineConfig
from noria.engine.execution.step import StepInput
from noria.engine.grammar.binding import GrammarError
from noria.engine.live import LiveRequest
from noria.engine.offline import OfflineEngine
from noria.engine.plan import plan
from noria.engine.wire.messages import Claimed, GenerationRequest, Grammar, SamplingParams
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.grammars.errors import Unsupported
from noria.gateway.grammars.json_schema import enforceable

NUM_SCHEMAS = 200
MAX_TOKENS = 400
REFUSAL_BAR = 2.0  # seconds
STALL_BAR = 2.0  # times the median iteration
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
SLOW = [
    Grammar("json_schema", json.dumps({"type": "string", "pattern": f"^(?:[^{letter}]{{0,50}}){{0,40}}$"}))
    for letter in "abcd"
]


def suite() -> dict[str, Any]:
    """The hand-written schemas, and generated ones to make 200."""
    return SUPPORTED | {f"generated {seed}": generated(seed) for seed in range(NUM_SCHEMAS - len(SUPPORTED))}


def grammar_of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(enforceable(schema), ensure_ascii=False))


def fault(schema: Any, text: str) -> str | None:
    """Why `text` is not valid, None if it is."""
    old = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    kind = jsonschema.Draft7Validator if old else jsonschema.Draft202012Validator
    try:
        kind(schema, format_checker=CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def with_model(config: EngineConfig, num: int, max_tokens: int) -> bool:
    """One answer of the model for each schema, all in one batch after the other."""
    engine = OfflineEngine(config)
    tokenizer = Tokenizer.load(engine.tokenizer_files)
    schemas = dict(list(suite().items())[-num:] if num < NUM_SCHEMAS else suite())
    prompts, params = [], []
    for seed, (name, schema) in enumerate(schemas.items()):
        text = f"<|im_start|>user\nWrite JSON: {name}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer.encode_template(text))
        params.append(SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, grammar=grammar_of(schema)))
    started = time.monotonic()
    answers = engine.generate(prompts, params)
    seconds = time.monotonic() - started
    engine.close()
    ended = cut = 0
    faults = []
    for (name, schema), answer in zip(schemas.items(), answers, strict=True):
        if answer.finish != "stop":
            cut += 1
            continue
        ended += 1
        if wrong := fault(schema, tokenizer.decode(answer.token_ids)):
            faults.append(f"{name}: {wrong}: {tokenizer.decode(answer.token_ids)[:120]!r}")
    tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{len(schemas)} schemas, {ended} ended and {cut} were cut off at {max_tokens} tokens; {len(faults)} invalid")
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")
    print("\n".join(faults))
    return not faults


def by_walks(config: EngineConfig, num_walks: int) -> bool:
    """Random outputs of every schema: no model, its masks alone."""
    assembly = assemble(plan(config))
    walker = Walker(Tokenizer.load(assembly.tokenizer_files), assembly.card.vocab_size, assembly.card.eos_token_ids[0])
    num, faults, compile_times = 0, [], []
    for name, schema in suite().items():
        started = time.monotonic()
        compiled = assembly.grammars.compile(grammar_of(schema)).result()
        compile_times.append(time.monotonic() - started)
        for text in walker.texts(compiled, num_walks):
            num += 1
            if wrong := fault(schema, text):
                faults.append(f"{name}: {wrong}: {text[:120]!r}")
    assembly.close()
    compile_times = sorted(compile_times[1:])  # the first one starts the process
    print(f"{NUM_SCHEMAS} schemas, {num} outputs, {len(faults)} invalid")
    print(f"compile: median {1e3 * statistics.median(compile_times):.0f} ms, longest {1e3 * compile_times[-1]:.0f} ms")
    print("\n".join(faults))
    return not faults


def refusals() -> bool:
    """How long it takes to say no."""
    longest = 0.0
    for schema, _ in UNSUPPORTED.values():
        started = time.monotonic()
        try:
            enforceable(schema)
        except Unsupported:
            longest = max(longest, time.monotonic() - started)
        else:
            print(f"accepted: {schema}")
            return False
    print(f"{len(UNSUPPORTED)} unsupported schemas refused, {1e3 * longest:.1f} ms at most")
    return longest < REFUSAL_BAR


class Streams:
    """Requests that run for ever in one batch."""

    def __init__(self, assembly: Assembly, num: int) -> None:
        self._assembly = assembly
        self._live: dict[str, LiveRequest] = {}
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        for index in range(num):
            request = GenerationRequest(str(index), assembly.card.id, [500 + index] * 8, params, gateway="")
            self._live[request.id] = LiveRequest.start(Claimed(request, 1, []), assembly.card, request.id)
            assembly.scheduler.add(self._live[request.id].scheduled)

    def iteration(self) -> float:
        """Seconds of one iteration."""
        started = time.monotonic()
        batch = self._assembly.scheduler.select()
        assert batch is not None
        rows = [self._live[row.request.id].row(row, self._assembly.card) for row in batch.rows]
        outputs = self._assembly.executor.run(StepInput(rows, batch.num_decode_rows))
        self._assembly.scheduler.complete(batch, [output.token_ids for output in outputs])
        return time.monotonic() - started


def stall(config: EngineConfig, num_streams: int, num_iterations: int) -> bool:
    """Iterations with nothing beside them, and with grammars being compiled that take until their limit."""
    assembly = assemble(plan(config))
    assembly.grammars.compile(Grammar("regex", "[a-z]")).result()
    streams = Streams(assembly, num_streams)
    for _ in range(10):
        streams.iteration()
    alone = sorted(streams.iteration() for _ in range(num_iterations))
    median = statistics.median(alone)
    pending = [assembly.grammars.compile(grammar) for grammar in SLOW]
    beside = []
    while len(beside) < num_iterations and not all(future.done() for future in pending):
        beside.append(streams.iteration())
    beside.sort()
    results = []
    for future in pending:
        try:
            future.result(60)
            results.append("compiled")
        except GrammarError as error:
            results.append(str(error))
    assembly.close()
    print(f"alone: median {1e3 * median:.1f} ms, longest {1e3 * alone[-1]:.1f} ms")
    print(f"beside compiles ({len(beside)} iterations): median {1e3 * statistics.median(beside):.1f} ms, "
          f"longest {1e3 * beside[-1]:.1f} ms = {beside[-1] / median:.2f} x the median alone")  # fmt: skip
    print("the slow ones: " + ", ".join(sorted(set(results))))
    return beside[-1] < STALL_BAR * max(median, alone[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--walks", type=int, default=0, help="random outputs of each schema, instead of the model's")
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--schemas", type=int, default=NUM_SCHEMAS, help="how many of the suite the model answers")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=150)
    options = parser.parse_args()
    config = EngineConfig(model=options.model, kv_memory="512MiB", max_model_len=2048, grammar_timeout=10)
    if options.stall:
        return 0 if stall(config, options.streams, options.iterations) else 1
    good = refusals()
    if options.walks:
        return 0 if by_walks(config, options.walks) and good else 1
    return 0 if with_model(config, options.schemas, options.max_tokens) and good else 1


if __name__ == "__main__":
    sys.exit(main())
