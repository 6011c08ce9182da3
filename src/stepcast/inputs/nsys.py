"""SQLite exports of Nsight Systems (``nsys export --type sqlite``): kernels, copies and NVTX ranges."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from stepcast.inputs.kineto.columns import kind_of_kernel
from stepcast.inputs.source import FormatError, Source, prefix_errors
from stepcast.ir.limits import GPUS, MIB, NSYS_DEVICES, NSYS_ROWS, PIPE
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.units import NS

KERNELS, COPIES, RANGES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS"
LONGEST_NAME = 256 * 1024  # bytes of a kernel's name; templates have up to some ten thousand
LONGEST_DEFAULT = 100  # characters; every row that lacks the column would have it
MOST_TEXT_BYTES, MOST_TEXT_TIMES = 64 * MIB, 20


def read(source: Source) -> Timeline:
    with (
        prefix_errors("no export of Nsight Systems", source.path, (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError)),
        closing(_open(source)) as database,
    ):
        return _ExportReader(database, source.path).read()


def _open(source: Source) -> sqlite3.Connection:
    """Return the database of a file; one that was given as bytes, through a pipe or packed is read completely."""
    if source.is_plain_file:
        uri = f"{Path(source.path).resolve().as_uri()}?mode=ro&immutable=1"
        return sqlite3.connect(uri, uri=True)
    database = sqlite3.connect(":memory:")
    database.deserialize(source.raw(PIPE))
    return database


def _authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    is_plain = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA) or (
        action == sqlite3.SQLITE_FUNCTION and second in ("count", "COUNT")
    )
    return sqlite3.SQLITE_OK if is_plain else sqlite3.SQLITE_DENY


class _ExportReader:
    """Reads plain tables of a database; nothing runs that a database may hold (views, computed columns)."""

    def __init__(self, database: sqlite3.Connection, path: str) -> None:
        database.execute("PRAGMA trusted_schema = OFF")
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_NAME)
        database.set_authorizer(_authorize)
        self.database, self.path = database, path
        pages, page_bytes = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        self.text_left = max(MOST_TEXT_BYTES, MOST_TEXT_TIMES * pages * page_bytes)
        self.builder = TimelineBuilder()
        self.devices: set[int] = set()

    def read(self) -> Timeline:
        stored = "SELECT name FROM sqlite_master WHERE type='table' AND rootpage > 0"  # not computed by a module
        tables = {row[0] for row in self.database.execute(stored)}
        if KERNELS not in tables:
            raise FormatError(
                f"holds no table {KERNELS}; export a profile with CUDA kernels: nsys export --type sqlite", self.path
            )
        rows = int(self.database.execute(f"SELECT COUNT(*) FROM {KERNELS}").fetchone()[0])
        NSYS_ROWS.check(rows)
        names = dict(self.select("StringIds", "id", "value")) if "StringIds" in tables else {}
        columns = ("deviceId", "streamId", "demangledName", "shortName")
        for start, end, device, stream, long, short in self.spans(KERNELS, *columns):
            number = short if long is None else long
            name = str(names.get(number, number))
            self.add(name, device, f"stream {stream or 0}", start, end, kind_of_kernel(name))
        if COPIES in tables:
            for start, end, device, stream, size in self.spans(COPIES, "deviceId", "streamId", "bytes"):
                self.add(f"copy of {size} bytes", device, f"stream {stream}", start, end, SpanKind.COPY)
        if RANGES in tables:  # push and pop of the host
            for start, end, text, number, thread in self.spans(RANGES, "text", "textId", "globalTid"):
                if label := names.get(number) if text is None else text:
                    self.add(str(label), 0, f"nvtx {thread or 0}", start, end, SpanKind.HOST)
        if not len(self.builder):
            raise FormatError("holds no kernel", self.path)
        return self.builder.build(measured=True, source=self.path, facts={"format": "nsys", "kernels": rows})

    def add(self, name: str, device: object, lane: str, start: object, end: object, kind: SpanKind) -> None:
        device = 0 if device is None else device
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(device, int):
            raise FormatError("a row has no whole numbers of nanoseconds", self.path)
        if device not in self.devices:
            if not 0 <= device <= GPUS.most:
                raise FormatError(f"device {device} is no number of a GPU", self.path)
            self.devices.add(device)
            NSYS_DEVICES.check(len(self.devices))
        self.builder.add(name, self.builder.lane(device, lane), start * NS, max(0, end - start) * NS, kind=kind)

    def spans(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield start, end and *columns* in order of start."""
        return self.select(table, "start", "end", *columns, condition="WHERE end IS NOT NULL ORDER BY start")

    def select(self, table: str, *columns: str, condition: str = "") -> Iterator[tuple[Any, ...]]:
        """Yield *columns*, None where the table lacks them; refuse computed ones and too much text."""
        known = set()
        for _, name, _, _, default, _, hidden in self.database.execute(f"PRAGMA table_xinfo({table})"):
            known.add(name)
            if hidden or len(default or "") > LONGEST_DEFAULT:
                raise FormatError(f"table {table} has computed columns or long defaults, which are not read", self.path)
        chosen = ", ".join(name if name in known else "NULL" for name in columns)
        for row in self.database.execute(f"SELECT {chosen} FROM {table} {condition}"):
            for value in row:
                if isinstance(value, str | bytes):
                    self.text_left -= len(value)
            if self.text_left < 0:
                raise FormatError("its rows hold far more text than the file has bytes", self.path)
            yield row
