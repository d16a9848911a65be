"""Grammars of one model: proven, compiled and kept, on threads beside the loop.

A grammar is tried out in a process of its own, which may be ended at any moment. What passed there is compiled again
here, in the time and memory that it took there: to carry it over takes twenty times as long. Knows no request.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from noria.engine.grammar import binding
from noria.engine.grammar.binding import GrammarError
from noria.engine.grammar.matcher import CompiledGrammar, MaskFiller
from noria.engine.grammar.proof import Setup
from noria.engine.grammar.prover import START_SECONDS, NotProven, Prover
from noria.engine.wire.messages import Grammar, TokenizerFiles

NUM_PROVERS = 2
"""Grammars tried out at once, each in a process of about 100 MB."""

NICENESS = 10
"""Of the threads and processes that compile: a thread of the model gets nine times as much of a core. At 5, where it is
three times, the longest iteration beside compiles was twice the median one alone, now 1.6 times."""

MAX_CACHE_BYTES = 64 * 2**20
MAX_CACHE_ENTRIES = 1024

PATIENCE = 3
"""Times the limit of one grammar that a request waits for its turn: more than that stands before it."""

DOUBT_SECONDS = 30.0
"""How long a grammar that hit a limit is refused unseen; on a less busy machine it may pass."""


@dataclass(slots=True)
class GrammarCounts:
    """Since the start. `seconds` were spent on grammars that were not in the cache."""

    compiled: int = 0
    failed: int = 0
    hits: int = 0
    seconds: float = 0.0


class Grammars:
    """`compile` never waits: everything slow happens on other threads, and nothing before the first grammar comes.
    `compile` and `close` belong to one thread."""

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        seconds: float = 5.0,
        num_bytes: int = 512 * 2**20,
    ) -> None:
        self.counts = GrammarCounts()
        self._setup = Setup(files, vocab_size, tuple(stop_token_ids), seconds, num_bytes)
        self._cache: OrderedDict[tuple[str, str], Future[CompiledGrammar]] = OrderedDict()
        self._filler = MaskFiller()
        self._provers = [Prover(self._setup) for _ in range(NUM_PROVERS)]
        self._free: queue.LifoQueue[Prover] = queue.LifoQueue()  # so that a second process starts only for two at once
        for prover in self._provers:
            self._free.put(prover)
        self._lock = threading.Lock()  # of the compilers' making, and of the counts
        self._compilers: binding.Compilers | None = None
        self._pool = ThreadPoolExecutor(NUM_PROVERS, thread_name_prefix="noria-grammar", initializer=_be_nice)

    @property
    def patience(self) -> float:
        """Seconds that a request may wait for its grammar's turn; the first process has yet to start for some."""
        return PATIENCE * self._setup.seconds + (START_SECONDS if self._compilers is None else 0)

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar to come. Its exception is a GrammarError with a message for the client, or
        GrammarsUnavailable. Who was the last to want it may cancel it: no turn is then spent on it."""
        key = (grammar.kind, grammar.text)
        known = self._cache.get(key)
        if known is not None and not _outlived(known):
            self._cache.move_to_end(key)
            with self._lock:
                self.counts.hits += 1
            return known
        future = self._cache[key] = self._pool.submit(self._make, grammar)
        self._shrink()
        return future

    def close(self) -> None:
        for prover in self._provers:
            prover.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for prover in self._provers:
            prover.kill()  # one may have been started anew meanwhile
        self._filler.close()

    def _make(self, grammar: Grammar) -> CompiledGrammar:
        started = time.monotonic()
        try:
            made = self._proven(grammar)
        except Exception:
            with self._lock:
                self.counts.failed += 1
            raise
        else:
            with self._lock:
                self.counts.compiled += 1
            return made
        finally:
            with self._lock:
                self.counts.seconds += time.monotonic() - started

    def _proven(self, grammar: Grammar) -> CompiledGrammar:
        prover = self._free.get()
        try:
            refusal = prover.refusal(grammar)
        except NotProven as error:
            raise GrammarError(str(error), until=time.monotonic() + DOUBT_SECONDS) from None
        finally:
            self._free.put(prover)
        if refusal is not None:
            raise GrammarError(refusal)
        with self._lock:
            if self._compilers is None:
                self._compilers = binding.new_compilers(binding.read_tables(prover.tables))
        handle = binding.compiled(self._compilers, grammar)
        return CompiledGrammar(handle, self._setup.vocab_size, self._filler)

    def _shrink(self) -> None:
        done = {key: future for key, future in self._cache.items() if future.done()}
        num_bytes = sum(_num_bytes(future) for future in done.values())
        for key, future in done.items():
            if num_bytes <= MAX_CACHE_BYTES and len(self._cache) <= MAX_CACHE_ENTRIES:
                return
            del self._cache[key]
            num_bytes -= _num_bytes(future)


def _num_bytes(future: Future[CompiledGrammar]) -> int:
    return 0 if future.cancelled() or future.exception() is not None else future.result().num_bytes


def _outlived(future: Future[CompiledGrammar]) -> bool:
    if future.cancelled():
        return True
    error = future.exception() if future.done() else None
    if isinstance(error, GrammarError):
        return error.until is not None and error.until < time.monotonic()
    return error is not None


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
