"""10,000 hostile requests against a real gateway and a real engine: no 500, no hang, and nothing is left held after.

    python -m bench.fuzz_bodies                       # --inputs, --seed, --lines (of a batch, among the inputs)

Every answer has to come in time, below 500 and, where it is an error, in OpenAI's envelope; every stream has to end.
After all of them no slot, no KV block and no open stream may be held, and what clients can delete leaves no key.
Starts a store, an engine of a tiny model and a gateway of its own. Exits with 1 where anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import redis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from bench.cluster import KEY, Cluster, wait_until
from bench.hostile_requests import Hostile, broken_bodies, hostile_requests
from bench.http_answer import Answer, exchange, gauge
from bench.stream_equals_whole import served
from bench.tiny_model import make
from noria.engine.wire.queue_view import open_view

PATIENCE = 20.0
"""Seconds that an answer may take; a grammar has one."""

ENGINE = ("--kv-memory=16MiB", "--max-model-len=256", "--grammar-timeout=1")
GATEWAY = ("--max-body-bytes=262144",)
BATCHABLE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


@dataclass
class Report:
    """What was found. `faults` are told by kind, each with the smallest input that showed it."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: dict[str, bytes] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)  # paths that can be deleted
    slowest: float = 0.0

    def fault(self, kind: str, shown: bytes) -> None:
        if kind not in self.faults or len(shown) < len(self.faults[kind]):
            self.faults[kind] = shown


class Fuzz:
    """Sends inputs to one gateway and looks at what comes back."""

    def __init__(self, url: str) -> None:
        self.report = Report()
        self._address = (url.removeprefix("http://").partition(":")[0], int(url.rpartition(":")[2]))
        self.model, self.vocab_size = served(url)

    def requests(self, num: int, number: int) -> None:
        """`num` hostile requests, the same for the same `number`."""

        @_examples(num)
        @seed(number)
        @given(hostile_requests(self.model, self.vocab_size))
        def run(request: Hostile) -> None:
            self.send(request)

        run()

    def batch(self, num: int, number: int) -> None:
        """`num` broken bodies as the lines of batch files; every line has to come to an end of its own."""
        lines: dict[str, list[str]] = {path: [] for path in BATCHABLE}

        @_examples(num)
        @seed(number)
        @given(broken_bodies(self.model, self.vocab_size))
        def collect(made: tuple[str, str]) -> None:
            path, body = made
            path = path if path in lines else "/v1/completions"
            lines[path].append(f'{{"custom_id":"{len(lines[path])}","method":"POST","url":"{path}","body":{body}}}')

        collect()
        for path, listed in lines.items():
            if listed:
                self._run_batch(path, [line for line in listed if "\n" not in line])

    def send(self, request: Hostile) -> Answer:
        """Send one and judge its answer."""
        shown = f"{request.method} {request.path} {request.headers} ".encode() + request.body[:4000]
        headers = {"authorization": f"Bearer {KEY}", **request.headers}
        try:
            answer = exchange(self._address, request.method, request.path, headers, request.body, PATIENCE, request.cut)
        except TimeoutError:
            self.report.fault(f"{request.path}: no answer in {PATIENCE:g} s", shown)
            return Answer()
        except (ConnectionError, ValueError) as error:
            self.report.fault(f"{request.path}: {error!r}", shown)
            return Answer()
        self.report.slowest = max(self.report.slowest, answer.seconds)
        self.report.statuses[answer.status] += 1
        if answer.status == 0 and not request.cut:
            self.report.fault(f"{request.path}: the connection was closed without an answer", shown)
        elif why := _wrong(request, answer):
            self.report.fault(f"{request.path}: {why}", shown)
        self._note(answer)
        return answer

    def _note(self, answer: Answer) -> None:
        """Remember what was made, to delete it at the end."""
        made = answer.first_object
        kinds = {
            "response": "responses",
            "conversation": "conversations",
            "file": "files",
            "chat.completion": "chat/completions",
        }
        if made.get("object") in kinds and "id" in made:
            self.report.made.append(f"/v1/{kinds[made['object']]}/{made['id']}")

    def upload(self, content: bytes) -> str:
        """The id of a file for a batch."""
        form = (
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: '
            b'form-data; name="file"; filename="a.jsonl"\r\n\r\n' + content + b"\r\n--b--\r\n"
        )
        multipart = {"content-type": "multipart/form-data; boundary=b"}
        file_id: str = self.send(Hostile("POST", "/v1/files", form, multipart)).first_object["id"]
        return file_id

    def _run_batch(self, endpoint: str, lines: list[str]) -> None:
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
        file_id = self.upload(content)
        asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        batch = self.send(Hostile("POST", "/v1/batches", json.dumps(asked).encode())).first_object
        give_up = time.monotonic() + 60 + len(lines)
        while batch["status"] not in ("completed", "failed"):
            if time.monotonic() > give_up:
                return self.report.fault(f"a batch of {endpoint} does not end: {batch}", content)
            time.sleep(0.1)
            batch = self.send(Hostile("GET", f"/v1/batches/{batch['id']}")).first_object
        counts = batch["request_counts"]
        if batch["status"] == "completed" and counts["completed"] + counts["failed"] != len(lines):
            self.report.fault(f"a batch of {len(lines)} lines ended with {counts}", content)
        for name in ("output_file_id", "error_file_id"):
            if batch[name]:
                self._judge_lines(batch[name])

    def _judge_lines(self, file_id: str) -> None:
        answer = self.send(Hostile("GET", f"/v1/files/{file_id}/content"))
        for line in answer.body.splitlines():
            found = json.loads(line)
            self.report.statuses[found["response"]["status_code"] if found["response"] else 0] += 1
            if found["response"] is None or found["response"]["status_code"] >= 500:
                self.report.fault(f"a line of a batch: {found['error']} {found['response']}"[:300], line)
        self.report.made.append(f"/v1/files/{file_id}")


