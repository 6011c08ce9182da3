"""One rank of a profiler trace: what its GPU did, hid and waited for.

Times are of the whole window: the marked steps, each until its last kernel has ended, or where no step is
marked, from the first work on the GPU to the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepcast.analyze.intervals import Intervals, union_of
from stepcast.ir.arrays import FloatArray, Int32Array, IntArray
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.work import Collective, Transfer

# The marked steps of each rank: which rows belong to them, and when each began and ended.
#
# The profiler marks what the host did in a step. The host runs ahead of its GPU, so a kernel belongs to the
# step in which it was launched, whenever it runs, and a step lasts until the last of its kernels has ended.

STREAM = "stream "
STEPS = "steps"


def is_stream(lane_name: str) -> bool:
    """Annotations of streams repeat their work and are none."""
    return STREAM in lane_name and not lane_name.startswith("annotations")


@dataclass(frozen=True, slots=True)
class MarkedSteps:
    """When the steps of one rank began and ended, in order; they do not overlap."""

    start_s: FloatArray
    end_s: FloatArray

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.end_s - self.start_s))


def marked_steps(timeline: Timeline) -> tuple[Timeline, Mapping[int, MarkedSteps]]:
    """The timeline without what no marked step launched, and the steps of each rank that marks any."""
    order = np.argsort(timeline.lane_of, kind="stable")
    bounds = np.searchsorted(timeline.lane_of[order], np.arange(len(timeline.lanes) + 1))
    lanes_of: dict[int, list[tuple[str, IntArray]]] = {}
    for at, lane in enumerate(timeline.lanes):
        rows = order[bounds[at] : bounds[at + 1]]
        lanes_of.setdefault(lane.rank, []).append((lane.name, rows))
    called_s = launch_s(timeline)
    kept = np.ones(len(timeline), dtype=bool)
    found = {}
    for rank, lanes in lanes_of.items():
        marks = [rows for name, rows in lanes if name == STEPS and len(rows)]
        if marks:
            found[rank] = _of_rank(timeline, np.concatenate(marks), lanes, called_s, kept)
    return timeline.only(kept), found


def launch_s(timeline: Timeline) -> FloatArray:
    """When each row was launched; not a number where the trace does not tell."""
    found = np.full(len(timeline), np.nan)
    calls, rows = timeline.flows[:, 0], timeline.flows[:, 1]
    host = timeline.kind_of[calls] == SpanKind.HOST
    found[rows[host]] = timeline.start_s[calls[host]]
    return found


def _of_rank(
    timeline: Timeline,
    marks: IntArray,
    lanes: list[tuple[str, IntArray]],
    called_s: FloatArray,
    kept: npt.NDArray[np.bool_],
) -> MarkedSteps:
    """The steps that *marks* are the host's part of; *kept* loses the rows of *lanes* outside them."""
    marks = marks[np.argsort(timeline.start_s[marks], kind="stable")]
    first_s, last_s = timeline.start_s[marks], timeline.end_s[marks]
    until_s = last_s.copy()
    streams: list[tuple[IntArray, FloatArray]] = []
    for name, rows in lanes:
        if name == STEPS:
            continue
        when_s = _when(timeline, rows, called_s) if is_stream(name) else timeline.start_s[rows]
        step = _step_at(when_s, first_s, last_s)
        kept[rows] = inside = step != NONE
        if is_stream(name):
            streams.append((rows, when_s))
        if is_stream(name) or name.startswith("cpu thread"):
            np.maximum.at(until_s, step[inside], timeline.end_s[rows[inside]])
    start_s, end_s = first_s.copy(), until_s
    start_s[0] = max(first_s[0], _backlog_s(timeline, streams, kept, float(first_s[0])))
    for at in range(len(marks)):
        if at:
            start_s[at] = max(start_s[at], end_s[at - 1])
        end_s[at] = max(end_s[at], start_s[at])
    return MarkedSteps(start_s, end_s)


def _when(timeline: Timeline, rows: IntArray, called_s: FloatArray) -> FloatArray:
    """When the host launched each row of one stream.

    A stream runs in the order of its launches: a row of unknown launch goes with the one before it, and
    those before the first known one were launched before the trace began. Where none is known, a row counts
    when it starts.
    """
    order = np.argsort(timeline.start_s[rows], kind="stable")
    launched_s = called_s[rows[order]]
    known = ~np.isnan(launched_s)
    if not known.any():
        return timeline.start_s[rows]
    before = np.maximum.accumulate(np.where(known, np.arange(len(rows)), NONE))
    when_s = np.empty(len(rows))
    when_s[order] = np.where(before == NONE, -np.inf, launched_s[before])
    return when_s


