"""The engine's end of the process that tries grammars out: started when first needed, ended at the limit, started anew.

Knows no compiled grammar.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from typing import IO, BinaryIO, cast

from noria.engine.grammar import proof
from noria.engine.grammar.binding import GrammarsUnavailable
from noria.engine.wire.messages import Grammar

START_SECONDS = 60.0
"""Limit for the process to be ready: 0.4 s on an idle core."""


class NotProven(Exception):
    """The process died of the grammar, or was ended at its limit. The message is for the client."""


class Prover:
    """One process. Used by one thread at a time; `kill` may be called by any."""

    def __init__(self, setup: proof.Setup) -> None:
        self._setup = setup
        self.tables: list[str] = []  # xgrammar's, of the tokenizer, once the process was started
        self._process: subprocess.Popen[bytes] | None = None

    def refusal(self, grammar: Grammar) -> str | None:
        """What is wrong with `grammar`, None if it is good. Raises NotProven and GrammarsUnavailable."""
        limit = self._setup.seconds
        process = self._ready()
        try:
            proof.send(_pipe(process.stdin), grammar)
            return self._verdict(process, limit).refusal
        except TimeoutError:
            self.kill()
            raise NotProven(f"it takes longer than {limit:g} seconds to compile") from None
        except (EOFError, OSError):
            self.kill()
            raise NotProven("it takes too much memory or is nested too deep to compile") from None

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not yet sent
                    _pipe(pipe).close()

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "noria.engine.grammar.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            try:
                proof.send(_pipe(self._process.stdin), self._setup)
                verdict = self._verdict(self._process, START_SECONDS)
            except (TimeoutError, EOFError, OSError):
                self.kill()
                raise GrammarsUnavailable("the process that compiles grammars does not start on this server") from None
            if verdict.refusal is not None:
                self.kill()
                raise GrammarsUnavailable(verdict.refusal)
            self.tables = verdict.tables
        return self._process

    def _verdict(self, process: subprocess.Popen[bytes], seconds: float) -> proof.Verdict:
        """Raises TimeoutError, or EOFError where the process died."""
        pipe = _pipe(process.stdout)
        if not select.select([pipe], [], [], seconds)[0]:
            raise TimeoutError
        return proof.decode_verdict(proof.receive(pipe))


def _pipe(pipe: IO[bytes] | None) -> BinaryIO:
    assert pipe is not None
    return cast(BinaryIO, pipe)
