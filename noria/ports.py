"""Whether a port of this machine can be listened on: asked before a gateway starts and by `noria doctor`.

Starts nothing that stays.
"""

from __future__ import annotations

import socket


def listenable(host: str, port: int) -> int:
    """The port itself if it can be listened on; for 0 one that can. Raises OSError with the reason."""
    family, kind, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
        return int(probe.getsockname()[1])
