"""`make audit`: asks OSV, the database of known vulnerabilities, about every package that is installed here.

    python deploy/audit.py [pip-audit's options, like --ignore-vuln ID]

OSV_URL         where to ask                              (default: pip-audit's)
AUDIT_MUST_LOOK anything: that nobody could be asked is a failure, too

Exits with 1 where something is known, and with 0 where nobody could be asked, which is said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def ask(options: list[str]) -> tuple[list[dict[str, Any]] | None, str]:
    """What is known of each package; or None, and why nobody said anything."""
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--skip-editable"]
    if url := os.environ.get("OSV_URL"):
        command += ["--osv-url", url]
    with tempfile.TemporaryDirectory(prefix="noria-audit-") as folder:
        told = Path(folder) / "audit.json"
        command += ["--progress-spinner", "off", "--format", "json", "--output", str(told), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if told.exists() and (text := told.read_text()):
            found: list[dict[str, Any]] = json.loads(text)["dependencies"]
            return found, ""
    return None, (done.stderr.strip().splitlines() or ["no answer"])[-1]


def main(options: list[str]) -> int:
    packages, trouble = ask(options)
    if packages is None:
        print(f"dependencies: could not look ({trouble[:300]})", file=sys.stderr)
        return int(bool(os.environ.get("AUDIT_MUST_LOOK")))
    known = 0
    for package in packages:
        for fault in package.get("vulns", ()):
            known += 1
            mended = ", ".join(fault["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {fault['id']}, mended in {mended}")
    print(f"dependencies: {known} known vulnerabilities in {len(packages)} packages")
    return int(known > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
