"""SQLite exports of Nsight Systems (``nsys export --type sqlite``): kernels, copies and NVTX ranges."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import LINE, NSYS_ROWS
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.units import NS

MAGIC = b"SQLite format 3\0"
KERNELS, COPIES, RANGES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS"
COMMUNICATION = ("nccl", "rccl", "nvshmem", "deep_ep", "mscclpp")


def looks_like(head: bytes) -> bool:
    return head.startswith(MAGIC)


def read(source: Source) -> Timeline:
    if not os.path.isfile(source.path):
        raise FormatError("is a database, which is read from a file alone", source.path)
    uri = f"{Path(source.path).resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            _bound(database)
            return _read(database, source.path)
    except sqlite3.Error as error:
        raise FormatError(f"no export of Nsight Systems: {error}", source.path) from None


def _bound(database: sqlite3.Connection) -> None:
    """Let nothing run that a database may hold: views, and columns that are computed."""
    database.execute("PRAGMA trusted_schema = OFF")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LINE.most)
    database.set_authorizer(_authorize)


def _authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    is_plain = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA) or (
        action == sqlite3.SQLITE_FUNCTION and second in ("count", "COUNT")
    )
    return sqlite3.SQLITE_OK if is_plain else sqlite3.SQLITE_DENY


def _read(database: sqlite3.Connection, path: str) -> Timeline:
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if KERNELS not in tables:
        raise FormatError(
            f"holds no table {KERNELS}; export a profile with CUDA kernels: nsys export --type sqlite", path
        )
    rows = int(database.execute(f"SELECT COUNT(*) FROM {KERNELS}").fetchone()[0])
    NSYS_ROWS.check(rows)
    names = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
    builder = TimelineBuilder()

    def add(name: str, device: object, lane: str, start: object, end: object, kind: SpanKind) -> None:
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(device, int):
            raise FormatError("a row has no whole numbers of nanoseconds", path)
        builder.add(name, builder.lane(device, lane), start * NS, max(0, end - start) * NS, kind=kind)

    for start, end, device, stream, long, short in _select(
        database, KERNELS, ("deviceId", 0), ("streamId", 0), ("demangledName", None), ("shortName", None)
    ):
        number = short if long is None else long
        name = str(names.get(number, number))
        kind = SpanKind.COMMUNICATION if name.lower().startswith(COMMUNICATION) else SpanKind.COMPUTE
        add(name, device, f"stream {stream}", start, end, kind)
    if COPIES in tables:
        for start, end, device, stream, size in _select(
            database, COPIES, ("deviceId", 0), ("streamId", 0), ("bytes", None)
        ):
            add(f"copy of {size} bytes", device, f"stream {stream}", start, end, SpanKind.COPY)
    if RANGES in tables:  # push and pop of the host
        for start, end, text, number, thread in _select(
            database, RANGES, ("text", None), ("textId", None), ("globalTid", 0)
        ):
            if label := names.get(number) if text is None else text:
                add(str(label), 0, f"nvtx {thread}", start, end, SpanKind.HOST)
    if not len(builder):
        raise FormatError("holds no kernel", path)
    return builder.build(measured=True, source=path, facts={"format": "nsys", "kernels": rows})


def _select(database: sqlite3.Connection, table: str, *columns: tuple[str, int | None]) -> Iterator[tuple[Any, ...]]:
    """Yield start, end and *columns* in order of start; each has a default where the table lacks it."""
    known = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    chosen = ", ".join(name if name in known else "NULL" if default is None else "0" for name, default in columns)
    yield from database.execute(f"SELECT start, end, {chosen} FROM {table} WHERE end IS NOT NULL ORDER BY start")
