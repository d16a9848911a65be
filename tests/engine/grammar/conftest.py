"""The grammars of the demo model's vocabulary, which needs no weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.grammar_walk import Walker
from noria.engine.grammar.grammars import Grammars
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.models.source import resolve
from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm_files() -> TokenizerFiles:
    return gguf_tokenizer_files(GGUFFile(resolve("smollm2-135m-instruct").path))


@pytest.fixture(scope="session")
def smollm_tokenizer(smollm_files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.load(smollm_files)


@pytest.fixture(scope="session")
def smollm_walker(smollm_tokenizer: Tokenizer) -> Walker:
    return Walker(smollm_tokenizer, 49152, 2)


@pytest.fixture(scope="session")
def smollm_grammars(smollm_files: TokenizerFiles) -> Iterator[Grammars]:
    grammars = Grammars(smollm_files, vocab_size=49152, stop_token_ids=[2], seconds=20)
    yield grammars
    grammars.close()
