"""schemathesis against the API as `/v1/openapi.json` tells it: `python -m bench.fuzz_openapi`.

Needs `schemathesis` on PATH or beside this interpreter (`pip install 'noria[bench]'`). Starts a store, an engine of a
tiny model and a gateway of its own. Exits with 1 where schemathesis found anything, or anything is left held after.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.cluster import KEY
from bench.fuzz_bodies import Fuzz, cluster_of_a_tiny_model, lasting_keys, leftovers

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method", "ignored_auth",
)  # fmt: skip


def command(url: str, schemathesis: str, examples: int, seed: int) -> list[str]:
    return [
        schemathesis, "run", f"{url}/v1/openapi.json", "--url", url, "-H", f"Authorization: Bearer {KEY}",
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
        parser.error("schemathesis is not installed: pip install 'noria[bench]'")
    with tempfile.TemporaryDirectory() as folder, cluster_of_a_tiny_model(Path(folder)) as cluster:
        url = cluster.gateways[0].url
        fuzz, before = Fuzz(url), lasting_keys(cluster)
        done = subprocess.run(command(url, program, options.examples, options.seed), cwd=folder, check=False)
        held = [what for what in leftovers(cluster, fuzz, before) if not what.startswith("key ")]  # records stay
    print(f"left at the end: {', '.join(held) or 'nothing'}")
    return int(bool(done.returncode or held))


if __name__ == "__main__":
    sys.exit(main())