def _step_at(when_s: FloatArray, first_s: FloatArray, last_s: FloatArray) -> Int32Array:
    step = np.searchsorted(first_s, when_s, side="right").astype(np.int32) - 1
    outside = (step < 0) | (when_s > last_s[step])
    return np.where(outside, np.int32(NONE), step)


def _backlog_s(
    timeline: Timeline, streams: list[tuple[IntArray, FloatArray]], kept: npt.NDArray[np.bool_], first_s: float
) -> float:
    """When the busiest stream had run what was launched before the first mark: the step begins no sooner."""
    if not streams:
        return first_s
    rows, when_s = max(streams, key=lambda one: float(timeline.duration_s[one[0][kept[one[0]]]].sum()))
    earlier, own = rows[when_s < first_s], rows[kept[rows]]
    if not len(earlier) or not len(own):
        return first_s
    return float(min(timeline.end_s[earlier].max(), timeline.start_s[own].min()))


# Between two kernels of a full queue a GPU rests a microsecond or two; a longer rest waits for something.
QUEUE_GAP_S = 10e-6


@dataclass(frozen=True, slots=True)
class StreamTime:
    """One GPU stream of a rank, seconds: exposed communication is what no computation covers."""

    name: str
    spans: int
    busy_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    copy_s: float


@dataclass(frozen=True, slots=True)
class GroupTime:
    """Communication of one family of groups (tp, dp, ...), seconds."""

    total_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Time in which no stream ran anything, by what it waited for."""

    host_s: float  # nothing was queued: the host had not launched it yet
    queue_s: float  # short rests between queued kernels
    dependency_s: float  # queued, but held back: an event, another stream, another rank

    @property
    def total_s(self) -> float:
        return self.host_s + self.queue_s + self.dependency_s


@dataclass(frozen=True, slots=True)
class RankTime:
    """*window_s* is compute + exposed communication + exposed copies + idle, to the last digit."""

    rank: int
    window_s: float
    steps: int
    step_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    copy_s: float
    exposed_copy_s: float
    idle: Idle
    streams: tuple[StreamTime, ...]
    groups: dict[str, GroupTime]
    launches: int
    launch_lag_s: float | None  # from a launch to the start of its work, median; None where it cannot be told
    on_host: bool  # no GPU in the trace: operators and collectives of CPU threads

    @property
    def busy_s(self) -> float:
        return self.window_s - self.idle.total_s

    @property
    def overlapped_communication_s(self) -> float:
        return self.communication_s - self.exposed_communication_s

    @property
    def launch_bound_share(self) -> float:
        return self.idle.host_s / self.window_s if self.window_s else 0.0


class RankLanes:
    """The rows of each lane, found once for all ranks."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        order = np.argsort(timeline.lane_of, kind="stable")
        bounds = np.searchsorted(timeline.lane_of[order], np.arange(len(timeline.lanes) + 1))
        self._order, self._bounds = order, bounds
        self.launch_s = launch_s(timeline)
        self.calls = np.full(len(timeline), -1, np.int64)
        self.calls[timeline.flows[:, 1]] = timeline.flows[:, 0]
        families = [str(work.group) if isinstance(work, Collective | Transfer) else "" for work in timeline.works]
        self.families = tuple(dict.fromkeys(families))
        self.family_of_work = np.array([self.families.index(name) for name in families] + [-1], np.int64)
        self._of_rank: dict[int, list[int]] = {}
        for index, lane in enumerate(timeline.lanes):
            self._of_rank.setdefault(lane.rank, []).append(index)

    def rows(self, lane: int) -> IntArray:
        return self._order[self._bounds[lane] : self._bounds[lane + 1]]

    def of_rank(self, rank: int) -> list[int]:
        return self._of_rank.get(rank, [])

    def streams(self, rank: int) -> list[int]:
        return [lane for lane in self.of_rank(rank) if is_stream(self.timeline.lanes[lane].name)]

    def threads(self, rank: int) -> list[int]:
        return [lane for lane in self.of_rank(rank) if self.timeline.lanes[lane].name.startswith("cpu thread")]


