"""Chrome trace JSON from a Timeline, as Perfetto and chrome://tracing open it.

One process per rank, one thread per lane. Ids start at 1, because Perfetto drops slices of process or
thread 0; times are microseconds with three decimals, whole nanoseconds. Starts and ends are rounded, not
durations: neighbours then still meet. Perfetto also drops a slice that overlaps another of its thread without
being inside it, so such slices of a lane get more threads.
"""

from collections.abc import Callable, Iterator

import numpy as np

from stepcast.ir.arrays import IntArray
from stepcast.ir.timeline import SpanKind, Timeline
from stepcast.ir.types import dataclass, pick
from stepcast.ir.work import Collective, Transfer, Work


@dataclass(frozen=True, eq=False)
class _TraceLayout:
    """A timeline in whole nanoseconds, each row in a thread in which slices nest or do not overlap."""

    timeline: Timeline
    start_ns: IntArray
    end_ns: IntArray
    thread_of: IntArray
    lanes: tuple[int, ...]  # of each thread

    @property
    def places(self) -> list[bytes]:
        lanes = self.timeline.lanes
        return [b'"pid":%d,"tid":%d' % (lanes[lane].rank + 1, tid) for tid, lane in enumerate(self.lanes, 1)]


def write(timeline: Timeline) -> bytes:
    """Return the trace as one JSON object, which states what it is of: viewers show *otherData*, readers take it."""
    import msgspec

    encode, layout = msgspec.json.Encoder().encode, _arrange(timeline)
    events = [*map(encode, _metadata(layout)), *_slices(layout, encode), *_flows(layout)]
    degrees = pick(timeline.layout, "tp cp ep dp pp vpp") if timeline.layout else None
    origin = encode({"stepcast": {**timeline.facts, "measured": timeline.measured, "layout": degrees}})
    head = b'{"otherData":%b,"displayTimeUnit":"ms","traceEvents":[\n' % origin
    return head + b",\n".join(events) + b"\n]}\n"


def _arrange(timeline: Timeline) -> _TraceLayout:
    start_ns = np.rint(timeline.start_s * 1e9).astype(np.int64)
    end_ns = np.maximum(np.rint(timeline.end_s * 1e9).astype(np.int64), start_ns)
    thread_of = timeline.lane_of.astype(np.int64)
    lanes = list(range(len(timeline.lanes)))
    # The outer of two slices that start together comes first.
    order = np.lexsort((-end_ns, start_ns, thread_of))
    bounds = np.searchsorted(thread_of[order], np.arange(len(lanes) + 1))
    for lane in range(len(timeline.lanes)):
        rows = order[bounds[lane] : bounds[lane + 1]]
        if (start_ns[rows[1:]] >= np.maximum.accumulate(end_ns[rows])[:-1]).all():
            continue
        open_until: list[list[int]] = []  # by thread: the ends of the slices around this point, outermost first
        level_of = []
        for start, end in zip(start_ns[rows].tolist(), end_ns[rows].tolist(), strict=True):
            for around in open_until:
                while around and around[-1] <= start:
                    around.pop()
            level = next((i for i, around in enumerate(open_until) if not around or around[-1] >= end), None)
            if level is None:
                level = len(open_until)
                open_until.append([])
            open_until[level].append(end)
            level_of.append(level)
        threads = np.array([lane, *range(len(lanes), len(lanes) + max(level_of))], np.int64)
        lanes += [lane] * max(level_of)
        thread_of[rows] = threads[level_of]
    return _TraceLayout(timeline, start_ns, end_ns, thread_of, tuple(lanes))


