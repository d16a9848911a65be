"""The grammars of a small vocabulary and of the demo model's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench.grammar_walk import Walker
from noria.engine.grammar.grammars import Grammars
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.models.source import resolve
from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.tokenizer import Tokenizer


def byte_files() -> TokenizerFiles:
    """Every byte is a token; id 256 ends a sequence, id 257 is a control token."""
    vocab = {symbol: place for place, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>", "<|other|>"])
    return TokenizerFiles(inner.to_str(), None, None, "<|end|>", False)


BYTE_VOCAB, BYTE_EOS = 300, 256  # the model's head has rows that the tokenizer does not know


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.load(byte_files())


@pytest.fixture(scope="session")
def byte_grammars() -> Iterator[Grammars]:
    grammars = Grammars(byte_files(), vocab_size=BYTE_VOCAB, stop_token_ids=[BYTE_EOS], seconds=20)
    yield grammars
    grammars.close()


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
