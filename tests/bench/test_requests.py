"""Requests by the hundred against a gateway and an engine of a tiny model: what the benches do with many more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from bench.cluster import Cluster
from bench.fuzz_bodies import Fuzz, cluster_of_a_tiny_model, lasting_keys, leftovers
from bench.hostile_requests import Hostile
from bench.random_requests import RandomRequests
from bench.stream_equals_whole import compare, served, warm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--no-prefix-cache", "--grammar-timeout=10", "--max-model-len=1024")
    with cluster_of_a_tiny_model(tmp_path_factory.mktemp("model"), *options) as running:
        url = running.gateways[0].url
        warm(url, served(url)[0])
        yield running


def test_a_stream_is_the_answer_that_comes_whole(cluster: Cluster) -> None:
    url = cluster.gateways[0].url
    requests = RandomRequests(*served(url), seed=11, max_tokens=24)
    found = asyncio.run(compare(url, [requests.ask() for _ in range(40)]))
    assert found.differences == []
    assert found.equal > 35 and found.seen["calls"] and found.seen["event ids"], found
    assert all(found.seen[kind] for kind in ("chat/completions", "completions", "responses", "logprobs", "n")), found


def test_what_the_vocabulary_cannot_write_is_the_requests_fault(cluster: Cluster) -> None:
    fuzz = Fuzz(cluster.gateways[0].url)
    body = {"model": fuzz.model, "prompt": "a", "max_tokens": 8, "guided_regex": "[a-c]{2}é"}
    answer = fuzz.send(Hostile("POST", "/v1/completions", json.dumps(body).encode()))
    assert answer.status == 400
    assert answer.first_object["error"]["param"] == "guided_regex", answer.body


def test_hostile_requests_break_nothing_and_leave_nothing(cluster: Cluster) -> None:
    fuzz, before = Fuzz(cluster.gateways[0].url), lasting_keys(cluster)
    fuzz.requests(460, number=7)
    fuzz.batch(40, number=7)
    assert fuzz.report.faults == {}
    assert fuzz.report.statuses[200] > 30 and fuzz.report.statuses[400] > 200, fuzz.report.statuses
    assert leftovers(cluster, fuzz, before) == []
    assert "Traceback" not in cluster.gateways[0].log() + cluster.engines[0].log()
