"""The engine without a queue: what a request gets does not depend on its company or on the policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from noria.engine.config import EngineConfig
from noria.engine.offline import OfflineEngine
from noria.engine.wire.messages import SamplingParams
from noria.engine.wire.tokenizer import Tokenizer

SETTINGS = {"kv_memory": "64MiB", "max_model_len": 1024}
TEXTS = [
    "Invent a name for a ship.",
    "Once upon a time there was a lighthouse keeper who",
    "1 2 3 4 5 6",
    "def main():\n    ",
    "Dear Sir or Madam, " * 12,
]
PARAMS = [
    SamplingParams(max_tokens=16, seed=42),
    SamplingParams(max_tokens=20, temperature=0),
    SamplingParams(max_tokens=12, seed=7, top_p=0.9, temperature=1.3),
    SamplingParams(max_tokens=18, seed=8, top_k=20, frequency_penalty=1.0, repetition_penalty=1.1),
    SamplingParams(max_tokens=8, seed=9, min_p=0.05),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineEngine]:
    found = OfflineEngine(EngineConfig(**SETTINGS, prefix_cache=False))
    yield found
    found.close()


@pytest.fixture(scope="module")
def prompts(engine: OfflineEngine) -> list[list[int]]:
    tokenizer = Tokenizer.load(engine.tokenizer_files)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def alone(engine: OfflineEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [engine.generate([p], s)[0].token_ids for p, s in zip(prompts, PARAMS, strict=True)]


def test_company_changes_nothing(engine: OfflineEngine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 1, 3, 0, 0, 2, 4, 4]):
        together = engine.generate([prompts[i] for i in order], [PARAMS[i] for i in order])
        assert [g.token_ids for g in together] == [alone[i] for i in order]


@pytest.mark.parametrize("options", [{"policy": "orca"}, {"max_batch_size": 2}, {"kv_memory": "3MiB"}])
def test_policy_batch_size_and_preemption_change_nothing(
    options: dict[str, object], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    other = OfflineEngine(EngineConfig(**{**SETTINGS, "max_model_len": 128, "prefix_cache": False, **options}))  # type: ignore[arg-type]
    assert [g.token_ids for g in other.generate(prompts, PARAMS)] == alone
    other.close()


def test_tokens_to_stop_at_and_to_wait_for(engine: OfflineEngine, prompts: list[list[int]]) -> None:
    free = engine.generate([prompts[1]], SamplingParams(max_tokens=12, temperature=0))[0].token_ids
    stopped = engine.generate([prompts[1]], SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(free[4],)))[0]
    assert stopped.token_ids == free[: free.index(free[4]) + 1] and stopped.finish == "stop"
    patient = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(free[0],), min_tokens=3)
    waited = engine.generate([prompts[1]], patient)[0].token_ids
    assert free[0] not in waited[:3] and len(waited) > 3
