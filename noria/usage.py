"""`noria usage`: what was used by day, and the ledger's entries as JSON lines, CSV or Parquet.

Knows how to show and to write; the reading is tenancy's.
"""

from __future__ import annotations

import asyncio
import csv
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any, Protocol

import typer

from noria.engine.wire.connection import AsyncStore
from noria.gateway.tenancy.ledger import FIELDS, NUMBERS
from noria.gateway.tenancy.limits import NANO
from noria.gateway.tenancy.names import DEFAULT_ORGANIZATION
from noria.gateway.tenancy.usage import Bucket, Origin, Usage
from noria.store_address import CannotShow, store_url
from noria.supervisor import EXIT_CONFIGURATION
from noria.tenants import Json, Org, RedisUrl, StateDir, emit, guarded, table

DAY = 86_400
PARTS = {"project": "project", "key": "key", "model": "model", "class": "service_class"}


class Format(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


usage = typer.Typer(help="What was used, and the ledger of requests.", invoke_without_command=True)


@usage.callback()
def show(
    context: typer.Context,
    days: Annotated[int, typer.Option(min=1, max=400, help="Days back, today included.")] = 7,
    by: Annotated[str, typer.Option(help="Told apart by: project, key, model, class; comma-separated.")] = "project",
    org: Org = DEFAULT_ORGANIZATION,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """What was used, day by day (UTC)."""
    if context.invoked_subcommand is not None:
        return
    groups = [group.strip() for group in by.split(",") if group.strip()]
    for group in groups:
        if group not in PARTS:
            raise CannotShow(f"--by: {group} is not one of {', '.join(PARTS)}", EXIT_CONFIGURATION)
    today = int(time.time()) // DAY * DAY
    starts = [today - DAY * back for back in reversed(range(days))]
    url = store_url(redis_url, state_dir)
    buckets = guarded(lambda: asyncio.run(_buckets(url, org, starts, groups)))
    rows = list(_rows(buckets, groups))
    headings = ("DAY", *map(str.upper, groups), "REQUESTS", "INPUT", "CACHED", "OUTPUT", "USD")
    emit(rows, as_json, lambda: table(headings, [tuple(row.values()) for row in rows]))


@usage.command()
def export(
    output: Annotated[Path | None, typer.Option(help="The file to write; else standard output.")] = None,
    kind: Annotated[Format, typer.Option("--format", help="How to write.")] = Format.JSONL,
    since: Annotated[str, typer.Option(help="The first day, YYYY-MM-DD (UTC); else all that is kept.")] = "",
    until: Annotated[str, typer.Option(help="The last day, YYYY-MM-DD (UTC); else today.")] = "",
    org: Annotated[str, typer.Option("--org", help="The organization; else all of them.")] = "",
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Write the ledger: one record for each request that ended."""
    start = _day(since, "--since") if since else datetime.fromtimestamp(0, UTC)
    end = (_day(until, "--until") if until else datetime.now(UTC)) + timedelta(days=1)
    if kind is Format.PARQUET and output is None:
        raise CannotShow("--format parquet needs --output", EXIT_CONFIGURATION)
    url = store_url(redis_url, state_dir)
    guarded(lambda: asyncio.run(_export(url, org, _ms(start), _ms(end) - 1, kind, output)))


async def _buckets(url: str, org: str, starts: list[int], groups: list[str]) -> list[Bucket]:
    def by(origin: Origin) -> tuple[str, ...]:
        return tuple(getattr(origin, PARTS[group]) for group in groups)

    store = AsyncStore(url)
    try:
        return await Usage(store).buckets(org, "1d", starts, among=lambda _: True, by=by)
    finally:
        await store.close()


def _rows(buckets: list[Bucket], groups: list[str]) -> Iterator[dict[str, Any]]:
    for bucket in buckets:
        day = datetime.fromtimestamp(bucket.start, UTC).date().isoformat()
        for of, counts in bucket.counts.items():
            yield {
                "day": day,
                **dict(zip(groups, of, strict=True)),
                "requests": counts.requests,
                "input_tokens": counts.input,
                "cached_tokens": counts.cached,
                "output_tokens": counts.output,
                "usd": counts.cost / NANO,
            }


async def _export(url: str, org: str, start: int, end: int, kind: Format, output: Path | None) -> None:
    store = AsyncStore(url)
    try:
        with _writer(kind, output) as writer:
            async for entry in _entries(store, org, start, end):
                writer.write(entry)
    finally:
        await store.close()


async def _entries(store: AsyncStore, org: str, start: int, end: int) -> AsyncIterator[dict[str, Any]]:
    reader = Usage(store)
    for organization_id in [org] if org else await reader.organizations():
        async for entry in reader.entries(organization_id, start, end):
            yield {"organization": organization_id, **{name: entry.get(name) for name in FIELDS}}


class _Writer(Protocol):
    def write(self, entry: dict[str, Any]) -> None: ...


@contextmanager
def _writer(kind: Format, output: Path | None) -> Iterator[_Writer]:
    if kind is Format.PARQUET:
        assert output is not None
        writer = _Parquet(output)
        yield writer
        writer.close()
        return
    with _opened(output) as file:
        yield _Lines(file) if kind is Format.JSONL else _Table(file)


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    try:
        with output.open("w", newline="") as file:
            yield file
    except OSError as error:
        raise CannotShow(f"{output} cannot be written: {error.strerror}", EXIT_CONFIGURATION) from None


class _Lines:
    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")


class _Table:
    def __init__(self, file: IO[str]) -> None:
        self._writer = csv.DictWriter(file, ["organization", *FIELDS])
        self._writer.writeheader()

    def write(self, entry: dict[str, Any]) -> None:
        self._writer.writerow(entry)


class _Parquet:
    """Row groups of a few thousand records: memory holds one."""

    _ROWS = 10_000

    def __init__(self, output: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError:
            message = "Parquet needs pyarrow: pip install 'noria[parquet]'"
            raise CannotShow(message, EXIT_CONFIGURATION) from None
        kinds = {True: pyarrow.int64(), False: pyarrow.string()}
        self._schema = pyarrow.schema([(name, kinds[name in NUMBERS]) for name in ("organization", *FIELDS)])
        self._batch = pyarrow.RecordBatch.from_pylist
        self._writer = pyarrow.parquet.ParquetWriter(output, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, entry: dict[str, Any]) -> None:
        self._rows.append(entry)
        if len(self._rows) >= self._ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_batch(self._batch(self._rows, schema=self._schema))
            self._rows = []


def _day(text: str, option: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise CannotShow(f"{option}: {text!r} is not a day as 2026-01-31", EXIT_CONFIGURATION) from None


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
