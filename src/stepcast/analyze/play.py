"""A Recording run again: its pieces and meetings as a Program of the simulator."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stepcast.analyze.recording import COMMUNICATION, Join, Local, Piece, Recording, TimePart
from stepcast.ir.arrays import FloatArray
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.program import Program, ProgramBuilder, Times
from stepcast.simulation.segments import NO_LANE, Segment, TimedOp
from stepcast.simulation.timeline import CriticalPath, critical_path

ALONE = ("gap", "start")
"""What the host does between operations is told apart from them."""


@dataclass(frozen=True, eq=False)
class Played:
    """When every piece of every rank started and ended, and every meeting took place.

    ``start_s`` and ``end_s`` hold one array per rank, in the order of the recording. For a Join the start is
    its arrival.
    """

    recording: Recording
    start_s: tuple[FloatArray, ...]
    end_s: tuple[FloatArray, ...]
    meeting_start_s: FloatArray
    meeting_end_s: FloatArray
    step_s: float


def measured(recording: Recording) -> Played:
    """The times as they were measured."""
    starts, ends = [], []
    origin_s = min(piece.start_s for record in recording.ranks for piece in record.pieces())
    for record in recording.ranks:
        pieces = list(record.pieces())
        starts.append(np.array([piece.start_s - origin_s for piece in pieces]))
        ends.append(np.array([_end_s(piece) - origin_s for piece in pieces]))
    return Played(
        recording,
        tuple(starts),
        tuple(ends),
        np.array([meeting.start_s - origin_s for meeting in recording.meetings]),
        np.array([meeting.end_s - origin_s for meeting in recording.meetings]),
        recording.measured_step_s,
    )


def _end_s(piece: Piece) -> float:
    return piece.end_s if isinstance(piece, Join) else piece.start_s + piece.duration_s


@dataclass
class _Call:
    """Ops up to the next arrival, the meetings waited for, and the piece of each op."""

    ops: list[TimedOp] = field(default_factory=list)
    waits: tuple[int, ...] = ()
    piece_of_op: list[int] = field(default_factory=list)


@dataclass
class Script:
    """The program of a recording, and which piece or meeting each of its tasks is."""

    recording: Recording
    program: Program
    piece_of_task: np.ndarray
    """Index of the piece within its rank, -1 for a meeting."""
    meeting_of_rank: tuple[int, ...]
    """The meeting that each rank of the program after the real ones plays."""

    @property
    def real_ranks(self) -> int:
        return len(self.recording.ranks)


def script_of(recording: Recording) -> Script:
    """One lane per rank; a meeting is a rank of its own that waits for its members."""
    calls = [_calls(list(record.pieces())) for record in recording.ranks]
    arrivals: dict[int, list[tuple[int, int]]] = {}
    for rank, record in enumerate(recording.ranks):
        joins = [piece for piece in record.pieces() if isinstance(piece, Join)]
        for number, join in enumerate(joins):
            for meeting in join.meetings:
                arrivals.setdefault(meeting, []).append((rank, number))
    held = sorted(arrivals)
    builder = ProgramBuilder(("rank",), len(calls) + len(held))
    numbers = [[builder.call(rank, _segment(one)) for one in listed] for rank, listed in enumerate(calls)]
    segments: dict[tuple[float, int], Segment] = {}
    call_of_meeting = {}
    for at, meeting in enumerate(held):
        came = arrivals[meeting]
        duration_s = recording.meetings[meeting].transfer_s
        segment = segments.setdefault((duration_s, len(came)), _meeting_segment(duration_s, len(came)))
        sources = [(numbers[rank][number], 0) for rank, number in came]
        call_of_meeting[meeting] = builder.call(len(calls) + at, segment, sources)
    for rank, listed in enumerate(calls):
        for number, one in enumerate(listed):
            for port, meeting in enumerate(one.waits):
                builder.bind(numbers[rank][number], port, (call_of_meeting[meeting], 0))
    pieces = [piece for listed in calls for one in listed for piece in one.piece_of_op]
    return Script(recording, builder.program(), np.array([*pieces, *([-1] * len(held))], np.int64), tuple(held))


def _calls(pieces: list[Piece]) -> list[_Call]:
    """A new call begins after each arrival, so that the arrival is an output."""
    calls = [_Call()]
    for index, piece in enumerate(pieces):
        here = calls[-1]
        if isinstance(piece, Local):
            here.ops.append(TimedOp(piece.operation, piece.duration_s))
            here.piece_of_op.append(index)
            continue
        if not here.ops:
            here.ops.append(TimedOp("arrive", 0.0))
            here.piece_of_op.append(index)
        after = _Call(waits=piece.waits)
        if piece.own_s:
            after.ops.append(TimedOp(piece.operation, piece.own_s))
            after.piece_of_op.append(index)
        after.ops.append(TimedOp(piece.operation, piece.tail_s, inputs=tuple(range(len(piece.waits)))))
        after.piece_of_op.append(index)
        calls.append(after)
    return calls


def _segment(call: _Call) -> Segment:
    ops = call.ops or [TimedOp("end", 0.0)]
    if not call.ops:
        call.piece_of_op.append(-1)
    return Segment.of("rank", ops, lanes=1, inputs=len(call.waits), outputs=(len(ops) - 1,))


def _meeting_segment(duration_s: float, members: int) -> Segment:
    op = TimedOp("meeting", duration_s, NO_LANE, inputs=tuple(range(members)))
    return Segment.of("meeting", (op,), lanes=1, inputs=members, outputs=(0,))


def play(recording: Recording) -> Played:
    """Simulate *recording*."""
    script = script_of(recording)
    return played(script, task_times(simulate(script.program)))


def played(script: Script, times: Times) -> Played:
    """What *times* of the tasks of *script* mean for its recording."""
    recording, program = script.recording, script.program
    rank_of_task = program.rank[program.task_calls()]
    starts, ends = [], []
    for rank, record in enumerate(recording.ranks):
        tasks = np.flatnonzero((rank_of_task == rank) & (script.piece_of_task >= 0))
        count = sum(1 for _ in record.pieces())
        start_s, end_s = np.full(count, np.inf), np.zeros(count)
        pieces = script.piece_of_task[tasks]
        np.minimum.at(start_s, pieces, times.start_s[tasks])
        np.maximum.at(end_s, pieces, times.end_s[tasks])
        # A join without work of its own starts where the piece before it ended.
        for index, piece in enumerate(record.pieces()):
            if isinstance(piece, Join) and index and not piece.own_s:
                start_s[index] = end_s[index - 1]
        starts.append(start_s)
        ends.append(end_s)
    meeting_start_s = np.zeros(len(recording.meetings))
    meeting_end_s = np.zeros(len(recording.meetings))
    tasks = np.flatnonzero(rank_of_task >= script.real_ranks)
    held = np.array(script.meeting_of_rank, np.int64)
    meeting_start_s[held] = times.start_s[tasks]
    meeting_end_s[held] = times.end_s[tasks]
    return Played(recording, tuple(starts), tuple(ends), meeting_start_s, meeting_end_s, times.makespan_s)


@dataclass(frozen=True, slots=True)
class PathStep:
    """A stretch of the critical path: one operation of one rank, or one meeting between ranks."""

    ranks: tuple[int, ...]
    operation: str
    micro_batch: int
    start_s: float
    duration_s: float


def critical_steps(recording: Recording) -> tuple[PathStep, ...]:
    """The chain of work and transfers that decides the step, neighbours of one operation joined."""
    script = script_of(recording)
    run = simulate(script.program)
    path = critical_path(script.program, task_times(run))
    stage_of = {record.rank: record.stage for record in recording.ranks}
    return tuple(_joined(_path_steps(script, path), stage_of))


def _path_steps(script: Script, path: CriticalPath) -> list[PathStep]:
    recording, program = script.recording, script.program
    pieces = [list(record.pieces()) for record in recording.ranks]
    steps = []
    for call, op, start_s, end_s in zip(path.call, path.op, path.start_s, path.end_s, strict=True):
        rank = int(program.rank[call])
        if rank >= script.real_ranks:
            meeting = recording.meetings[script.meeting_of_rank[rank - script.real_ranks]]
            name = f"{meeting.group} {meeting.name}"
            steps.append(PathStep(meeting.members, name, -1, float(start_s), float(end_s - start_s)))
            continue
        index = int(script.piece_of_task[program.task_start[call] + op])
        if index >= 0:
            piece = pieces[rank][index]
            ranks = (recording.ranks[rank].rank,)
            steps.append(PathStep(ranks, piece.operation, piece.micro_batch, float(start_s), float(end_s - start_s)))
    return steps


def _joined(steps: list[PathStep], stage_of: dict[int, int]) -> list[PathStep]:
    """Neighbours of one operation of one stage as one; collectives between them belong to it."""
    joined: list[PathStep] = []
    for step in steps:
        if step.duration_s <= 0:
            continue
        last = joined[-1] if joined else None
        stages = {stage_of[rank] for rank in step.ranks}
        within = len(step.ranks) > 1 and len(stages) == 1
        if (
            last is not None
            and {stage_of[rank] for rank in last.ranks} == stages
            and (within or (last.operation, last.micro_batch) == (step.operation, step.micro_batch))
            and last.operation not in ALONE
        ):
            ranks = tuple(sorted({*last.ranks, *step.ranks}))
            duration_s = last.duration_s + step.duration_s
            joined[-1] = PathStep(ranks, last.operation, last.micro_batch, last.start_s, duration_s)
        else:
            joined.append(step)
    return joined


# A played step as a Timeline: work, waits and transfers on one lane per rank.


def timeline_of(labelled: Mapping[str, Played]) -> Timeline:
    """One lane per rank and label, so that two runs lie beside each other."""
    builder = TimelineBuilder()
    for label, played in labelled.items():
        _add(builder, played, label)
    first = next(iter(labelled.values()))
    stages = {record.rank: record.stage for one in labelled.values() for record in one.recording.ranks}
    return builder.build(measured=False, layout=first.recording.layout, stage_of_rank=stages, facts={}, rebase=False)


def _add(builder: TimelineBuilder, played: Played, label: str) -> None:
    for number, record in enumerate(played.recording.ranks):
        lane = builder.lane(record.rank, label)
        starts, ends = played.start_s[number].tolist(), played.end_s[number].tolist()
        cursor_s = 0.0
        for piece, start_s, end_s in zip(record.pieces(), starts, ends, strict=True):
            start_s = max(start_s, cursor_s)
            if isinstance(piece, Local):
                _span(builder, lane, piece.role, piece.micro_batch, (start_s, end_s), _kind(piece.part))
            else:
                _add_join(builder, lane, played, piece, (start_s, end_s))
            cursor_s = max(cursor_s, end_s)


def _add_join(builder: TimelineBuilder, lane: int, played: Played, join: Join, span_s: tuple[float, float]) -> None:
    start_s, end_s = span_s
    free_s = min(start_s + join.own_s, end_s)
    came_s = max((float(played.meeting_start_s[at]) for at in join.waits), default=free_s)
    came_s = min(max(came_s, free_s), end_s)
    _span(builder, lane, join.role, join.micro_batch, (start_s, free_s), SpanKind.COMPUTE)
    _span(builder, lane, f"wait: {join.role}", join.micro_batch, (free_s, came_s), SpanKind.OTHER)
    _span(builder, lane, join.role, join.micro_batch, (came_s, end_s), SpanKind.COMMUNICATION)


def _span(
    builder: TimelineBuilder, lane: int, name: str, micro_batch: int, span_s: tuple[float, float], kind: SpanKind
) -> None:
    if span_s[1] > span_s[0]:
        builder.add(name, lane, span_s[0], span_s[1] - span_s[0], kind=kind, micro_batch=micro_batch)


def _kind(part: TimePart) -> SpanKind:
    if part in COMMUNICATION:
        return SpanKind.COMMUNICATION
    return SpanKind.HOST if part is TimePart.HOST else SpanKind.COMPUTE
