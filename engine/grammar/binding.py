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


@functools.cache
def core() -> Any:
    """The library's own classes."""
    name = "xgrammar"
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("structured outputs need xgrammar: pip install 'noria[engine]'")
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules[name] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")


def tokenizer_info(vocabulary: Sequence[bytes], stop_token_ids: Sequence[int]) -> Any:
    """The tables of a model whose id i adds `vocabulary[i]` to the text. Ids of no bytes are never allowed, but for the
    stop tokens, which come once a grammar is fulfilled."""
    raw = 0
    return core().TokenizerInfo(list(vocabulary), raw, len(vocabulary), list(stop_token_ids), False)


def read_tokenizer_info(text: str) -> Any:
    """The tables from their `serialize_json`."""
    return core().TokenizerInfo.deserialize_json(text)


def new_compiler(info: Any) -> Any:
    return core().GrammarCompiler(info, 1, False, -1, False)


def compiled(compiler: Any, grammar: Grammar) -> Any:
    """The compiled form of `grammar`. Raises GrammarError."""
    kind, text = grammar.kind, grammar.text
    try:
        if kind == "json_schema":
            return compiler.compile_json_schema(text, True, None, None, True, MAX_WHITESPACE, False)
        if kind == "json_object":
            return compiler.compile_json_schema('{"type":"object"}', True, None, None, False, MAX_WHITESPACE, False)
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar_from_strings(text, "root")
        if kind == "choice":
            return compiler.compile_structural_tag(_choice(text))
        if kind == "structural_tag":
            return compiler.compile_structural_tag(text)
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


_PLACE = re.compile(r"^(\[[\d:]+\] )?(\S+:\d+: )?(Check failed: .*? is false: *)?")


def _cleaned(message: str) -> str:
    """The library's message in one line, without the source line that it failed at."""
    line = " ".join(message.split())
    return _PLACE.sub("", line)[:500] or "it cannot be compiled"
