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

MAGIC = b"SQLite format 3\0"
NS = 1e-9
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
    """A database holds code too: views, and columns that are computed. Such runs nothing, or little."""
    database.execute("PRAGMA trusted_schema = OFF")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LINE.most)
    database.set_authorizer(_reading)


def _reading(action: int, first: str | None, second: str | None, *_: object) -> int:
    plain = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA) or (
        action == sqlite3.SQLITE_FUNCTION and second in ("count", "COUNT")
    )
    return sqlite3.SQLITE_OK if plain else sqlite3.SQLITE_DENY


def _read(database: sqlite3.Connection, path: str) -> Timeline:
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if KERNELS not in tables:
        raise FormatError(
            f"holds no table {KERNELS}; export a profile with CUDA kernels: nsys export --type sqlite", path
        )
    rows = database.execute(f"SELECT COUNT(*) FROM {KERNELS}").fetchone()[0]
    NSYS_ROWS.check(int(rows))
    names = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
    builder = TimelineBuilder()
    for start, end, device, stream, name in _rows(
        database, KERNELS, ("deviceId", "streamId"), "demangledName", "shortName"
    ):
        text = str(names.get(name, name))
        kind = SpanKind.COMMUNICATION if text.lower().startswith(COMMUNICATION) else SpanKind.COMPUTE
        _add(builder, text, device, f"stream {stream}", start, end, kind, path)
    if COPIES in tables:
        for start, end, device, stream, size in _rows(database, COPIES, ("deviceId", "streamId"), "bytes"):
            _add(builder, f"copy of {size} bytes", device, f"stream {stream}", start, end, SpanKind.COPY, path)
    if RANGES in tables:
        _add_ranges(database, names, builder, path)
    if not len(builder):
        raise FormatError("holds no kernel", path)
    return builder.build(measured=True, source=path, facts={"format": "nsys", "kernels": int(rows)})


def _rows(database: sqlite3.Connection, table: str, keys: tuple[str, ...], *wanted: str) -> Iterator[tuple[Any, ...]]:
    """Start, end, *keys* and the first of *wanted* that the table has, in order of start."""
    known = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    last = next((name for name in wanted if name in known), "NULL")
    columns = ", ".join((*(key if key in known else "0" for key in keys), last))
    yield from database.execute(f"SELECT start, end, {columns} FROM {table} WHERE end IS NOT NULL ORDER BY start")


def _add_ranges(database: sqlite3.Connection, names: dict[Any, Any], builder: TimelineBuilder, path: str) -> None:
    """NVTX push/pop ranges of the host."""
    known = {row[1] for row in database.execute(f"PRAGMA table_info({RANGES})")}
    text = "text" if "text" in known else "NULL"
    number = "textId" if "textId" in known else "NULL"
    thread = "globalTid" if "globalTid" in known else "0"
    query = f"SELECT start, end, {text}, {number}, {thread} FROM {RANGES} WHERE end IS NOT NULL ORDER BY start"
    for start, end, words, known_id, tid in database.execute(query):
        shown = words if words is not None else names.get(known_id)
        if shown:
            _add(builder, str(shown), 0, f"nvtx {tid}", start, end, SpanKind.HOST, path)


def _add(
    builder: TimelineBuilder, name: str, device: Any, lane: str, start: Any, end: Any, kind: SpanKind, path: str
) -> None:
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(device, int):
        raise FormatError("a row has no whole numbers of nanoseconds", path)
    builder.add(name, builder.lane(device, lane), start * NS, max(0, end - start) * NS, kind=kind)
