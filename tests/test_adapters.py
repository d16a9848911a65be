"""LoRA adapters as clients and operators meet them: a gateway, a store and engines that compute, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from pydantic import SecretStr
from transformers import AutoModelForCausalLM

from bench.store import running_store
from bench.tiny_model import make
from noria.engine import server
from noria.engine.config import EngineConfig
from noria.engine.offline import OfflineEngine
from noria.engine.wire import keys
from noria.engine.wire.messages import SamplingParams
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.config import GatewaySettings
from tests.engine.models.adapters import make_adapter
from tests.gateway.conftest import KEY, RunningGateway, eventually

LENGTH = 40
TEXT = "a prompt that fills more than two blocks of the cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and three adapters of it: a, b, c."""
    found = tmp_path_factory.mktemp("adapters")
    make(found / "tiny")
    for seed, name in enumerate("abc"):
        make_adapter(AutoModelForCausalLM.from_pretrained(found / "tiny"), found / name, seed=seed)
    return found


class EngineProcess:
    """An engine as `noria engine` runs it, but for the process."""

    def __init__(self, folder: Path, url: str, **settings: Any) -> None:
        self.config = EngineConfig(
            model=str(folder / "tiny"), redis_url=url, kv_memory="16MiB", threads=1, lease_seconds=2.0, **settings
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.code: int | None = None

    def _run(self) -> None:
        self.code = server._run(self.config, None, self._stop, threading.Event())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert self.code == 0


@dataclass
class Place:
    url: str
    gateway: RunningGateway
    client: httpx.Client

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": TEXT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, **fields}
        return self.client.post("/v1/completions", json=body)

    def text(self, model: str, **fields: Any) -> str:
        found = self.ask(model, **fields)
        assert found.status_code == 200, found.text
        return str(found.json()["choices"][0]["text"])

    def texts_at_once(self, names: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(self.text, names))

    def load(self, name: str, path: Path | str, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})

    def unload(self, name: str) -> httpx.Response:
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def listed(self) -> dict[str, Any]:
        return {model["id"]: model for model in self.client.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def place(folder: Path) -> Iterator[Place]:
    """An engine that was started with the adapters a and b, behind a gateway."""
    with running_store() as store:
        engine = EngineProcess(folder, store.url, lora=f"a={folder / 'a'},b={folder / 'b'}")
        gateway = RunningGateway(GatewaySettings(redis_url=store.url, api_key=SecretStr(KEY)))
        with gateway.client() as client:
            eventually(lambda: client.get("/readyz").status_code == 200, 60)
            yield Place(store.url, gateway, client)
        gateway.stop()
        engine.stop()


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """What each says to TEXT, computed alone and without a queue."""
    found = {}
    config = EngineConfig(model=str(folder / "tiny"), kv_memory="16MiB", threads=1)
    config = config.model_copy(update={"lora": ",".join(f"{name}={folder / name}" for name in "abc")})
    engine = OfflineEngine(config)
    tokenizer = Tokenizer.load(engine.tokenizer_files)
    params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    for name in ("", "a", "b", "c"):
        (said,) = engine.generate([tokenizer.encode(TEXT)], params, [name])
        found[name or "tiny"] = tokenizer.decode(said.token_ids)
    prompts = [tokenizer.encode(TEXT)] * 4
    together = engine.generate(prompts, params, ["b", "", "a", "c"])
    assert [tokenizer.decode(said.token_ids) for said in together] == [found[n] for n in ("b", "tiny", "a", "c")]
    engine.close()
    for other in ({"policy": "static"}, {"policy": "orca"}, {"speculate": "ngram", "max_batch_tokens": 16}):
        engine = OfflineEngine(config.model_copy(update=other))
        together = engine.generate(prompts, params, ["b", "", "a", "c"])
        assert [tokenizer.decode(said.token_ids) for said in together] == [found[n] for n in ("b", "tiny", "a", "c")]
        engine.close()
    assert len(set(found.values())) == 4
    return found


def test_models_and_their_adapters_are_served_beside_each_other(place: Place, texts: dict[str, str]) -> None:
    """One text for all, so that whatever is shared by mistake would show; twice, so that the cache is asked."""
    found = place.listed()
    assert found["a"]["parent"] == "tiny" and found["a"]["root"] == "a" and found["tiny"]["parent"] is None
    names = ["tiny", "a", "b"] * 4
    assert place.texts_at_once(names) == [texts[name] for name in names]
    again = place.ask("a")
    assert again.json()["choices"][0]["text"] == texts["a"] and again.json()["model"] == "a"
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    chat = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert place.client.post("/v1/chat/completions", json=chat).json()["model"] == "b"
    vectors = [place.client.post("/v1/embeddings", json={"model": m, "input": TEXT}).json()["data"] for m in "ab"]
    assert vectors[0] != vectors[1]


def test_an_adapter_comes_and_goes_while_the_server_runs(place: Place, folder: Path, texts: dict[str, str]) -> None:
    assert place.ask("c").status_code == 404
    loaded = place.load("c", folder / "c")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'c' added successfully.")
    assert place.text("c") == texts["c"] and "c" in place.listed()
    body = {"model": "c", "prompt": TEXT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    with place.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        assert place.unload("c").status_code == 200
        assert place.ask("c").status_code == 404 and "c" not in place.listed()
        said = [json.loads(line[6:]) for line in [first, *lines] if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in said)
    assert text.startswith(texts["c"]) and said[-1]["choices"][0]["finish_reason"] == "length"
    assert place.unload("c").status_code == 404
    eventually(lambda: "noria_engine_adapters{" in (m := place.client.get("/metrics").text) and "} 2.0" in m, 10)


def test_another_adapter_may_take_the_place_of_one(place: Place, folder: Path, texts: dict[str, str]) -> None:
    assert place.load("x", folder / "a").status_code == 200
    assert place.text("x") == texts["a"]
    again = place.load("x", folder / "c")
    assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
    assert place.load("x", folder / "c", load_inplace=True).status_code == 200
    assert place.text("x") == texts["c"]
    assert place.unload("x").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"lora_name": "tiny"}, "lora_name", "name of a model"),
        ({"lora_name": "a"}, "lora_name", "loaded already"),
        ({"lora_name": "x,y"}, "lora_name", "no comma"),
        ({"lora_name": "*"}, "lora_name", "is not *"),
        ({"lora_path": "relative"}, "lora_path", "whole path"),
        ({"lora_path": "/a\0b"}, "lora_path", "whole path"),
        ({"lora_path": "/nowhere"}, "lora_path", "/nowhere/adapter_config.json"),
        ({"base_model_name": "other"}, "base_model_name", "not served"),
        ({"lora_rank": 8}, "lora_rank", "lora_rank"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    place: Place, folder: Path, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"lora_name": "n", "lora_path": str(folder / "c"), **fields}
    found = place.client.post("/v1/load_lora_adapter", json=body)
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"] == param and message in error["message"]
    assert place.ask("n").status_code == 404


