"""One rank of a profiler trace: its marked steps, and how long its GPU computed, communicated and idled.

The profiler marks what the host did in a step. The host runs ahead of its GPU, so a kernel belongs to the step in
which it was launched, and a step lasts until the last of its kernels has ended. The window is all marked steps, or
without marks the time from the first work on the GPU to the last.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec
import numpy as np

from stepcast.analyze.intervals import Intervals, union_of
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.types import group_by_key
from stepcast.ir.work import Collective, Transfer

Window = tuple[float, float]
GroupTimes = dict[str, tuple[float, float]]
"""All and the exposed seconds of communication, by group."""

STEPS = "steps"
LOADING = "enumerate(DataLoader)"  # how PyTorch marks the time in which a loop waits for its next batch
# Between two kernels of a full queue a GPU rests a microsecond or two; a longer rest waits for something.
QUEUE_GAP_S = 10e-6


def is_stream(lane_name: str) -> bool:
    """Return True for streams, but not for their annotations, which repeat their work."""
    return "stream " in lane_name and not lane_name.startswith("annotations")


class RankLanes:
    """The rows of each lane, sorted once for all ranks, and the steps of those ranks that mark them."""

    def __init__(self, timeline: Timeline, steps: Mapping[int, Intervals] | None = None) -> None:
        self.timeline, self.steps = timeline, steps or {}
        order = np.argsort(timeline.lane_of, kind="stable")
        bounds = np.searchsorted(timeline.lane_of[order], np.arange(len(timeline.lanes) + 1))
        self.rows: list[IntArray] = [order[start:stop] for start, stop in pairwise(bounds.tolist())]
        calls, rows = timeline.flows[:, 0], timeline.flows[:, 1]
        self.calls = np.full(len(timeline), NONE, np.int64)
        self.calls[rows] = calls
        self.launch_s = np.full(len(timeline), np.nan)  # of each row; NaN if the trace does not say
        host = timeline.kind_of[calls] == SpanKind.HOST
        self.launch_s[rows[host]] = timeline.start_s[calls[host]]
        groups = [str(work.group) if isinstance(work, Collective | Transfer) else "" for work in timeline.works]
        self.groups = tuple(dict.fromkeys(groups))
        self.group_of_work = np.array([self.groups.index(name) for name in groups] + [-1], np.int64)
        self.of_rank = group_by_key((lane.rank, index) for index, lane in enumerate(timeline.lanes))

    def streams(self, rank: int) -> list[int]:
        return [lane for lane in self.of_rank.get(rank, []) if is_stream(self.timeline.lanes[lane].name)]

    def threads(self, rank: int) -> list[int]:
        return [lane for lane in self.of_rank.get(rank, []) if self.timeline.lanes[lane].name.startswith("cpu thread")]

    def rows_on(self, lanes: Iterable[int]) -> IntArray:
        return np.concatenate([np.zeros(0, np.int64), *(self.rows[lane] for lane in lanes)])

    def loading(self, rank: int) -> Intervals:
        """Return when the host of a rank waited for its next batch."""
        timeline = self.timeline
        is_loading = np.array([name.startswith(LOADING) for name in timeline.names], dtype=bool)
        rows = self.rows_on(self.threads(rank))
        rows = rows[is_loading[timeline.name_of[rows]]]
        return union_of(timeline.start_s[rows], timeline.end_s[rows])


def marked_lanes(timeline: Timeline) -> RankLanes:
    """Return the lanes without rows that no marked step launched."""
    lanes, in_steps = RankLanes(timeline), np.ones(len(timeline), dtype=bool)
    steps = {rank: _steps_of_rank(lanes, rank, in_steps) for rank in timeline.ranks}
    return RankLanes(timeline.only(in_steps), {rank: marked for rank, marked in steps.items() if marked})


def _steps_of_rank(lanes: RankLanes, rank: int, in_steps: BoolArray) -> Intervals | None:
    """Return the steps whose host's part is marked, if any; clear *in_steps* for rows of the rank outside them."""
    timeline = lanes.timeline
    named = [(timeline.lanes[lane].name, lanes.rows[lane]) for lane in lanes.of_rank[rank]]
    marks = np.concatenate([np.zeros(0, np.int64), *(rows for name, rows in named if name == STEPS)])
    if not len(marks):
        return None
    marks = marks[np.argsort(timeline.start_s[marks], kind="stable")]
    first_s, last_s = timeline.start_s[marks], timeline.end_s[marks]
    start_s, end_s = first_s.copy(), last_s.copy()
    streams: list[tuple[IntArray, FloatArray]] = []
    for name, rows in named:
        if name == STEPS or not len(rows):
            continue
        when_s = _stream_launches(timeline, rows, lanes.launch_s) if is_stream(name) else timeline.start_s[rows]
        step = np.searchsorted(first_s, when_s, side="right").astype(np.int32) - 1
        in_steps[rows] = inside = (step >= 0) & (when_s <= last_s[step])
        if is_stream(name):
            streams.append((rows, when_s))
        if is_stream(name) or name.startswith("cpu thread"):
            np.maximum.at(end_s, step[inside], timeline.end_s[rows[inside]])

    # The first step begins when the busiest stream had run what was launched before the first mark.
    if streams:
        rows, when_s = max(streams, key=lambda stream: float(timeline.duration_s[stream[0][in_steps[stream[0]]]].sum()))
        earlier, own = rows[when_s < first_s[0]], rows[in_steps[rows]]
        if len(earlier) and len(own):
            start_s[0] = max(first_s[0], min(timeline.end_s[earlier].max(), timeline.start_s[own].min()))
    end_s = np.maximum.accumulate(np.maximum(start_s, end_s))
    start_s[1:] = np.maximum(start_s[1:], end_s[:-1])
    return Intervals(start_s, end_s)


