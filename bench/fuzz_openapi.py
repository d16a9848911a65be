"""schemathesis against the API as `/v1/openapi.json` tells it: `python -m bench.fuzz_openapi`.

To get past the first 404 it is told which model there is, and an id of everything that a path may name. Needs
`schemathesis` beside this interpreter or on PATH (`pip install 'noria[fuzz]'`). Starts a store, an engine of a tiny
model and a gateway of its own. Exits with 1 where schemathesis found anything, or anything is left held after.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.cluster import KEY
from bench.fuzz_bodies import Fuzz, cluster_of_a_tiny_model, lasting_keys, leftovers
from bench.hostile_requests import Hostile

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method", "ignored_auth",
)  # fmt: skip


def told(fuzz: Fuzz, url: str) -> dict[str, Any]:
    """The document, with the values that exist."""
    with urllib.request.urlopen(_authorized(f"{url}/v1/openapi.json")) as answer:
        document: dict[str, Any] = json.load(answer)
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"anyOf": [{"enum": [fuzz.model]}, schema["properties"]["model"]]}
    ids = dict(_made(fuzz))
    for item in document["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in ids:
                    known = {"enum": [ids[parameter["name"]]]}
                    parameter["schema"] = {"anyOf": [known, {"type": "string", "maxLength": 64}]}
    return document


def _made(fuzz: Fuzz) -> Iterator[tuple[str, str]]:
    """One of everything."""
    user = {"role": "user", "content": "hi"}
    bodies = {
        "response_id": ("/v1/responses", {"model": fuzz.model, "input": "hi", "max_output_tokens": 16}),
        "completion_id": (
            "/v1/chat/completions",
            {"model": fuzz.model, "messages": [user], "max_tokens": 2, "store": True},
        ),
        "conversation_id": ("/v1/conversations", {"items": [user]}),
    }
    for name, (path, body) in bodies.items():
        yield name, fuzz.send(Hostile("POST", path, json.dumps(body).encode())).first_object["id"]
    yield "model_id", fuzz.model
    yield "file_id", fuzz.upload(b"{}")


def _authorized(url: str) -> urllib.request.Request:
    return urllib.request.Request(url, headers={"authorization": f"Bearer {KEY}"})


def command(url: str, document: Path, schemathesis: str, examples: int, seed: int) -> list[str]:
    return [
        schemathesis, "run", str(document), "--url", url, "-H", f"Authorization: Bearer {KEY}",
        "--checks", ",".join(CHECKS), "--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure",
        "--request-timeout", "30", "--no-color",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50, help="of each operation at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", default=shutil.which("schemathesis", path=f"{Path(sys.executable).parent}"))
    options = parser.parse_args()
    program = options.schemathesis or shutil.which("schemathesis")
    if program is None:
        parser.error("schemathesis is not installed: pip install 'noria[fuzz]'")
    with tempfile.TemporaryDirectory() as folder, cluster_of_a_tiny_model(Path(folder)) as cluster:
        url = cluster.gateways[0].url
        fuzz, before = Fuzz(url), lasting_keys(cluster)
        document = Path(folder) / "openapi.json"
        document.write_text(json.dumps(told(fuzz, url)))
        run = command(url, document, program, options.examples, options.seed)
        done = subprocess.run(run, cwd=folder, check=False)
        held = [what for what in leftovers(cluster, fuzz, before) if not what.startswith("key ")]  # records stay
    print(f"left at the end: {', '.join(held) or 'nothing'}")
    return int(bool(done.returncode or held))


if __name__ == "__main__":
    sys.exit(main())
