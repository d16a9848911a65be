"""The LoRA adapters that this engine has: loaded beside the running batch as the pool's list or a request wants them,
and let go of when neither does.

Knows what loads one and who must be told; no scheduler, and not what an adapter computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from noria.engine.models.errors import ModelError
from noria.engine.models.lora import Adapter
from noria.engine.wire.adapters import AdapterReport, EngineAdapterList, ListedAdapter
from noria.engine.wire.broker import BrokerUnavailable, StoreFault
from noria.engine.wire.messages import AdapterRef

log = structlog.get_logger("noria.engine")

LOOK_EVERY = 0.5
"""Seconds between two looks at the pool's list."""

TRY_AGAIN = 30.0
"""Seconds before what could not be loaded is tried again for the list's sake."""


@dataclass(slots=True)
class AdapterCounts:
    loads: int = 0
    failures: int = 0


class Adapters:
    """`loaded` is read by whoever computes: by digest. Nothing is taken away while somebody uses it (`let_go`)."""

    def __init__(self, load: Callable[[Path], Adapter]) -> None:
        self._load = load
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noria-adapters")
        self._lock = threading.Lock()
        self._coming: dict[tuple[str, str], Future[str]] = {}  # by path and digest
        self._listed: frozenset[str] = frozenset()  # digests
        self.loaded: dict[str, Adapter] = {}
        self.own: list[AdapterRef] = []
        self.counts = AdapterCounts()

    def load_now(self, name: str, path: Path) -> None:
        """One that the engine is started with. Raises ModelError."""
        adapter = self._load(path)
        self._keep(adapter)
        self.own.append(AdapterRef(name, str(path), adapter.digest))

    def bring(self, ref: AdapterRef) -> Future[str] | None:
        """None where the adapter is there; else it is being loaded, and the future's result is its digest. The future
        raises ModelError."""
        with self._lock:
            if ref.digest in self.loaded:
                return None
            key = (ref.path, ref.digest)
            coming = self._coming.get(key)
            if coming is None:
                coming = self._coming[key] = self._loader.submit(self._fetch, ref)
            return coming

    @property
    def num_bytes(self) -> int:
        """Of all that is loaded."""
        return sum(adapter.num_bytes for adapter in list(self.loaded.values()))

    @property
    def has_spare(self) -> bool:
        """Whether something is here that the pool's list does not name (any more)."""
        return not self.loaded.keys() <= self._listed

    def let_go(self, in_use: Collection[str]) -> None:
        """Drop what is neither listed nor in use, by digest. Called by who hands out work, and nobody else."""
        for digest in self.loaded.keys() - self._listed - set(in_use):
            del self.loaded[digest]
            log.info("adapter dropped", digest=digest)

    def want(self, digests: Collection[str]) -> None:
        """What the pool's list names: kept though nobody uses it."""
        self._listed = frozenset(digests)

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, ref: AdapterRef) -> str:
        try:
            started = time.monotonic()
            adapter = self._load(Path(ref.path))
            if ref.digest and adapter.digest != ref.digest:
                raise ModelError(f"{ref.path}: the adapter's files have changed since it was loaded; load it again")
            self._keep(adapter)
            log.info("adapter loaded", name=ref.name, path=ref.path, seconds=round(time.monotonic() - started, 2))
            return adapter.digest
        except Exception:
            self.counts.failures += 1
            raise
        finally:
            with self._lock:
                del self._coming[ref.path, ref.digest]

    def _keep(self, adapter: Adapter) -> None:
        self.counts.loads += 1
        self._listed |= {adapter.digest}  # until the list is looked at again: nobody could use it before
        self.loaded.setdefault(adapter.digest, adapter)


class AdapterWatch:
    """Follows the pool's list on a thread of its own, until `close`: loads what is new, and reports."""

    def __init__(self, adapters: Adapters, pool: EngineAdapterList) -> None:
        self._adapters = adapters
        self._pool = pool
        self._tried: dict[str, tuple[AdapterReport, float]] = {}  # by name on the list; monotonic
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noria-adapter-watch", daemon=True)

    def start(self) -> None:
        """Enter what the engine was started with, and follow. Raises BrokerUnavailable."""
        self._pool.enter(self._adapters.own)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_EVERY + 6.0)  # a command of the store takes five at most
        self._pool.close()

    def _run(self) -> None:
        while not self._end.wait(LOOK_EVERY):
            try:
                self._look()
            except (BrokerUnavailable, StoreFault) as error:
                log.debug("the list of adapters cannot be read", error=str(error))  # the loop tells of the store
            except Exception:
                log.exception("the list of adapters could not be followed")

    def _look(self) -> None:
        listed = self._pool.listed()
        reports = {name: self._report(name, entry) for name, entry in listed.items()}
        self._tried = {name: tried for name, tried in self._tried.items() if name in listed}
        self._adapters.want({report.digest for report in reports.values()})
        self._pool.report(reports)

    def _report(self, name: str, listed: ListedAdapter) -> AdapterReport:
        """Loaded by now, if it can be."""
        before = self._tried.get(name)
        if before is not None and before[0].mark == listed.mark:
            report, tried_at = before
            if report.digest in self._adapters.loaded or (report.error and time.monotonic() - tried_at < TRY_AGAIN):
                return report
        report = self._bring(listed)
        self._tried[name] = report, time.monotonic()
        return report

    def _bring(self, listed: ListedAdapter) -> AdapterReport:
        ref = listed.ref
        try:
            coming = self._adapters.bring(ref)
            return AdapterReport(listed.mark, ref.digest if coming is None else coming.result())
        except ModelError as error:
            problem = str(error)
        except Exception as error:
            log.exception("an adapter could not be loaded", name=ref.name)
            problem = f"{ref.path}: {type(error).__name__}: {error}"
        log.error("an adapter cannot be loaded", name=ref.name, error=problem)
        return AdapterReport(listed.mark, error=problem)


def refusal(coming: Future[str]) -> str | None:
    """What to tell a client whose adapter cannot be had; None: it is there. For futures that are done. What is wrong
    with its files is for whoever runs the place: the log has it."""
    try:
        coming.result()
    except ModelError as error:
        log.error("a request's adapter cannot be loaded", error=str(error))
    except Exception:
        log.exception("a request's adapter could not be loaded")
    else:
        return None
    return "this model's adapter cannot be loaded at the moment; the engine's log says why"
