"""A measured run as the work of each rank and the meetings between ranks; played as measured, or simulated.

The step of a rank is a sequence of **pieces**. Most need no other rank; others take part in one or more **meetings**
(a collective, a message, a synchronisation): a meeting starts when its last member has arrived and takes its transfer
time, so waiting is not recorded but follows from who is late. Pieces are grouped in **blocks**, one for each forward,
backward, message and final operation, so that a run can be rescheduled.

Durations alone can also be played (``from_durations``): every collective takes the shortest time that any member
spent in it, and the clock only states when ranks start. The error of such a replay shows how well durations and
dependencies explain a run.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from enum import StrEnum
from itertools import islice, pairwise

import msgspec
import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.layout import Group, Layout
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.ir.types import Quantity, dataclass, group_by_key
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.program import Program, ProgramBuilder, Times
from stepcast.simulation.segments import NO_LANE, Segment, TimedOp
from stepcast.simulation.timeline import critical_path


class TimePart(StrEnum):
    """The parts into which the time of a rank is divided."""

    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    PP = "pp"
    EMBEDDING = "embedding"
    EXPERT_DP = "expert-dp"
    WAIT = "wait"  # waiting for a rank of the same stage
    BUBBLE = "bubble"  # waiting for another stage
    HOST = "host"  # launching, loading data, logging
    OTHER = "other"


COMMUNICATION = tuple(map(TimePart, ("tp", "cp", "ep", "dp", "pp", "embedding", "expert-dp")))


class BlockKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    MESSAGE = "message"
    FINISH = "finish"
    START = "start"


@dataclass(frozen=True, slots=True)
class RankPiece:
    """Work of a rank alone, or participation in meetings, which begins with work that they overlap.

    Pieces of the same *role* do the same work on every rank. A piece ends *tail_s* after its own work and the meetings
    that it waits for.
    """

    part: TimePart
    operation: str
    role: str
    micro_batch: int
    start_s: float
    end_s: float  # as measured
    own_s: Quantity = 0.0
    meetings: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()  # some of the meetings
    tail_s: Quantity = 0.0
    tokens: int | None = None  # sent to experts by the router: the work differs between ranks

    @property
    def is_sync(self) -> bool:
        """True if the ranks wait for one another before they update their weights."""
        return bool(self.meetings) and self.part is TimePart.OPTIMIZER


@dataclass(frozen=True, slots=True)
class Meeting:
    """A meeting takes *transfer_s* from the arrival of its last member; start and end are measured."""

    group: str  # a Group, or "model": all ranks that hold one copy of the model
    kind: str
    name: str
    members: tuple[int, ...]
    size_bytes: int | None
    transfer_s: Quantity
    start_s: float = 0.0
    end_s: float = 0.0
    overlapped: bool = False  # members compute during it
    uneven: bool = False  # members contribute different sizes; size_bytes is the largest


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    kind: BlockKind
    micro_batch: int
    pieces: tuple[RankPiece, ...]


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    stage: int
    blocks: tuple[RecordedBlock, ...]

    def pieces(self) -> Iterator[RankPiece]:
        for block in self.blocks:
            yield from block.pieces

    def with_pieces(self, pieces: Iterable[RankPiece]) -> "RankRecord":
        """Return the record with as many other *pieces*."""
        rest = iter(pieces)
        blocks = (replace(block, pieces=tuple(islice(rest, len(block.pieces)))) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))


@dataclass(frozen=True)
class Recording:
    """All given ranks of one run."""

    layout: Layout
    ranks: tuple[RankRecord, ...]
    meetings: tuple[Meeting, ...]
    measured_step_s: float
    micro_batches: int
    facts: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """True if every rank of the run is present."""
        return len(self.ranks) == self.layout.gpus

    @property
    def configuration(self) -> dict[str, object]:
        """The facts of the trace about the model and the batch."""
        return {key: value for key, value in self.facts.items() if key not in ("basis", "gradient_bytes")}

    @property
    def layers(self) -> int | None:
        layers = self.facts.get("layers")
        return layers if isinstance(layers, int) else None

    def layers_on(self, stage: int) -> int | None:
        """Return the number of layers of a stage; None if it is unknown."""
        known = self.facts.get("layers_on")
        if isinstance(known, dict) and stage in known:
            return int(known[stage])
        return None if self.layers is None else self.layers // self.layout.pp

    def record_of(self, rank: int) -> RankRecord:
        records = {record.rank: record for record in self.ranks}
        if rank not in records:
            raise ValueError(f"rank {rank} is not in this run; it has {', '.join(map(str, records))}")
        return records[rank]

    def compute_s(self, record: RankRecord, kind: BlockKind) -> float:
        """Return the compute time of *record* in its blocks of *kind*, with overlapped work."""
        pieces = [piece for block in record.blocks if block.kind is kind for piece in block.pieces]
        return sum((piece.own_s for piece in pieces if piece.meetings or piece.part is TimePart.COMPUTE), 0.0)


# ---- as measured, or simulated ---------------------------------------------------------------------------

ALONE = ("gap", "start")  # work of the host between operations, separate from them
# Waiting in these groups is for a rank of the same stage; in any other, for another stage.
WITHIN_STAGE = (Group.TP, Group.CP, Group.EP, Group.DP, Group.EXPERT_DP)


@dataclass(frozen=True, eq=False)
class PlayedStep:
    """The start and end of every piece of every rank, and the start of every meeting.

    ``start_s`` and ``end_s`` hold one array per rank, in the order of the recording. Where a piece meets others, it
    starts when it arrives.
    """

    recording: Recording
    start_s: tuple[FloatArray, ...]
    end_s: tuple[FloatArray, ...]
    meeting_start_s: FloatArray
    step_s: float

    def timed_pieces(self, number: int) -> Iterator[tuple[RankPiece, float, float]]:
        """Yield the pieces of a rank of the recording with their start and end."""
        starts, ends = self.start_s[number].tolist(), self.end_s[number].tolist()
        return zip(self.recording.ranks[number].pieces(), starts, ends, strict=True)

    def join_times(self, join: RankPiece, start_s: float, end_s: float) -> tuple[float, float]:
        """Return when a join that lasts from *start_s* to *end_s* has done its own work, and the last member came."""
        free_s = min(start_s + join.own_s, end_s)
        came_s = max((float(self.meeting_start_s[number]) for number in join.waits), default=free_s)
        return free_s, min(max(came_s, free_s), end_s)


def play_measured(recording: Recording) -> PlayedStep:
    """Return the times as they were measured."""
    origin_s = min(piece.start_s for record in recording.ranks for piece in record.pieces())
    pieces = [list(record.pieces()) for record in recording.ranks]
    start_s = tuple(np.array([piece.start_s - origin_s for piece in listed]) for listed in pieces)
    end_s = tuple(np.array([piece.end_s - origin_s for piece in listed]) for listed in pieces)
    meeting_start_s = np.array([meeting.start_s - origin_s for meeting in recording.meetings])
    return PlayedStep(recording, start_s, end_s, meeting_start_s, recording.measured_step_s)


@dataclass
class ReplayScript:
    """The program of a recording, with the piece or meeting of each task."""

    recording: Recording
    program: Program
    piece_of_task: IntArray  # index of the piece within its rank, -1 for a meeting
    meeting_of_rank: tuple[int, ...]  # the meeting that each rank of the program after the real ones represents

    @property
    def real_ranks(self) -> int:
        return len(self.recording.ranks)


def build_script(recording: Recording) -> ReplayScript:
    """Return a program with one lane per rank; a meeting is a rank of its own that waits for its members."""
    pieces: list[int] = []
    calls = [list(_rank_calls(record, pieces)) for record in recording.ranks]
    arrivals = group_by_key(
        (meeting, (rank, number))
        for rank, record in enumerate(recording.ranks)
        for number, join in enumerate(piece for piece in record.pieces() if piece.meetings)
        for meeting in join.meetings
    )
    meetings = sorted(arrivals)
    builder = ProgramBuilder(("rank",), len(calls) + len(meetings))
    numbers = [[builder.call(rank, segment) for segment, _ in listed] for rank, listed in enumerate(calls)]
    segments: dict[tuple[float, int], Segment] = {}
    call_of_meeting = {}
    for index, meeting in enumerate(meetings):
        members = arrivals[meeting]
        duration_s = recording.meetings[meeting].transfer_s
        key = (duration_s, len(members))
        if key not in segments:
            op = TimedOp("meeting", duration_s, NO_LANE, inputs=tuple(range(len(members))))
            segments[key] = Segment.of("meeting", (op,), lanes=1, inputs=len(members), outputs=(0,))
        sources = [(numbers[rank][number], 0) for rank, number in members]
        call_of_meeting[meeting] = builder.call(len(calls) + index, segments[key], sources)
    for rank, listed in enumerate(calls):
        for number, (_, waits) in enumerate(listed):
            for port, meeting in enumerate(waits):
                builder.bind(numbers[rank][number], port, (call_of_meeting[meeting], 0))
    piece_of_task = np.array([*pieces, *([-1] * len(meetings))], np.int64)
    return ReplayScript(recording, builder.program(), piece_of_task, tuple(meetings))


def _rank_calls(record: RankRecord, piece_of_op: list[int]) -> Iterator[tuple[Segment, tuple[int, ...]]]:
    """Yield the segments of a rank with the meetings they wait for, and add the piece of each op to *piece_of_op*.

    Each arrival ends a segment, so that it is an output.
    """
    ops: list[TimedOp] = []
    waits: tuple[int, ...] = ()
    for index, piece in enumerate((*record.pieces(), None)):
        if piece is not None and not piece.meetings:
            ops.append(TimedOp(piece.operation, piece.own_s))
            piece_of_op.append(index)
            continue
        yield Segment.of("rank", ops, lanes=1, inputs=len(waits), outputs=(len(ops) - 1,)), waits
        if piece is not None:
            waits = piece.waits
            ops = [TimedOp(piece.operation, piece.own_s)] if piece.own_s else []
            ops.append(TimedOp(piece.operation, piece.tail_s, inputs=tuple(range(len(waits)))))
            piece_of_op += [index] * len(ops)


def play(recording: Recording) -> PlayedStep:
    """Simulate *recording*."""
    script = build_script(recording)
    return place_times(script, task_times(simulate(script.program)))


def place_times(script: ReplayScript, times: Times) -> PlayedStep:
    """Return the times of pieces and meetings from the *times* of the tasks of *script*."""
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
        # A meeting without own work before it starts when the previous piece ends.
        for index, piece in enumerate(record.pieces()):
            if piece.meetings and index and not piece.own_s:
                start_s[index] = end_s[index - 1]
        starts.append(start_s)
        ends.append(end_s)
    meeting_start_s = np.zeros(len(recording.meetings))
    tasks = np.flatnonzero(rank_of_task >= script.real_ranks)
    meeting_start_s[np.array(script.meeting_of_rank, np.int64)] = times.start_s[tasks]
    return PlayedStep(recording, tuple(starts), tuple(ends), meeting_start_s, times.makespan_s)


class CriticalStep(msgspec.Struct, frozen=True):
    """A part of the critical path: one operation of one rank, or one meeting between ranks."""

    ranks: tuple[int, ...]
    operation: str
    micro_batch: int | None
    start_s: float
    duration_s: float


def critical_steps(recording: Recording) -> list[CriticalStep]:
    """Return the chain of work and transfers that determines the step, with neighbours of one operation joined."""
    script = build_script(recording)
    program = script.program
    path = critical_path(program, task_times(simulate(program)))
    pieces = [list(record.pieces()) for record in recording.ranks]
    steps = []
    for call, op, start_s, end_s in zip(path.call, path.op, path.start_s, path.end_s, strict=True):
        rank, times_s = int(program.rank[call]), (float(start_s), float(end_s - start_s))
        if rank >= script.real_ranks:
            meeting = recording.meetings[script.meeting_of_rank[rank - script.real_ranks]]
            steps.append(CriticalStep(meeting.members, f"{meeting.group} {meeting.name}", None, *times_s))
            continue
        index = int(script.piece_of_task[program.task_start[call] + op])
        if index >= 0:
            piece = pieces[rank][index]
            batch = piece.micro_batch if piece.micro_batch >= 0 else None
            steps.append(CriticalStep((recording.ranks[rank].rank,), piece.operation, batch, *times_s))
    return _join_steps(steps, {record.rank: record.stage for record in recording.ranks})


def _join_steps(steps: list[CriticalStep], stage_of: dict[int, int]) -> list[CriticalStep]:
    """Join neighbours of one operation of one stage, with the collectives between them."""
    joined: list[CriticalStep] = []
    for step in (step for step in steps if step.duration_s > 0):
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
            step = msgspec.structs.replace(last, ranks=ranks, duration_s=last.duration_s + step.duration_s)
            joined.pop()
        joined.append(step)
    return joined


def timeline_of(labelled: Mapping[str, PlayedStep]) -> Timeline:
    """Return a timeline with one lane per rank and label: work, waits and transfers."""
    builder = TimelineBuilder()

    def add(lane: int, name: str, micro_batch: int, start_s: float, end_s: float, kind: SpanKind) -> None:
        if end_s > start_s:
            builder.add(name, lane, start_s, end_s - start_s, kind=kind, micro_batch=micro_batch)

    for label, played in labelled.items():
        for number, record in enumerate(played.recording.ranks):
            lane = builder.lane(record.rank, label)
            cursor_s = 0.0
            for piece, start_s, end_s in played.timed_pieces(number):
                start_s = max(start_s, cursor_s)
                cursor_s = max(cursor_s, end_s)
                batch = piece.micro_batch
                if not piece.meetings:
                    host = SpanKind.HOST if piece.part is TimePart.HOST else SpanKind.COMPUTE
                    kind = SpanKind.COMMUNICATION if piece.part in COMMUNICATION else host
                    add(lane, piece.role, batch, start_s, end_s, kind)
                    continue
                free_s, came_s = played.join_times(piece, start_s, end_s)
                add(lane, piece.role, batch, start_s, free_s, SpanKind.COMPUTE)
                add(lane, f"wait: {piece.role}", batch, free_s, came_s, SpanKind.OTHER)
                add(lane, piece.role, batch, came_s, end_s, SpanKind.COMMUNICATION)
    first = next(iter(labelled.values()))
    stages = {record.rank: record.stage for played in labelled.values() for record in played.recording.ranks}
    measured = not {"replayed", "changed"} & set(labelled)
    facts = {"runs": [*labelled]} if len(labelled) > 1 else {}
    return builder.build(
        measured=measured, layout=first.recording.layout, stage_of_rank=stages, facts=facts, rebase=False
    )


@dataclass
class RankParts:
    """The seconds of one rank; the parts sum to the step."""

    rank: int
    stage: int
    parts_s: dict[TimePart, float] = field(default_factory=lambda: dict.fromkeys(TimePart, 0.0))
    waits_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by group
    exposed_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # communication without other work
    overlapped_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # hidden behind computation
    waits_for_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by the rank that came last

    @property
    def busy_s(self) -> float:
        return self.parts_s[TimePart.COMPUTE] + self.parts_s[TimePart.OPTIMIZER]

    @property
    def bubble_s(self) -> float:
        return self.parts_s[TimePart.BUBBLE]

    def add(self, part: TimePart, seconds: float) -> None:
        self.parts_s[part] += max(0.0, seconds)

    def add_join(
        self, played: PlayedStep, join: RankPiece, start_s: float, end_s: float, last: Mapping[int, tuple[int, float]]
    ) -> None:
        """Add own work, then waiting for the last member, then the transfer."""
        free_s, came_s = played.join_times(join, start_s, end_s)
        self.add(TimePart.COMPUTE if join.waits else join.part, free_s - start_s)
        meetings = [played.recording.meetings[number] for number in join.meetings]
        group = meetings[0].group
        self.add(TimePart.WAIT if group in WITHIN_STAGE else TimePart.BUBBLE, came_s - free_s)
        self.add(join.part, end_s - came_s)
        self.waits_s[str(group)] += came_s - free_s
        exposed_s = end_s - came_s + (0.0 if join.waits else free_s - start_s)
        if join.part is not TimePart.OPTIMIZER:
            self.exposed_s[str(join.part)] += exposed_s
            transfer_s = max(meeting.transfer_s for meeting in meetings)
            self.overlapped_s[str(join.part)] += max(0.0, transfer_s - exposed_s) if join.own_s else 0.0
        if join.waits:
            rank, _ = last[max(join.waits, key=lambda number: last[number][1])]
            if rank != self.rank and came_s > free_s:
                self.waits_for_s[rank] = self.waits_for_s[rank] + came_s - free_s


def rank_parts(played: PlayedStep) -> tuple[RankParts, ...]:
    """Return the parts of every rank, in the order of the recording."""
    last: dict[int, tuple[int, float]] = {}  # the last member of each meeting and its arrival
    for number, record in enumerate(played.recording.ranks):
        for piece, start_s, _ in played.timed_pieces(number):
            for meeting in piece.meetings:
                if meeting not in last or start_s > last[meeting][1]:
                    last[meeting] = record.rank, start_s
    ranks = []
    for number, record in enumerate(played.recording.ranks):
        parts = RankParts(record.rank, record.stage)
        cursor_s = 0.0
        for piece, start_s, end_s in played.timed_pieces(number):
            if not piece.meetings:
                parts.add(piece.part, end_s - cursor_s)
                if piece.part in COMMUNICATION:
                    parts.exposed_s[str(piece.part)] += end_s - start_s
            else:
                parts.add_join(played, piece, cursor_s, end_s, last)
            cursor_s = end_s
        parts.add(TimePart.BUBBLE, played.step_s - cursor_s)
        ranks.append(parts)
    return tuple(ranks)


def mean_parts(ranks: tuple[RankParts, ...]) -> dict[str, float]:
    """Return the mean over the ranks, which sums to the step."""
    return {str(part): sum(rank.parts_s[part] for rank in ranks) / len(ranks) for part in TimePart}


def stage_rows(ranks: tuple[RankParts, ...]) -> list[dict[str, float]]:
    """Return the mean over the ranks of each stage."""
    rows = []
    for stage in sorted({rank.stage for rank in ranks}):
        mine = tuple(rank for rank in ranks if rank.stage == stage)
        busy_s, bubble_s = (sum(getattr(rank, name) for rank in mine) / len(mine) for name in ("busy_s", "bubble_s"))
        parts_s = {f"{part}_s": seconds for part, seconds in mean_parts(mine).items()}
        rows.append({"stage": stage, "busy_s": busy_s, "bubble_s": bubble_s, **parts_s})
    return rows


def at_shortest(recording: Recording) -> Recording:
    """Return the recording with each meeting and optimizer at its shortest time.

    The step of this recording is what work and dependencies alone cost.
    """
    pieces = (piece for record in recording.ranks for piece in record.pieces())
    stays_s = group_by_key((number, piece.end_s - piece.start_s) for piece in pieces for number in piece.waits)
    meetings = []
    for number, meeting in enumerate(recording.meetings):
        stay_s = 0.0 if meeting.kind == "sync" else min(stays_s.get(number, [meeting.transfer_s]))
        # With overlapped work a stay is the time of the work; the transfer is known from elsewhere.
        meetings.append(replace(meeting, transfer_s=min(stay_s, meeting.transfer_s) if meeting.overlapped else stay_s))
    optimizers_s = group_by_key(time for record in recording.ranks for time in _optimizer_times(record).items())
    shortest_s = {number: min(times_s) for number, times_s in optimizers_s.items()}
    ranks = tuple(_set_optimizers(record, shortest_s) for record in recording.ranks)
    return replace(recording, ranks=ranks, meetings=tuple(meetings))


def from_durations(recording: Recording) -> Recording:
    """Return the recording with each meeting at its shortest time, each optimizer without its replayed wait."""
    shortest = at_shortest(recording)
    arrivals = play(shortest)
    ranks = []
    for number, record in enumerate(shortest.ranks):
        recorded_s = _optimizer_times(recording.ranks[number])
        left_s = {}
        for index, piece in enumerate(record.pieces()):
            if piece.is_sync:
                meeting = piece.meetings[0]
                waited_s = float(arrivals.meeting_start_s[meeting]) - float(arrivals.start_s[number][index])
                left_s[meeting] = max(0.0, recorded_s[meeting] - waited_s)
        ranks.append(_set_optimizers(record, left_s))
    return replace(shortest, ranks=tuple(ranks))


def _optimizer_times(record: RankRecord) -> dict[int, float]:
    """Return by meeting the time of each optimizer in the trace: waiting for the others, then its own work."""
    return {
        sync.meetings[0]: update.end_s - sync.start_s
        for sync, update in pairwise(record.pieces())
        if sync.is_sync and not update.meetings
    }


def _set_optimizers(record: RankRecord, optimizer_s: Mapping[int, float]) -> RankRecord:
    """Return the record with these optimizer times and without delays after meetings."""
    old, pieces = list(record.pieces()), list[RankPiece]()
    for before, piece in zip([None, *old], old, strict=False):
        own_s = piece.own_s
        if before is not None and before.is_sync and not piece.meetings:
            own_s = optimizer_s[before.meetings[0]]
        pieces.append(replace(piece, own_s=own_s, tail_s=0.0))
    return record.with_pieces(pieces)
