"""One training step as a program: the pipeline's slots, and what runs once before and after them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stepcast.ir.group import Group
from stepcast.ir.work import Collective, Transfer, Work
from stepcast.ir.workload import Phase as LayerPhase
from stepcast.ir.workload import Stage, Workload
from stepcast.simulation.arrays import Program, Segment, TimedOp
from stepcast.simulation.chunks import Body, alike, chunks_of, model_copies
from stepcast.simulation.messages import Messages, Phase, Send
from stepcast.simulation.pipeline import Round, pipeline_program
from stepcast.simulation.schedule import Kind, Place, Schedule
from stepcast.simulation.segments import (
    COMPUTE,
    Issued,
    IssueSeconds,
    Lanes,
    Seconds,
    once_ops,
    phase_ops,
    segment_of_ops,
    used_groups,
)

ONCE_PHASES = (LayerPhase.FORWARD, LayerPhase.INPUT_GRADIENT, LayerPhase.WEIGHT_GRADIENT)
# Groups whose members are on different stages: their collectives begin when the last stage has come.
ACROSS_STAGES = (Group.EMBEDDING, Group.PP, Group.WORLD)

MessageSeconds = Callable[[int, int], float]
"""(from stage, to stage) -> seconds of the message of one micro-batch."""


@dataclass(frozen=True, eq=False)
class Step:
    """A step that can be simulated: its program, and what is needed to read the result."""

    program: Program
    schedule: Schedule
    lanes: Lanes
    message_s: MessageSeconds
    rounds_before: int
    rounds_after: int


@dataclass(frozen=True)
class Conditions:
    """What makes one stage or group slower than it should be, as factors of time."""

    slow_stages: Mapping[int, float] = field(default_factory=dict)
    slow_groups: Mapping[Group, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for factor in (*self.slow_stages.values(), *self.slow_groups.values()):
            if not 0 < factor < float("inf"):
                raise ValueError(f"a slow-down factor must be finite and above zero, not {factor}")

    def seconds(self, stage: int, seconds: Seconds) -> Seconds:
        """*seconds* as they are on *stage*."""
        factor = self.slow_stages.get(stage, 1.0)

        def adjusted(work: Work) -> float:
            if isinstance(work, Collective | Transfer):
                return seconds(work) * self.slow_groups.get(work.group, 1.0)
            return seconds(work) * factor

        return adjusted if self.slow_groups or factor != 1.0 else seconds


HEALTHY = Conditions()


def build_step(
    workload: Workload,
    schedule: Schedule,
    seconds: Seconds,
    message_s: MessageSeconds,
    *,
    body: Body = Body.STAGE,
    send: Send = Send.EAGER,
    conditions: Conditions = HEALTHY,
    issue_s: IssueSeconds | None = None,
    takes: Seconds | None = None,
) -> Step:
    """The program of *workload* under *schedule*, one rank for each stage.

    *issue_s* paces each rank by a host that issues its work op by op; None: by captured graphs.
    *takes* is what computing loses to each second of a work beside it (see ``slowed``); None: nothing.
    """
    lanes = Lanes(used_groups(workload.stages), receives=send is Send.BLOCKING, host=issue_s is not None)
    chunks = chunks_of(workload, schedule, body)
    priced = {stage: conditions.seconds(stage, seconds) for stage in range(schedule.stages)}
    slow_messages = conditions.slow_groups.get(Group.PP, 1.0)

    built: dict[tuple[object, ...], Segment] = {}

    def segment_of(stage: int, phases: tuple[Phase, ...]) -> Segment:
        layers = [chunks[Place(stage, phase.chunk)].layers(phase) for phase in phases]
        kinds = [phase.kind for phase in phases]
        # Stages that run the same layers at the same speed share their segments.
        key = (conditions.slow_stages.get(stage, 1.0), *map(id, layers), *kinds)
        if key not in built:
            streams = [phase_ops(each, kind) for each, kind in zip(layers, kinds, strict=True)]
            built[key] = segment_of_ops("", streams, lanes, priced[stage], issue_s, takes)
        return built[key]

    def message(kind: Kind, source: Place, target: Place) -> float:
        return message_s(source.stage, target.stage) * slow_messages

    messages = Messages(message, send, COMPUTE, (1, 2), (3, 4))
    once = [_stage_of(workload, schedule, stage) for stage in range(schedule.stages)]
    before = _before(once, lanes, priced)
    after = _after(once, lanes, priced)
    program = pipeline_program(schedule, lanes.names, segment_of, messages, before, after, alike(workload))
    return Step(program, schedule, lanes, message_s, len(before), len(after))


@dataclass(frozen=True)
class _Once:
    """What one stage runs once per step."""

    before: list[Issued]
    after: list[Issued]


def _stage_of(workload: Workload, schedule: Schedule, stage: int) -> _Once:
    """The prologue's forward comes first; its backward, in reverse, and the epilogue come last."""
    backward = (LayerPhase.INPUT_GRADIENT, LayerPhase.WEIGHT_GRADIENT)
    before: list[Issued] = []
    after: list[Issued] = []
    for part in _parts(workload, schedule, stage):
        before += once_ops(part.prologue, (LayerPhase.FORWARD,))
        after += once_ops(reversed(part.prologue), backward)
        after += once_ops(part.epilogue, ONCE_PHASES)
    ends = (0, schedule.stages - 1)
    kept = [issued for issued in after if stage in ends or _group(issued) is not Group.EMBEDDING]
    return _Once(before, kept)


