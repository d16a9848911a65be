"""The process that tries grammars out before the engine takes them: whatever they do to it, no iteration notices.

`python -m noria.engine.grammar.worker`, spoken to over its pipes. Compiles under limits of time, memory and stack, and
follows what came out for a while, since an ambiguous grammar compiles in no time and stalls in use. Loads no torch.
"""

from __future__ import annotations

import math
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from noria.engine.grammar import binding, proof
from noria.engine.wire.messages import Grammar
from noria.engine.wire.tokenizer import Tokenizer

STACK = 2**20
"""Bytes: less than any thread of the engine has, so that a grammar nested too deep overflows here and never there."""

TRIAL_TOKENS = 64
TRIAL_SECONDS = 0.05
"""A walk of so many tokens through a new grammar, and the CPU time that one step of it may take."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine ends this process
    sys.modules["torch"] = None  # type: ignore[assignment]  # xgrammar's binding would load it if it could
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = proof.decode_setup(proof.receive(requests))
    try:
        tables = _tables(setup)
    except binding.GrammarsUnavailable as error:
        return proof.send(answers, proof.Verdict(str(error)))
    compilers = binding.new_compilers(tables)
    _set_limits(setup.num_bytes)
    proof.send(answers, proof.Verdict(tables=[str(table.serialize_json()) for table in tables]))
    while True:
        try:
            grammar = proof.decode_grammar(proof.receive(requests))
        except EOFError:
            return
        signal.alarm(math.ceil(setup.seconds) + 1)  # an engine that was killed can no longer end this process
        proof.send(answers, proof.Verdict(_refusal(compilers, grammar, setup.vocab_size)))
        signal.alarm(0)


def _tables(setup: proof.Setup) -> tuple[Any, Any]:
    tokenizer = Tokenizer.load(setup.files)
    return binding.tables([tokenizer.token_bytes(i) for i in range(setup.vocab_size)], setup.stop_token_ids)


def _refusal(compilers: binding.Compilers, grammar: Grammar, vocab_size: int) -> str | None:
    try:
        matcher = binding.new_matcher(binding.compiled(compilers, grammar))
        return _follow(matcher, vocab_size)
    except binding.GrammarError as error:
        return str(error)
    except MemoryError:
        return "it takes too much memory to compile"


def _follow(matcher: Any, vocab_size: int) -> str | None:
    """Why the grammar cannot be used: nothing matches it, or finding out what does takes too long."""
    words = np.empty((1, -(-vocab_size // 32)), np.int32)
    chance = random.Random(0)
    for step in range(TRIAL_TOKENS):
        started = time.thread_time()
        words.fill(-1)
        matcher.fill_next_token_bitmask(words, 0, False)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size))
        if not len(allowed):
            return None if step else "no text that the model can write matches it"
        matcher.accept_token(int(chance.choice(allowed)), False)
        if time.thread_time() - started > TRIAL_SECONDS:
            return "it is too ambiguous: finding out what may come next takes too long"
        if matcher.is_terminated():
            return None
    return None


def _set_limits(num_bytes: int) -> None:
    """Room for `num_bytes` more than is taken now."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, taken + num_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))


if __name__ == "__main__":
    main()
