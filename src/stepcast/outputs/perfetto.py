"""Chrome trace JSON from a Timeline, as Perfetto and chrome://tracing open it.

One process per rank, one thread per lane. Ids start at 1, because Perfetto drops slices of process or
thread 0; times are microseconds with three decimals, whole nanoseconds.
"""

from collections.abc import Iterator

from stepcast.ir.timeline import SpanKind, Timeline
from stepcast.ir.work import Collective, Transfer, Work

CATEGORIES = {kind: kind.name.lower() for kind in SpanKind}


def write(timeline: Timeline) -> bytes:
    """The whole trace as one JSON object."""
    import msgspec

    encoder = msgspec.json.Encoder()
    events = [encoder.encode(event) for event in _metadata(timeline)]
    events += _slices(timeline, encoder)
    events += _flows(timeline)
    head = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    return head + b",\n".join(events) + b"\n]}\n"


def _metadata(timeline: Timeline) -> Iterator[dict[str, object]]:
    """Names and order of processes and threads."""
    for rank in timeline.ranks:
        stage = timeline.stage_of_rank.get(rank)
        name = f"rank {rank}" if stage is None else f"rank {rank} (stage {stage})"
        yield {"ph": "M", "name": "process_name", "pid": rank + 1, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank + 1, "args": {"sort_index": rank}}
    for at, lane in enumerate(timeline.lanes):
        place = {"ph": "M", "pid": lane.rank + 1, "tid": at + 1}
        yield place | {"name": "thread_name", "args": {"name": lane.name}}
        yield place | {"name": "thread_sort_index", "args": {"sort_index": at}}


def _slices(timeline: Timeline, encoder: "object") -> Iterator[bytes]:
    """One complete event per span. What repeats is encoded once; only the numbers are formatted per row."""
    encode = encoder.encode  # type: ignore[attr-defined]
    names = [encode(name) for name in timeline.names]
    places = [b'"pid":%d,"tid":%d' % (lane.rank + 1, at + 1) for at, lane in enumerate(timeline.lanes)]
    works = [_work_args(work) for work in timeline.works]
    categories = [encode(CATEGORIES[kind]) for kind in SpanKind]
    arguments: dict[tuple[int, int, int], bytes] = {}
    columns = zip(
        timeline.name_of.tolist(),
        timeline.lane_of.tolist(),
        timeline.kind_of.tolist(),
        timeline.work_of.tolist(),
        timeline.detail_of.tolist(),
        timeline.micro_batch_of.tolist(),
        (timeline.start_s * 1e6).tolist(),
        (timeline.duration_s * 1e6).tolist(),
        strict=True,
    )
    for name, lane, kind, work, detail, micro_batch, start_us, duration_us in columns:
        key = (work, detail, micro_batch)
        args = arguments.get(key)
        if args is None:
            values: dict[str, object] = {} if micro_batch < 0 else {"micro_batch": micro_batch}
            values |= {} if detail < 0 else timeline.details[detail]
            values |= {} if work < 0 else works[work]
            args = arguments[key] = b',"args":' + encode(values) if values else b""
        yield b'{"ph":"X","name":%b,"cat":%b,%b,"ts":%.3f,"dur":%.3f%b}' % (
            names[name],
            categories[kind],
            places[lane],
            start_us,
            duration_us,
            args,
        )


def _flows(timeline: Timeline) -> Iterator[bytes]:
    """An arrow from the end of each row that sends to the start of the row that waits for it."""
    places = [b'"pid":%d,"tid":%d' % (lane.rank + 1, at + 1) for at, lane in enumerate(timeline.lanes)]
    senders, waiters = timeline.flows[:, 0], timeline.flows[:, 1]
    # Viewers bind an arrow to the slice that encloses its point: stay inside both.
    leave_us = (timeline.start_s[senders] + 0.999 * timeline.duration_s[senders]) * 1e6
    arrive_us = (timeline.start_s[waiters] + 0.001 * timeline.duration_s[waiters]) * 1e6
    rows = zip(
        timeline.lane_of[senders].tolist(),
        timeline.lane_of[waiters].tolist(),
        leave_us.tolist(),
        arrive_us.tolist(),
        strict=True,
    )
    for number, (source, target, leave, arrive) in enumerate(rows, 1):
        yield b'{"ph":"s","name":"message","cat":"message","id":%d,%b,"ts":%.3f}' % (
            number,
            places[source],
            leave,
        )
        yield b'{"ph":"f","bp":"e","name":"message","cat":"message","id":%d,%b,"ts":%.3f}' % (
            number,
            places[target],
            arrive,
        )


def _work_args(work: Work) -> dict[str, object]:
    if isinstance(work, Collective):
        return {"collective": work.kind, "group": work.group, "bytes": work.size_bytes}
    if isinstance(work, Transfer):
        return {"transfer": work.direction, "group": work.group, "bytes": work.size_bytes}
    return {"work": type(work).__name__}