def rank_time(lanes: RankLanes, rank: int, steps: MarkedSteps | None) -> RankTime | None:
    """None for a rank without any work."""
    timeline = lanes.timeline
    streams = lanes.streams(rank)
    working = streams or lanes.threads(rank)
    rows = np.concatenate([np.zeros(0, np.int64), *(lanes.rows(lane) for lane in working)])
    if not len(rows) and not (working and steps):
        return None
    start_s, end_s = _window(timeline, rows, steps)
    sets = _sets(timeline, rows, not streams, start_s, end_s)
    compute, communication, copies = sets
    busy = compute.union(communication).union(copies)
    exposed = communication.without(compute)
    exposed_copies = copies.without(compute.union(communication))
    paired = rows[~np.isnan(lanes.launch_s[rows])]
    queued_s, launched_s = timeline.start_s[paired], lanes.launch_s[paired]
    idle = _idle(busy.gaps(start_s, end_s), np.sort(queued_s), np.sort(launched_s))
    window_s = end_s - start_s
    return RankTime(
        rank=rank,
        window_s=window_s,
        steps=len(steps) if steps else 0,
        step_s=steps.mean_s if steps else window_s,
        compute_s=compute.length_s,
        communication_s=communication.length_s,
        exposed_communication_s=exposed.length_s,
        copy_s=copies.length_s,
        exposed_copy_s=exposed_copies.length_s,
        idle=idle if streams else Idle(idle.total_s, 0.0, 0.0),
        streams=tuple(_stream(timeline, lanes, lane, compute, start_s, end_s) for lane in streams),
        groups=_groups(lanes, rows, compute, start_s, end_s),
        launches=len(np.unique(lanes.calls[paired])) // (len(steps) if steps else 1),
        launch_lag_s=float(np.median(np.maximum(queued_s - launched_s, 0.0))) if len(paired) else None,
        on_host=not streams,
    )


def _window(timeline: Timeline, rows: IntArray, steps: MarkedSteps | None) -> tuple[float, float]:
    if steps:
        return float(steps.start_s[0]), float(steps.end_s[-1])
    return float(timeline.start_s[rows].min()), float(timeline.end_s[rows].max())


def _sets(
    timeline: Timeline, rows: IntArray, on_host: bool, start_s: float, end_s: float
) -> tuple[Intervals, Intervals, Intervals]:
    """Times of computation, communication and copies within the window."""
    kind = timeline.kind_of[rows]
    compute = kind == (SpanKind.HOST if on_host else SpanKind.COMPUTE)
    return (
        _union(timeline, rows[compute], start_s, end_s),
        _union(timeline, rows[kind == SpanKind.COMMUNICATION], start_s, end_s),
        _union(timeline, rows[kind == SpanKind.COPY], start_s, end_s),
    )


def _union(timeline: Timeline, rows: IntArray, start_s: float, end_s: float) -> Intervals:
    starts, ends = timeline.start_s[rows], timeline.end_s[rows]
    return union_of(np.clip(starts, start_s, end_s), np.clip(ends, start_s, end_s))


def _stream(
    timeline: Timeline, lanes: RankLanes, lane: int, compute: Intervals, start_s: float, end_s: float
) -> StreamTime:
    rows = lanes.rows(lane)
    own, communication, copies = _sets(timeline, rows, False, start_s, end_s)
    return StreamTime(
        name=timeline.lanes[lane].name,
        spans=len(rows),
        busy_s=own.union(communication).union(copies).length_s,
        compute_s=own.length_s,
        communication_s=communication.length_s,
        exposed_communication_s=communication.without(compute).length_s,
        copy_s=copies.length_s,
    )


def _groups(lanes: RankLanes, rows: IntArray, compute: Intervals, start_s: float, end_s: float) -> dict[str, GroupTime]:
    """By family, as far as the trace says what its communication is for."""
    timeline = lanes.timeline
    family = lanes.family_of_work[timeline.work_of[rows]]
    found = {}
    for number, name in enumerate(lanes.families):
        times = _union(timeline, rows[family == number], start_s, end_s)
        if name and len(times):
            found[name] = GroupTime(times.length_s, times.without(compute).length_s)
    return found


def _idle(gaps: Intervals, queued: FloatArray, launched: FloatArray) -> Idle:
    """A gap is the host's where every launch made before it began has also been run by then."""
    lengths = gaps.durations_s
    short = lengths < QUEUE_GAP_S
    if not len(launched):
        return Idle(0.0, float(lengths[short].sum()), float(lengths[~short].sum()))
    waiting = np.searchsorted(launched, gaps.start_s, side="right") - np.searchsorted(
        queued, gaps.start_s, side="right"
    )
    starved = waiting <= 0
    return Idle(
        host_s=float(lengths[starved].sum()),
        queue_s=float(lengths[~starved & short].sum()),
        dependency_s=float(lengths[~starved & ~short].sum()),
    )


def class_times(lanes: RankLanes, rank: int, class_of: Sequence[int], classes: int) -> FloatArray:
    """Summed kernel time of each class on one rank; *class_of* by name."""
    timeline = lanes.timeline
    table: Int32Array = np.asarray(class_of, dtype=np.int32)
    total: FloatArray = np.zeros(classes)
    for lane in lanes.streams(rank):
        rows = lanes.rows(lane)
        rows = rows[timeline.kind_of[rows] == SpanKind.COMPUTE]
        total += np.bincount(table[timeline.name_of[rows]], weights=timeline.duration_s[rows], minlength=classes)
    return total