def _stream_launches(timeline: Timeline, rows: IntArray, launched_s: FloatArray) -> FloatArray:
    """Return when the host launched each row of one stream.

    A stream runs in the order of its launches: a row of unknown launch goes with the one before it, and those before
    the first known one were launched before the trace began. If none is known, a row counts when it starts.
    """
    order = np.argsort(timeline.start_s[rows], kind="stable")
    ordered_s = launched_s[rows[order]]
    known = ~np.isnan(ordered_s)
    if not known.any():
        return timeline.start_s[rows]
    before = np.maximum.accumulate(np.where(known, np.arange(len(rows)), NONE))
    when_s = np.empty(len(rows))
    when_s[order] = np.where(before == NONE, -np.inf, ordered_s[before])
    return when_s


class StreamTime(msgspec.Struct, frozen=True):
    """One GPU stream of a rank, in seconds; no computation covers exposed communication."""

    name: str
    spans: int
    busy_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    copy_s: float


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. The breakdown sums to the window: compute, exposed communication and copies, idle time by cause.

    A GPU is idle because the host had launched nothing (while it waited for the next batch: data loading; otherwise:
    host), for short rests between queued kernels, or because queued work was held back by an event, another stream or
    another rank (dependency).
    """

    rank: int
    step_s: float
    steps: int
    window_s: float
    busy_s: float
    idle_s: float
    breakdown_s: dict[str, float]
    communication_s: float
    overlapped_communication_s: float
    copy_s: float
    wait_s: float | None  # in matched collectives
    transfer_s: float | None  # in matched collectives
    launches_per_step: int
    launch_lag_s: float | None  # median from a launch to the start of its work; None if unknown
    launch_bound_share: float
    streams: list[StreamTime]

    @property
    def compute_s(self) -> float:
        return self.breakdown_s["compute"]

    @property
    def exposed_communication_s(self) -> float:
        return self.breakdown_s["exposed communication"]

    @property
    def host_idle_s(self) -> float:
        return self.breakdown_s["idle: host"]

    @property
    def loading_s(self) -> float:
        return self.breakdown_s["idle: data loading"]

    @property
    def own_s(self) -> float:
        """The time in which other ranks wait for this one: its GPU computes or its host has launched nothing."""
        return self.compute_s + self.host_idle_s + self.loading_s

    def per_step(self, seconds: float) -> float:
        return seconds / max(self.steps, 1)


def rank_time(
    lanes: RankLanes, rank: int, wait_s: float | None = None, transfer_s: float | None = None
) -> tuple[RankTime, GroupTimes] | None:
    """Return the times of a rank and of its communication by group; None without any work."""
    timeline, steps = lanes.timeline, lanes.steps.get(rank)
    streams = lanes.streams(rank)
    working = streams or lanes.threads(rank)
    rows = lanes.rows_on(working)
    if not len(rows) and not (working and steps):
        return None
    starts_s, ends_s = (steps.start_s, steps.end_s) if steps else (timeline.start_s[rows], timeline.end_s[rows])
    window = float(starts_s.min()), float(ends_s.max())
    compute, communication, copies = _busy_times(timeline, rows, not streams, window)
    exposed_s = communication.without(compute).length_s
    paired = rows[~np.isnan(lanes.launch_s[rows])]
    queued_s, launched_s = timeline.start_s[paired], lanes.launch_s[paired]
    lags_s = np.sort(np.maximum(queued_s - launched_s, 0.0))  # np.median would import numpy.ma
    gaps = compute.union(communication).union(copies).gaps(*window)
    starved, queue_s, dependency_s = (
        _idle_times(gaps, np.sort(queued_s), np.sort(launched_s)) if streams else (gaps, 0.0, 0.0)
    )
    loading_s = starved.intersection(lanes.loading(rank)).length_s
    host_s, idle_s = starved.length_s - loading_s, gaps.length_s
    window_s = window[1] - window[0]
    time = RankTime(
        rank=rank,
        step_s=float(np.mean(steps.durations_s)) if steps else window_s,
        steps=len(steps) if steps else 0,
        window_s=window_s,
        busy_s=window_s - idle_s,
        idle_s=idle_s,
        breakdown_s={
            "compute": compute.length_s,
            "exposed communication": exposed_s,
            "exposed copies": copies.without(compute.union(communication)).length_s,
            "idle: data loading": loading_s,
            "idle: host": host_s,
            "idle: between kernels": queue_s,
            "idle: dependency": dependency_s,
        },
        communication_s=communication.length_s,
        overlapped_communication_s=communication.length_s - exposed_s,
        copy_s=copies.length_s,
        wait_s=wait_s,
        transfer_s=transfer_s,
        launches_per_step=int(np.count_nonzero(np.bincount(lanes.calls[paired]))) // (len(steps) if steps else 1),
        launch_lag_s=float(lags_s[[(len(lags_s) - 1) // 2, len(lags_s) // 2]].mean()) if len(paired) else None,
        launch_bound_share=host_s / window_s if window_s else 0.0,
        streams=[_stream_time(lanes, lane, compute, window) for lane in streams],
    )
    return time, _group_times(lanes, rows, compute, window)


def _busy_times(timeline: Timeline, rows: IntArray, on_host: bool, window: Window) -> tuple[Intervals, ...]:
    """Return the times of computation, communication and copies within the window."""
    kind = timeline.kind_of[rows]
    kinds = (SpanKind.HOST if on_host else SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.COPY)
    return tuple(_union_rows(timeline, rows[kind == number], window) for number in kinds)


def _union_rows(timeline: Timeline, rows: IntArray, window: Window) -> Intervals:
    return union_of(np.clip(timeline.start_s[rows], *window), np.clip(timeline.end_s[rows], *window))


def _stream_time(lanes: RankLanes, lane: int, rank_compute: Intervals, window: Window) -> StreamTime:
    rows = lanes.rows[lane]
    compute, communication, copies = _busy_times(lanes.timeline, rows, False, window)
    return StreamTime(
        name=lanes.timeline.lanes[lane].name,
        spans=len(rows),
        busy_s=compute.union(communication).union(copies).length_s,
        compute_s=compute.length_s,
        communication_s=communication.length_s,
        exposed_communication_s=communication.without(rank_compute).length_s,
        copy_s=copies.length_s,
    )


def _group_times(lanes: RankLanes, rows: IntArray, compute: Intervals, window: Window) -> GroupTimes:
    """Return the communication by group, as far as the trace names groups."""
    group_of = lanes.group_of_work[lanes.timeline.work_of[rows]]
    groups = ((name, rows[group_of == number]) for number, name in enumerate(lanes.groups) if name)
    covered = {name: _union_rows(lanes.timeline, own, window) for name, own in groups}
    return {name: (busy.length_s, busy.without(compute).length_s) for name, busy in covered.items() if len(busy)}


def _idle_times(gaps: Intervals, queued: FloatArray, launched: FloatArray) -> tuple[Intervals, float, float]:
    """Return the gaps for which the host is the cause, and the seconds of the others: queue, dependency.

    A gap is the host's if every launch before it has started to run by then.
    """
    lengths = gaps.durations_s
    short = lengths < QUEUE_GAP_S
    issued = np.searchsorted(launched, gaps.start_s, side="right")
    starved = (issued - np.searchsorted(queued, gaps.start_s, side="right") <= 0) & (len(launched) > 0)
    queue_s, dependency_s = (float(lengths[~starved & cause].sum()) for cause in (short, ~short))
    return Intervals(gaps.start_s[starved], gaps.end_s[starved]), queue_s, dependency_s