def _metadata(layout: _TraceLayout) -> Iterator[dict[str, object]]:
    """Yield names and order of processes and threads."""
    timeline = layout.timeline
    for rank in timeline.ranks:
        stage = timeline.stage_of_rank.get(rank)
        name = f"rank {rank}" if stage is None else f"rank {rank} (stage {stage})"
        yield {"ph": "M", "name": "process_name", "pid": rank + 1, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank + 1, "args": {"sort_index": rank}}
    for thread, number in enumerate(layout.lanes):
        lane = timeline.lanes[number]
        name = lane.name if thread == number else f"{lane.name}, overlapping"
        ids = {"ph": "M", "pid": lane.rank + 1, "tid": thread + 1}
        yield ids | {"name": "thread_name", "args": {"name": name}}
        yield ids | {"name": "thread_sort_index", "args": {"sort_index": number}}


def _slices(layout: _TraceLayout, encode: Callable[[object], bytes]) -> Iterator[bytes]:
    """Yield one complete event per span. Repeated parts are encoded once; only the numbers are formatted per row."""
    timeline, places = layout.timeline, layout.places
    names = [encode(name) for name in timeline.names]
    works = [_work_args(work) for work in timeline.works]
    categories = [encode(kind.name.lower()) for kind in SpanKind]
    arguments: dict[tuple[int, int, int], bytes] = {}
    order = np.lexsort((-layout.end_ns, layout.start_ns))
    columns = (timeline.name_of, layout.thread_of, timeline.kind_of, timeline.work_of, timeline.detail_of)
    numbers = (timeline.micro_batch_of, layout.start_ns, layout.end_ns - layout.start_ns)
    rows = zip(*(column[order].tolist() for column in (*columns, *numbers)), strict=True)
    for name, thread, kind, work, detail, micro_batch, start_ns, duration_ns in rows:
        key = (work, detail, micro_batch)
        if key not in arguments:
            values: dict[str, object] = {} if micro_batch < 0 else {"micro_batch": micro_batch}
            values |= {} if detail < 0 else timeline.details[detail]
            values |= {} if work < 0 else works[work]
            arguments[key] = b',"args":' + encode(values) if values else b""
        head = b'"name":%b,"cat":%b,%b' % (names[name], categories[kind], places[thread])
        yield b'{"ph":"X",%b,"ts":%b,"dur":%b%b}' % (head, _us(start_ns), _us(duration_ns), arguments[key])


def _us(nanoseconds: int) -> bytes:
    """Return microseconds, exactly; starts may be negative where a timeline has its own origin."""
    microseconds, rest = divmod(abs(nanoseconds), 1000)
    return b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", microseconds, rest)


def _flows(layout: _TraceLayout) -> Iterator[bytes]:
    """Yield an arrow from each row that sends or launches to the start of the row that waits for it."""
    timeline, places = layout.timeline, layout.places
    senders, waiters = timeline.flows[:, 0], timeline.flows[:, 1]
    # Viewers bind an arrow to the slice that encloses its point: stay inside both.
    arrive_ns = layout.start_ns[waiters] + (layout.end_ns > layout.start_ns + 1)[waiters]
    leave_ns = np.maximum(layout.start_ns[senders], np.minimum(layout.end_ns[senders] - 1, arrive_ns))
    threads_of = layout.thread_of
    columns = (timeline.kind_of[senders], threads_of[senders], threads_of[waiters], leave_ns, arrive_ns)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (kind, source, target, leave, arrive) in enumerate(rows, 1):
        word = b'"launch"' if kind == SpanKind.HOST else b'"message"'
        head = b'"name":%b,"cat":%b,"id":%d' % (word, word, number)
        yield b'{"ph":"s",%b,%b,"ts":%b}' % (head, places[source], _us(leave))
        yield b'{"ph":"f","bp":"e",%b,%b,"ts":%b}' % (head, places[target], _us(arrive))


def _work_args(work: Work) -> dict[str, object]:
    if isinstance(work, Collective):
        times = {"times": work.times} if work.times > 1 else {}
        return {"collective": work.kind, "group": work.group, "bytes": work.size_bytes, **times}
    if isinstance(work, Transfer):
        return {"transfer": work.direction, "group": work.group, "bytes": work.size_bytes}
    return {"work": type(work).__name__}
