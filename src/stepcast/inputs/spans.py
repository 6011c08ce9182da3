"""Spans of other tools as timelines: kernel traces of rocprofv3 (CSV, JSON), OpenTelemetry spans (OTLP JSON, protobuf),
and SQLite exports of Nsight Systems (``nsys export --type sqlite``): kernels, copies and NVTX ranges.

Formats: rocm.docs.amd.com, rocprofv3, kernel trace; opentelemetry-proto, trace/v1/trace.proto.
"""

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from stepcast.inputs.chakra.protobuf import bytes_in, fields
from stepcast.inputs.kineto.reader import kind_of_kernel
from stepcast.inputs.source import FormatError, Source, expect, open_columns, prefix_errors
from stepcast.ir.limits import GPUS, NSYS_DEVICES, NSYS_ROWS, PIPE, RESULT, TRACE
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.ir.types import Facts
from stepcast.units import MIB, NS

ROCPROF = ("Kind", "Agent_Id", "Queue_Id", "Kernel_Name", "Start_Timestamp", "End_Timestamp")
DAMAGED = (msgspec.DecodeError, KeyError, TypeError)
RANK_KEYS = ("dl.rank", "rl.rank", "rank", "process.rank", "torch.rank")


def looks_like_rocprof(head: str) -> bool:
    first = head.lstrip("\ufeff \r\n").partition("\n")[0]
    is_csv = set(ROCPROF) <= {word.strip().strip('"') for word in first.split(",")}
    return is_csv or re.match(r'\s*\{\s*"rocprofiler-sdk-tool"', head) is not None


def read_rocprof(source: Source) -> Timeline:
    """Return the kernels of each agent, a lane per queue."""
    builder, agents = TimelineBuilder(), dict[str, int]()
    is_json = source.head.lstrip()[:1] == "{"
    rows = _json_kernels(source) if is_json else open_columns(source, ROCPROF[1:], "a kernel")
    for line, (agent, queue, name, start, end) in rows:
        try:
            start_s, duration_s = int(start) * NS, (int(end) - int(start)) * NS
        except ValueError:
            raise FormatError("expected the columns of a kernel", source.path, line) from None
        expect(duration_s >= 0 and 0 <= start_s < 1e12, "a kernel must end after it starts", source.path, line)
        lane = builder.lane(agents.setdefault(agent, len(agents)), f"stream {queue}")
        builder.add(name, lane, start_s, duration_s, kind=kind_of_kernel(name))
    expect(len(builder), "holds no kernel", source.path)
    return builder.build(measured=True, source=source.path, facts={"agents": list(agents)})


def _json_kernels(source: Source) -> Iterator[tuple[None, list[str]]]:
    """Yield the kernels of rocprofv3's JSON as its CSV has them; all processes call a GPU by the same handle."""
    with prefix_errors("is no kernel trace of rocprofv3", source.path, DAMAGED):
        for process in msgspec.json.decode(source.data(TRACE))["rocprofiler-sdk-tool"]:
            names = {symbol["kernel_id"]: symbol["formatted_kernel_name"] for symbol in process["kernel_symbols"]}
            for row in process["buffer_records"]["kernel_dispatch"]:
                place = row["dispatch_info"]
                words = place["agent_id"]["handle"], place["queue_id"]["handle"], names[place["kernel_id"]]
                yield None, [str(word) for word in (*words, row["start_timestamp"], row["end_timestamp"])]


# Attributes of resource and span, name, start and end in ns.
Spans = Iterator[tuple[Mapping[str, object], str, int, int]]


def looks_like_otlp(head: bytes) -> bool:
    if head.lstrip()[:1] == b"{":
        return b'"resourceSpans"' in head[:4096]
    # Field 1 of TracesData, whose fields 1 and 2 are a resource and its spans; service.name is in nearly all.
    return head[:1] == b"\x0a" and b"service.name" in head[:4096] and head.find(b"\x0a", 1, 16) > 0


