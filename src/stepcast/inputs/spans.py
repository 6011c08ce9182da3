"""Spans of other tools as timelines: kernel traces of rocprofv3 (CSV, JSON), OpenTelemetry spans (OTLP JSON, protobuf).

Formats: rocm.docs.amd.com, rocprofv3, kernel trace; opentelemetry-proto, trace/v1/trace.proto.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from stepcast.inputs.chakra.protobuf import bytes_in, fields
from stepcast.inputs.kineto.columns import kind_of_kernel
from stepcast.inputs.source import FormatError, Source, csv_columns, prefix_errors
from stepcast.ir.facts import Facts
from stepcast.ir.limits import RESULT, TRACE
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.units import NS

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
    rows = _json_kernels(source) if source.head.lstrip()[:1] == "{" else csv_columns(source, ROCPROF[1:])
    for line, (agent, queue, name, start, end) in rows:
        try:
            start_s, duration_s = int(start) * NS, (int(end) - int(start)) * NS
        except ValueError:
            raise FormatError("expected the columns of a kernel", source.path, line) from None
        if duration_s < 0 or not 0 <= start_s < 1e12:
            raise FormatError("a kernel must end after it starts", source.path, line)
        lane = builder.lane(agents.setdefault(agent, len(agents)), f"stream {queue}")
        builder.add(name, lane, start_s, duration_s, kind=kind_of_kernel(name))
    if not len(builder):
        raise FormatError("holds no kernel", source.path)
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


# ---- OpenTelemetry --------------------------------------------------------------------------------------------

Attributes = Mapping[str, object]
Spans = Iterator[tuple[Attributes, str, int, int]]  # attributes of resource and span, name, start and end in ns


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
        if not 0 < start <= end < 2**63:
            raise FormatError(f"span {name[:80]!r} must end after it starts", source.path)
        rank = str(next((attributes[key] for key in RANK_KEYS if key in attributes), ""))
        number = int(rank) if rank.isdecimal() and len(rank) < 8 else None
        if number is None:
            words = str(attributes.get("service.instance.id", attributes.get("host.name", "")))
            number = resources.setdefault(words, len(resources))
        builder.add(name, builder.lane(number, "spans"), start * NS, (end - start) * NS, kind=SpanKind.HOST)
    if not len(builder):
        raise FormatError("holds no span", source.path)
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
                own = dict(_pair(pair) for pair in bytes_in(span, 9))
                name = next(bytes_in(span, 5), b"").decode(errors="replace")
                yield {**shared, **own}, name, start, end


def _pair(data: bytes) -> tuple[str, object]:
    """Return a KeyValue: text and whole numbers; other values are None."""
    value: object = None
    for number, _, content in fields(next(bytes_in(data, 2), b"")):
        if number in (1, 3):
            value = content.decode(errors="replace") if isinstance(content, bytes) else content
    return next(bytes_in(data, 1), b"").decode(errors="replace"), value