def _examples(num: int) -> settings:
    return settings(
        max_examples=num, database=None, deadline=None, phases=[Phase.generate], verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def _wrong(request: Hostile, answer: Answer) -> str | None:
    """What is wrong with an answer, None if nothing is."""
    if answer.status >= 500:
        return f"status {answer.status} {answer.body[:200]!r}"
    if answer.status >= 400 and request.method != "HEAD" and answer.status:
        error = answer.first_object.get("error")
        if (
            not isinstance(error, dict)
            or not isinstance(error.get("message"), str)
            or not {"type", "param", "code"} <= error.keys()
        ):
            return f"{answer.status} without OpenAI's envelope: {answer.body[:200]!r}"
    if answer.is_stream:
        if not answer.stream_ended:
            return f"a stream without an end: {answer.body[-200:]!r}"
        if b'"internal_error"' in answer.body or b'"engine_error"' in answer.body:
            return f"a stream that broke: {answer.body[-300:]!r}"
    return None


def leftovers(cluster: Cluster, fuzz: Fuzz, before: set[bytes]) -> list[str]:
    """What is still held once everything has ended and was deleted; `before` are the store's keys at rest."""
    for path in fuzz.report.made:
        fuzz.send(Hostile("DELETE", path))
    gateway = cluster.gateways[0].url
    found: list[str] = []

    def look() -> bool:
        found.clear()
        with open_view(cluster.store_url) as view:
            (pool,) = view.pools()
        held = {
            "requests in the queue": sum(pool.depth.values()),
            "requests that engines own": sum(engine.held for engine in pool.engines),
            "rows of the batch": sum(engine.stats.running + engine.stats.waiting for engine in pool.engines),
            "KV blocks": sum(engine.stats.kv_blocks_used for engine in pool.engines),
            "dead letters": pool.dead_letters,
            "open streams": gauge(gateway, "noria_gateway_streams_open"),
        }
        found.extend(f"{number:g} {what}" for what, number in held.items() if number)
        if len(pool.engines) != 1:
            found.append(f"{len(pool.engines)} engines")
        found.extend(f"key {key!r} that never expires" for key in sorted(lasting_keys(cluster) - before)[:5])
        return not found

    with contextlib.suppress(TimeoutError):
        wait_until(look, 30, lambda: "")
    if not all(part.alive for part in cluster.parts):
        found.append("a process has died")
    return found


def lasting_keys(cluster: Cluster) -> set[bytes]:
    """The store's keys without an expiry."""
    with redis.Redis(unix_socket_path=cluster.store_url.removeprefix("unix://")) as store:
        return {key for key in store.scan_iter(count=1000) if store.ttl(key) == -1}


def cluster_of_a_tiny_model(folder: Path, *engine_options: str) -> Cluster:
    """What is fuzzed."""
    return Cluster(
        make(folder / "tiny"),
        num_engines=1,
        num_gateways=1,
        engine_options=(*ENGINE, *engine_options),
        gateway_options=GATEWAY,
        lease_seconds=10,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="keep what the processes logged")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cluster_of_a_tiny_model(Path(folder)) as cluster:
        fuzz, before = Fuzz(cluster.gateways[0].url), lasting_keys(cluster)
        started = time.monotonic()
        fuzz.requests(options.inputs - options.lines, options.seed)
        fuzz.batch(options.lines, options.seed)
        seconds, report = time.monotonic() - started, fuzz.report
        held = leftovers(cluster, fuzz, before)
        log = cluster.gateways[0].log() + cluster.engines[0].log()
        if options.log:
            options.log.write_text(log)
    for kind, shown in report.faults.items():
        print(f"FAULT {kind}\n      {shown[:1500]!r}")
    print("statuses: " + ", ".join(f"{status}: {num}" for status, num in sorted(report.statuses.items())))
    print(f"left at the end: {', '.join(held) or 'nothing'}; {log.count('Traceback')} tracebacks in the logs")
    print(
        f"{options.inputs} inputs, {options.lines} of them lines of batches, in {seconds:.0f} s: "
        f"{len(report.faults)} kinds of faults, slowest answer {report.slowest:.2f} s"
    )
    return int(bool(report.faults or held))


if __name__ == "__main__":
    sys.exit(main())