def _parts(workload: Workload, schedule: Schedule, stage: int) -> list[Stage]:
    """The workload's pieces that lie on *stage*."""
    if workload.uniform:
        return [workload.stages[0]]
    return [
        piece
        for copy in model_copies(schedule)
        for place, piece in zip(copy, workload.stages, strict=True)
        if place.stage == stage
    ]


def _group(issued: Issued) -> Group | None:
    work = issued.op.work
    return work.group if isinstance(work, Collective | Transfer) else None


def _before(once: Sequence[_Once], lanes: Lanes, priced: Mapping[int, Seconds]) -> list[Round]:
    segments = {
        stage: segment_of_ops("before", [each.before], lanes, priced[stage])
        for stage, each in enumerate(once)
        if each.before
    }
    return [Round(segments)] if segments else []


def _after(once: Sequence[_Once], lanes: Lanes, priced: Mapping[int, Seconds]) -> list[Round]:
    """Rounds that begin where stages must meet; the first begins when all communication has ended."""
    parts = [_cut_at_meetings(each.after) for each in once]
    finished: dict[tuple[object, ...], Segment] = {}

    def finish(stage: int, ops: Sequence[Issued]) -> Segment:
        key = (priced[stage], *((id(issued.layer), id(issued.op)) for issued in ops))
        if key not in finished:
            finished[key] = _finish(ops, lanes, priced[stage])
        return finished[key]

    meetings = max(([_group(part[0]) for part in each[1:]] for each in parts), key=len)
    rounds = [Round({stage: finish(stage, each[0]) for stage, each in enumerate(parts)})]
    queues = [each[1:] for each in parts]
    for group in meetings:
        present = [stage for stage, queue in enumerate(queues) if queue and _group(queue[0][0]) is group]
        segments, waits = {}, {}
        for stage, queue in enumerate(queues):
            others = tuple(other for other in present if other != stage) if stage in present else ()
            ops = queue.pop(0) if stage in present else []
            segments[stage] = _meet(ops, len(others), lanes, priced[stage])
            waits[stage] = others
        rounds.append(Round(segments, waits))
    return rounds


def _cut_at_meetings(ops: Sequence[Issued]) -> list[list[Issued]]:
    """*ops* cut before each collective that spans stages."""
    parts: list[list[Issued]] = [[]]
    for issued in ops:
        if _group(issued) in ACROSS_STAGES and isinstance(issued.op.work, Collective):
            parts.append([])
        parts[-1].append(issued)
    return parts


def _finish(ops: Sequence[Issued], lanes: Lanes, seconds: Seconds) -> Segment:
    """Wait for every communication still running, then run *ops*."""
    wait = TimedOp("finish communication", 0.0, COMPUTE, lanes=lanes.collectives)
    start = Segment.of("after", (wait,), lanes=len(lanes.names), outputs=(0,))
    return _reached(start.then(segment_of_ops("after", [ops], lanes, seconds), {0: 0}), lanes)


def _meet(ops: Sequence[Issued], others: int, lanes: Lanes, seconds: Seconds) -> Segment:
    """Wait for the other stages, then run *ops*."""
    wait = TimedOp("meet", 0.0, COMPUTE, inputs=tuple(range(others)))
    start = Segment.of("after", (wait,), lanes=len(lanes.names), inputs=others, outputs=(0,))
    return _reached(start.then(segment_of_ops("after", [ops], lanes, seconds), {0: 0}), lanes)


def _reached(segment: Segment, lanes: Lanes) -> Segment:
    """*segment* with one output: everything issued so far has ended."""
    end = TimedOp("end of round", 0.0, COMPUTE, lanes=lanes.collectives)
    last = Segment.of("", (end,), lanes=len(lanes.names), outputs=(0,))
    joined = segment.then(last)
    return joined.giving([len(joined.shape.outputs) - 1])
