"""xgrammar's native library: tokenizer tables, compiled grammars and matchers as it calls them.

The library is loaded without xgrammar's Python package, which imports transformers and torch: that takes seconds, for
most of which the interpreter stands still, and 200 MB. Every call releases the interpreter lock. Knows no process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noria.engine.wire.messages import Grammar

MAX_WHITESPACE = 8
"""White space between two tokens of JSON at most, in characters: a small model at a high temperature otherwise writes
nothing else for as long as it may."""


class GrammarError(ValueError):
    """A grammar that cannot be used; the message is for the client who wrote it. `until` (monotonic) is set where it
    may be different later."""

    def __init__(self, message: str, *, until: float | None = None) -> None:
        super().__init__(message)
        self.until = until


class GrammarsUnavailable(RuntimeError):
    """No grammar can be compiled here, whatever it says: the operator's to mend."""


@functools.cache
def core() -> Any:
    """The library's own classes. Raises GrammarsUnavailable where it, or what it stands on, is not installed."""
    name = "xgrammar"
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise GrammarsUnavailable("structured outputs need xgrammar, which is not installed on this server")
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules[name] = package
    try:
        importlib.import_module("xgrammar.load_binding")
        return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")
    except (ImportError, OSError) as error:
        raise GrammarsUnavailable(f"structured outputs need xgrammar, which cannot be loaded here: {error}") from error


@dataclass(frozen=True, slots=True)
class Compilers:
    """Compilers of one model: `json` knows no token with a raw control character but the ends of lines, since xgrammar
    lets them through in strings of bounded length, where JSON forbids them."""

    text: Any
    json: Any


def tables(vocabulary: Sequence[bytes], stop_token_ids: Sequence[int]) -> tuple[Any, Any]:
    """xgrammar's tables of a model whose id i adds `vocabulary[i]` to the text, for `Compilers.text` and `.json`. Ids
    of no bytes are never allowed, but for the stop tokens, which come once a grammar is fulfilled."""
    clean = [b"" if _RAW_CONTROL.search(token) else token for token in vocabulary]
    raw = 0
    text, json_ = (
        core().TokenizerInfo(list(tokens), raw, len(tokens), list(stop_token_ids), False)
        for tokens in (vocabulary, clean)
    )
    return text, json_


def read_tables(texts: Sequence[str]) -> list[Any]:
    """The tables from their `serialize_json`."""
    return [core().TokenizerInfo.deserialize_json(text) for text in texts]


def new_compilers(infos: Sequence[Any]) -> Compilers:
    return Compilers(*(core().GrammarCompiler(info, 1, False, -1, False) for info in infos))


def compiled(compilers: Compilers, grammar: Grammar) -> Any:
    """The compiled form of `grammar`. Raises GrammarError."""
    kind, text = grammar.kind, grammar.text
    try:
        if kind == "json_schema":
            return compilers.json.compile_json_schema(text, True, None, None, True, MAX_WHITESPACE, False)
        if kind == "json_object":
            free = '{"type":"object"}'
            return compilers.json.compile_json_schema(free, True, None, None, False, MAX_WHITESPACE, False)
        if kind == "regex":
            return compilers.text.compile_regex(text)
        if kind == "ebnf":
            return compilers.text.compile_grammar_from_strings(text, "root")
        if kind == "choice":
            return compilers.text.compile_structural_tag(_choice(text))
        if kind == "structural_tag":
            counts = '"minLength"' in text or '"maxLength"' in text
            return (compilers.json if counts else compilers.text).compile_structural_tag(text)
    except MemoryError:
        raise
    except Exception as error:  # the library raises several kinds, some of them by names of its own
        if "bad_alloc" in str(error):
            raise MemoryError from None
        raise GrammarError(_cleaned(str(error))) from None
    raise GrammarError(f"unknown kind of grammar: {kind!r}")


def new_matcher(grammar: Any) -> Any:
    """A matcher at the grammar's beginning."""
    return core().GrammarMatcher(grammar, None, False, -1, None)


def _choice(text: str) -> str:
    options = [{"type": "const_string", "value": option} for option in json.loads(text)]
    return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": options}})


_RAW_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_PLACE = re.compile(r"^(\[[\d:]+\] )?(\S+:\d+: )?(Check failed: .*? is false: *)?")


def _cleaned(message: str) -> str:
    """The library's message in one line, without the source line that it failed at."""
    line = " ".join(message.split())
    return _PLACE.sub("", line)[:500] or "it cannot be compiled"
