"""Vectors of prompts: the same in any company, chunks, policy and memory; and the pooling that model files name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.tiny_model import make
from noria.engine.config import EngineConfig
from noria.engine.execution.pooling import pool
from noria.engine.execution.step import Pooling
from noria.engine.models.errors import ModelError
from noria.engine.offline import OfflineEngine
from noria.engine.plan import plan
from noria.engine.wire.messages import SamplingParams

SETTINGS = {"kv_memory": "4MiB", "max_model_len": 512, "max_batch_tokens": 2048, "threads": 1}
PROMPTS = [[5], list(range(1, 90)), [7, 8, 9] * 100, [3] * 17, list(range(90, 1, -1)) * 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[OfflineEngine]:
    found = OfflineEngine(EngineConfig(model=str(folder), **SETTINGS))  # type: ignore[arg-type]
    yield found
    found.close()


def vectors(engine: OfflineEngine, prompts: list[list[int]], kind: str) -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray(v), dtype=torch.float32) for v in engine.embed(prompts, kind)]


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("options", [{}, {"policy": "orca"}, {"policy": "static", "max_batch_size": 2}], ids=str)
def test_company_changes_no_bit(folder: Path, kind: str, options: dict[str, object]) -> None:
    engine = OfflineEngine(EngineConfig(model=str(folder), prefix_cache=False, **{**SETTINGS, **options}))  # type: ignore[arg-type]
    alone = [engine.embed([prompt], kind)[0] for prompt in PROMPTS]
    assert engine.card.embedding_size == 64 and {len(vector) for vector in alone} == {4 * 64}
    assert engine.embed(PROMPTS[::-1], kind) == alone[::-1]
    engine.close()


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 17}, {"kv_memory": "100KiB"}], ids=str)
def test_chunks_cached_prefixes_and_scarce_memory_change_rounding_alone(
    folder: Path, engine: OfflineEngine, kind: str, options: dict[str, object]
) -> None:
    alone = [vectors(engine, [prompt], kind)[0] for prompt in PROMPTS]
    other = OfflineEngine(EngineConfig(model=str(folder), **{**SETTINGS, "max_batch_tokens": 100, **options}))  # type: ignore[arg-type]
    for prompts, expected in ((PROMPTS, alone), (PROMPTS[::-1], alone[::-1])):
        for found, wanted in zip(vectors(other, prompts, kind), expected, strict=True):
            assert float((found - wanted).abs().max()) < 1e-5
    other.close()


def test_vectors_and_texts_do_not_disturb_each_other(engine: OfflineEngine) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0)
    before = engine.generate(PROMPTS, greedy)
    engine.embed(PROMPTS, "mean")
    assert engine.generate(PROMPTS, greedy) == before


def test_cuts_do_not_show_and_broken_states_are_seen() -> None:
    states = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0)) * 50
    whole = pool(states, Pooling("mean", is_last=True), 1000)
    for cut in (1, 333, 999):
        carried = pool(states[:cut], Pooling("mean"), cut)
        assert pool(states[cut:], Pooling("mean", carried or b"", is_last=True), 1000) == whole
    found = torch.frombuffer(bytearray(whole or b""), dtype=torch.float32)
    assert torch.allclose(found.double(), states.double().mean(dim=0), rtol=1e-6, atol=1e-8)
    states[5, 5] = torch.nan
    assert pool(states, Pooling("mean"), 1000) is None
    assert pool(states[:5], Pooling("last", is_last=True), 5) == states[4].numpy().tobytes()


@pytest.mark.parametrize(
    ("modes", "asked", "kind"),
    [
        ({"pooling_mode_mean_tokens": True}, "auto", "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "auto", "last"),
        ({"pooling_mode_lasttoken": True}, "mean", "mean"),
        ({}, "auto", "mean"),
        ({"pooling_mode_cls_token": True}, "auto", None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "auto", None),
    ],
)
def test_pooling_is_as_the_model_was_trained(
    tmp_path: Path, modes: dict[str, bool], asked: str, kind: str | None
) -> None:
    folder = make(tmp_path / "tiny")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    config = EngineConfig(model=str(folder), pooling=asked, **SETTINGS)  # type: ignore[arg-type]
    if kind is None:
        with pytest.raises(ModelError, match="pooling_mode_"):
            plan(config)
    else:
        assert plan(config).pooling == kind
