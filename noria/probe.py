"""`python -m noria.probe URL`: 0 if the page answers 200, else 1 and one line. For images without curl.

Knows one URL, and imports nothing that would take time.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request

_PATIENCE = 4.0  # seconds


def probe(url: str) -> str:
    """What is wrong, in one line; empty where nothing is. A certificate is not looked at: it is made out to the name
    that clients use, not to the address that a machine calls itself by."""
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE, context=ssl._create_unverified_context()) as answer:
            return "" if answer.status == 200 else f"{url}: {answer.status}"
    except urllib.error.HTTPError as error:
        return f"{url}: {error.code} {error.read(200).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        return f"{url}: {error}"


if __name__ == "__main__":
    sys.exit(probe(sys.argv[1]) or 0)