def read_otlp(source: Source) -> Timeline:
    """Return the spans of each rank (or resource), a lane per trace."""
    data = source.data(RESULT)
    with prefix_errors("is no complete OTLP trace", source.path, (*DAMAGED, ValueError, IndexError, AttributeError)):
        spans = [*(_json_spans(data) if data.lstrip()[:1] == b"{" else _protobuf_spans(data))]
    builder, resources = TimelineBuilder(), dict[str, int]()
    for attributes, name, start, end in spans:
        expect(0 < start <= end < 2**63, f"span {name[:80]!r} must end after it starts", source.path)
        rank = str(next((attributes[key] for key in RANK_KEYS if key in attributes), ""))
        number = int(rank) if rank.isdecimal() and len(rank) < 8 else None
        if number is None:
            words = str(attributes.get("service.instance.id", attributes.get("host.name", "")))
            number = resources.setdefault(words, len(resources))
        builder.add(name, builder.lane(number, "spans"), start * NS, (end - start) * NS, kind=SpanKind.HOST)
    expect(len(builder), "holds no span", source.path)
    return builder.build(measured=True, source=source.path)


def _json_spans(data: bytes) -> Spans:
    for line in [data] if b'\n{"resourceSpans"' not in data else data.splitlines():
        table = msgspec.json.decode(line) if line.strip() else {}
        for resource in table.get("resourceSpans", ()):
            shared = _attributes(resource.get("resource", {}))
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                    yield {**shared, **_attributes(span)}, str(span.get("name", "")), start, end


def _attributes(owner: Facts) -> dict[str, object]:
    pairs = owner.get("attributes", ())
    return {str(pair["key"]): next(iter(pair.get("value", {}).values()), None) for pair in pairs}


def _protobuf_spans(data: bytes) -> Spans:
    for resource in bytes_in(data, 1):
        shared = dict(_pair(pair) for owner in bytes_in(resource, 1) for pair in bytes_in(owner, 1))
        for scope in bytes_in(resource, 2):
            for span in bytes_in(scope, 2):
                # Times are fixed64: eight bytes.
                start, end = (int.from_bytes(next(bytes_in(span, number), b""), "little") for number in (7, 8))
                attributes = dict(_pair(pair) for pair in bytes_in(span, 9))
                name = next(bytes_in(span, 5), b"").decode(errors="replace")
                yield {**shared, **attributes}, name, start, end


def _pair(data: bytes) -> tuple[str, object]:
    """Return a KeyValue: text and whole numbers; other values are None."""
    value: object = None
    for number, _, content in fields(next(bytes_in(data, 2), b"")):
        if number in (1, 3):
            value = content.decode(errors="replace") if isinstance(content, bytes) else content
    return next(bytes_in(data, 1), b"").decode(errors="replace"), value


KERNELS, COPIES, RANGES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS"
LONGEST_NAME = 256 * 1024  # bytes of a kernel's name; templates have up to some ten thousand
LONGEST_DEFAULT = 100  # characters; every row that lacks the column would have it
MOST_TEXT_BYTES, MOST_TEXT_TIMES = 64 * MIB, 20


def read_nsys(source: Source) -> Timeline:
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
    counts = action == sqlite3.SQLITE_FUNCTION and second in ("count", "COUNT")
    reads = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA)
    return sqlite3.SQLITE_OK if counts or reads else sqlite3.SQLITE_DENY


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
            if self.database.execute("PRAGMA application_id").fetchone()[0]:
                how = "'stepcast sweep show DIR' shows a sweep, and 'stepcast gate' uses a history"
                raise FormatError(f"is no export of Nsight Systems; {how}", self.path)
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
        expect(len(self.builder), "holds no kernel", self.path)
        return self.builder.build(measured=True, source=self.path, facts={"format": "nsys", "kernels": rows})

    def add(self, name: str, device: object, lane: str, start: object, end: object, kind: SpanKind) -> None:
        device = 0 if device is None else device
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(device, int):
            raise FormatError("a row has no whole numbers of nanoseconds", self.path)
        if device not in self.devices:
            expect(0 <= device <= GPUS.most, f"device {device} is no number of a GPU", self.path)
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
            self.text_left -= sum(len(value) for value in row if isinstance(value, str | bytes))
            expect(self.text_left >= 0, "its rows hold far more text than the file has bytes", self.path)
            yield row