def test_several_at_once_do_not_pass_the_limit(place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["p", "q", "r", "s"]  # with room for one: the model is listed too
    monkeypatch.setattr("noria.gateway.adapters.MAX_ADAPTERS", len(place.listed()))
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: place.load(name, folder / "c"), names))
    loaded = [name for name, answer in zip(names, answers, strict=True) if answer.status_code == 200]
    assert len(loaded) <= 1 and all("at most" in answer.text for answer in answers if answer.status_code != 200)
    for name in loaded:
        assert place.unload(name).status_code == 200
    assert place.load("p", folder / "c").status_code == 200
    assert place.load("q", folder / "c").json()["error"]["param"] == "lora_name"
    assert place.unload("p").status_code == 200


def test_numbers_of_adapters_are_refused(place: Place) -> None:
    found = place.client.post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 1})
    assert found.status_code == 400 and found.json()["error"]["param"] == "lora_int_id"


def test_only_who_runs_the_place_loads_adapters(place: Place, folder: Path) -> None:
    body = {"lora_name": "c", "lora_path": str(folder / "c")}
    settings = {"redis_url": place.url, "api_key": SecretStr("team=sk-team")}
    for more, key, status in ((settings, "sk-team", 403), ({**settings, "api_key": SecretStr("")}, None, 403)):
        gateway = RunningGateway(GatewaySettings(**more))  # type: ignore[arg-type]
        with gateway.client(key) as client:
            assert client.post("/v1/load_lora_adapter", json=body).status_code == status
        gateway.stop()
    with place.gateway.client(None) as client:
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 401


def test_an_engine_that_comes_later_has_what_was_loaded(place: Place, folder: Path, texts: dict[str, str]) -> None:
    """And a request that finds an engine without its adapter waits until that is there."""
    assert place.load("c", folder / "c").status_code == 200
    second = EngineProcess(folder, place.url)
    try:
        eventually(lambda: place.client.get("/metrics").text.count("noria_engine_adapters{") == 2, 30)
        names = ["c", "a", "b", "tiny"] * 6
        assert place.texts_at_once(names) == [texts[name] for name in names]
    finally:
        second.stop()
    assert place.unload("c").status_code == 200


@pytest.mark.parametrize(
    ("lora", "fields", "message"),
    [
        ("tiny={a}", {}, "a name of the model itself"),
        ("n=/nowhere", {}, "/nowhere/adapter_config.json"),
        ("other={a}", {}, "another model is served by this name"),
        ("n={a}", {"tp": 2}, "they need --tp 1 and --pp 1"),
    ],
)
def test_an_engine_does_not_start_with_an_adapter_that_is_no_good(
    lora: str, fields: dict[str, Any], message: str, place: Place, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redis.Redis.from_url(place.url).zadd(keys.POOLS, {"other": 1e15})
    lora = lora.format(a=folder / "a")
    config = EngineConfig(model=str(folder / "tiny"), redis_url=place.url, kv_memory="16MiB", lora=lora, **fields)
    assert server._run(config, None, threading.Event(), threading.Event()) == 2
    assert message in capsys.readouterr().err
