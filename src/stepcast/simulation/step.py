"""One training step as a program: the pipeline's slots, and what runs once before and after them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from stepcast.ir.group import Channel, Group, HostWay
from stepcast.ir.identity import ByIdentity
from stepcast.ir.work import Collective, group_of
from stepcast.ir.workload import Block, Phase, Stage, Workload, written
from stepcast.simulation.costs import Issue, Lead, Prices
from stepcast.simulation.engine import makespans_s
from stepcast.simulation.lanes import HANDED_ON, Lanes
from stepcast.simulation.lowering import Issued, Terms, once_ops, phase_ops, pieces_under, row_of
from stepcast.simulation.messages import USUAL, Messages, Send, SlotKind
from stepcast.simulation.pipeline import Round, pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction
from stepcast.simulation.segments import Cost, Floats, Segment, TimedOp

# What each stage and chunk of a pipeline runs, from a workload that says it once for all stages.


class Body(StrEnum):
    """What the body of a uniform workload stands for."""

    STAGE = "stage"  # what every stage runs, as in SimAI
    MODEL = "model"  # the whole model, to be split over the stages


Blocks = tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The blocks of one chunk: in most micro-batches, and by kinds of slots in those that differ."""

    usual: Blocks
    varied: Mapping[SlotAction, Mapping[int, Blocks]]
    in_turn: bool
    final: int
    """The last micro-batch."""

    def bodies(self, kind: SlotAction) -> tuple[Blocks, ...]:
        """All that slots of a *kind* run."""
        return self.usual, *self.varied[kind].values()

    def blocks(self, phase: SlotKind) -> Blocks:
        which = phase.like
        if self.in_turn:
            # A split backward among whole ones may be the first of its kind and the last of all.
            ends = phase.last and phase.kind is not SlotAction.FORWARD
            which = self.final if ends else 0 if phase.first else self.final if phase.last else USUAL
        return self.varied[phase.kind].get(which, self.usual)


def chunks_of(workload: Workload, schedule: Schedule, body: Body) -> dict[ChunkPlace, Chunk]:
    """The layers of every chunk of *schedule*."""
    copies = model_copies(schedule)
    if not workload.uniform:
        if len(workload.stages) != len(copies[0]):
            raise ValueError(
                f"the workload has {len(workload.stages)} pieces, schedule {schedule.name} {len(copies[0])}"
            )
        # Stages that are one object run the same: so do their chunks.
        distinct = {id(stage): stage for stage in workload.stages}
        known = {number: _whole(stage, workload, schedule) for number, stage in distinct.items()}
        pieces = [known[id(stage)] for stage in workload.stages]
        return {place: piece for copy in copies for place, piece in zip(copy, pieces, strict=True)}
    whole = _whole(workload.stages[0], workload, schedule)
    if body is Body.MODEL:
        pieces = _split(whole, len(copies[0]))
        return {place: piece for copy in copies for place, piece in zip(copy, pieces, strict=True)}
    parts = _split(whole, schedule.chunks // len(copies))
    return {place: parts[place.chunk % len(parts)] for copy in copies for place in copy}


@lru_cache(maxsize=256)
def model_copies(schedule: Schedule) -> list[list[ChunkPlace]]:
    """The places of each copy of the model, from its start to its end; DualPipe runs two copies."""
    copies: list[list[ChunkPlace]] = []
    for chunk in range(schedule.chunks):
        for stage in range(schedule.stages):
            place: ChunkPlace | None = ChunkPlace(stage, chunk)
            assert place is not None
            if schedule.previous(place) is not None:
                continue
            copy: list[ChunkPlace] = []
            while place is not None:
                copy.append(place)
                place = schedule.following(place)
            copies.append(copy)
    return copies


def alike(workload: Workload) -> list[int]:
    """For each micro-batch the first one that differs from the usual in the same way, or USUAL."""
    differs: dict[int, list[tuple[int, int, int]]] = {}
    for number, stage in enumerate(workload.stages):
        for each in stage.variations if not stage.in_turn else ():
            differs.setdefault(each.micro_batch, []).append((number, each.position, id(each.layer)))
    first: dict[tuple[tuple[int, int, int], ...], int] = {}
    return [
        first.setdefault(tuple(differs[micro_batch]), micro_batch) if micro_batch in differs else USUAL
        for micro_batch in range(workload.micro_batches)
    ]


def _whole(stage: Stage, workload: Workload, schedule: Schedule) -> Chunk:
    varied = _VARIED.of(stage, _varied, schedule.kinds)
    return Chunk(stage.body, varied, stage.in_turn, workload.micro_batches - 1)


def _varied(stage: Stage, kinds: frozenset[SlotAction]) -> dict[SlotAction, dict[int, Blocks]]:
    bodies = stage.varied_blocks([HANDED_ON[kind] for kind in kinds])
    return dict(zip(kinds, bodies, strict=True))


_VARIED: ByIdentity[dict[SlotAction, dict[int, Blocks]]] = ByIdentity(1024)


def _split(whole: Chunk, parts: int) -> list[Chunk]:
    """Consecutive pieces of nearly equal numbers of layers; the same cuts in every micro-batch."""
    if parts == 1:
        return [whole]
    count = sum(len(block.layers) * block.repeat for block in whole.usual)
    if count < parts:
        raise ValueError(f"{count} layers cannot be split into {parts} chunks; use fewer stages or chunks")
    cuts = [round(count * part / parts) for part in range(parts + 1)]
    found = []
    for start, end in pairwise(cuts):
        usual = _cut(whole.usual, start, end)
        varied: dict[SlotAction, dict[int, Blocks]] = {}
        for kind, bodies in whole.varied.items():
            cut = {which: _cut(blocks, start, end) for which, blocks in bodies.items()}
            # Equal pieces stay one object, so that they are priced once.
            varied[kind] = {which: blocks for which, blocks in cut.items() if blocks != usual}
        found.append(replace(whole, usual=usual, varied=varied))
    return found


def _cut(blocks: Blocks, start: int, end: int) -> Blocks:
    """The layers from *start* to *end* of *blocks*, still folded."""
    found: list[Block] = []
    for block in blocks:
        length = len(block.layers)
        first, skipped = divmod(max(start, 0), length)
        last, taken = divmod(min(end, length * block.repeat), length)
        if first == last and skipped < taken:
            found.append(Block(block.layers[skipped:taken]))
        elif first < last:
            if skipped:
                found.append(Block(block.layers[skipped:]))
            if whole := last - first - (skipped > 0):
                found.append(Block(block.layers, whole))
            if taken:
                found.append(Block(block.layers[:taken]))
        start, end = start - length * block.repeat, end - length * block.repeat
        if end <= 0:
            break
    return tuple(found)


ONCE_PHASES = (Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
# Groups whose members are on different stages: their collectives begin when the last stage has come.
ACROSS_STAGES = (Group.EMBEDDING, Group.PP, Group.WORLD)


@dataclass(frozen=True, eq=False)
class Step:
    """A step that can be simulated: its program, its prices, and what is needed to read the result."""

    program: Program
    schedule: Schedule
    lanes: Lanes
    message: Cost
    """What the message of one micro-batch between two stages costs."""
    prices: Prices
    rounds_before: int
    rounds_after: int

    @cached_property
    def seconds(self) -> Floats:
        """The price of each of the program's costs."""
        seconds = self.program.priced(self.prices)
        if self.prices.ahead and self.prices.issue_s is not None:
            seconds[self.program.costs.index(Lead())] = -self._lead_s(seconds)
        return seconds

    def _lead_s(self, seconds: Floats) -> float:
        """How far a host is ahead that issues one step after the other: by what the GPU had left to do when
        the host had issued the step before.

        Kernels then run one after the other, or the host without a pause, whichever takes longer.
        """
        issues = np.array([isinstance(cost, Issue) for cost in self.program.costs])
        whole_s, host_s = makespans_s(self.program, np.array([seconds, np.where(issues, seconds, 0.0)]))
        return float(whole_s - host_s)

    @property
    def message_s(self) -> float:
        return self.prices(self.message)


@dataclass(frozen=True)
class Conditions:
    """What makes one stage or group slower than it should be, as factors of time."""

    slow_stages: Mapping[int, float] = field(default_factory=dict)
    slow_groups: Mapping[Group, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for factor in (*self.slow_stages.values(), *self.slow_groups.values()):
            if not 0 < factor < float("inf"):
                raise ValueError(f"a slow-down factor must be finite and above zero, not {factor}")


HEALTHY = Conditions()


def build_step(
    workload: Workload,
    schedule: Schedule,
    prices: Prices,
    message: Cost,
    *,
    body: Body = Body.STAGE,
    send: Send = Send.EAGER,
    conditions: Conditions = HEALTHY,
    alone: frozenset[Group] = frozenset(),
) -> Step:
    """The program of *workload* under *schedule*, one rank for each stage; groups that are *alone* have one
    rank and nobody to talk to. The schedule may have fewer micro-batches where all but the first and the last
    are the same.

    *prices* that say what issuing costs pace each rank by a host that issues its work op by op, others by
    captured graphs; those that say what it takes let communication slow down what computes beside it.
    """
    prices = replace(prices, slow_groups=conditions.slow_groups)
    eager = prices.issue_s is not None
    chunks = chunks_of(workload, schedule, body)
    once = _once(workload, schedule)
    groups, named = _lanes_of(schedule, chunks.values(), once)
    lanes = Lanes(groups, send is Send.BLOCKING, eager, named)
    terms = Terms(lanes, alone.intersection(groups), eager, prices.takes is not None)
    slots = _Slots(chunks, terms, prices, conditions.slow_stages)
    messages = Messages(lambda kind, source, target: message, send, alike=True)
    rounds = _Rounds(replace(terms, contention=False), conditions.slow_stages)
    before, after = rounds.before(once), rounds.after(once)
    if eager and prices.ahead:
        before.insert(0, Round(dict.fromkeys(range(schedule.stages), _lead(lanes))))
    program = pipeline_program(
        schedule,
        lanes.names,
        slots.segment,
        messages,
        before,
        after,
        _alike(workload, schedule.micro_batches),
        [slots.runs(stage, chunk) for stage in range(schedule.stages) for chunk in range(schedule.chunks)],
    )
    return Step(program, schedule, lanes, message, prices, len(before), len(after))


def _alike(workload: Workload, micro_batches: int) -> list[int]:
    """Of as many as the schedule has, which may be a file of more than the workload's."""
    known = alike(workload)[:micro_batches]
    return [*known, *[USUAL] * (micro_batches - len(known))]


def _lead(lanes: Lanes) -> Segment:
    """What begins before the step: the host, and whatever it would wait for."""
    assert lanes.host_lane is not None
    op = TimedOp("lead", Lead(), lanes.host_lane, keeps=(lanes.read,))
    return Segment.of("lead", [op], lanes=lanes.count)


def _lanes_of(
    schedule: Schedule, chunks: Iterable[Chunk], once: Iterable["_Once"]
) -> tuple[tuple[Channel, ...], tuple[str, ...]]:
    """The groups that communicate, in the order of their table, and the ops that others wait for in a later
    piece, so that their ends must be kept.
    """
    groups: set[Channel] = set()
    named: set[str] = set()
    own = {id(chunk): chunk for chunk in chunks}.values()
    for kind in schedule.kinds:
        bodies = {id(body): body for chunk in own for body in chunk.bodies(kind)}
        layers = {id(block.layers): block.layers for body in bodies.values() for block in body}
        rows = [row_of(each, kind) for each in layers.values()]
        groups = groups.union(*[row.groups for row in rows])
        named = named.union(*[row.awaited for row in rows])
    groups = groups.union(*[each.groups for each in once])
    return tuple(each for each in (*Group, *HostWay) if each in groups), tuple(sorted(named))


class _Slots:
    """The segments of slots, each made once."""

    def __init__(
        self, chunks: Mapping[ChunkPlace, Chunk], terms: Terms, prices: Prices, slow_stages: Mapping[int, float]
    ) -> None:
        self.chunks, self.pieces, self.prices = chunks, pieces_under(terms), prices
        self.slow_stages = slow_stages
        self.made: dict[tuple[object, ...], Segment] = {}

    def segment(self, stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        """Stages that run the same blocks at the same speed share their segments."""
        factor = self.slow_stages.get(stage, 1.0)
        blocks = [self.chunks[ChunkPlace(stage, phase.chunk)].blocks(phase) for phase in phases]
        kinds = tuple(phase.kind for phase in phases)
        key = (factor, *map(id, blocks), *kinds)
        if key not in self.made:
            self.made[key] = self._chained(blocks, kinds, factor)
        return self.made[key]

    def runs(self, stage: int, chunk: int) -> object:
        """Equal for places that run the same."""
        return self.slow_stages.get(stage, 1.0), id(self.chunks[ChunkPlace(stage, chunk)])

    def _chained(self, bodies: Sequence[Blocks], kinds: tuple[SlotAction, ...], factor: float) -> Segment:
        pieces, streams = self.pieces, len(bodies)
        if streams == 1:
            middle = pieces.slot(bodies[0], kinds[0], factor)
        else:
            ops = [phase_ops(written(body), kind) for body, kind in zip(bodies, kinds, strict=True)]
            middle = [(pieces.interleaved(ops, self.prices.seconds, factor), 1)]
        return Segment("", ((pieces.begin(streams), 1), *middle, (pieces.end(streams), 1)))


@dataclass(frozen=True, eq=False)
class _Once:
    """What one stage runs once per step."""

    before: list[Issued]
    after: list[list[Issued]]
    """Cut before each collective that spans stages."""
    meetings: list[Channel]
    """The groups of those."""
    groups: frozenset[Channel]


def _once(workload: Workload, schedule: Schedule) -> list[_Once]:
    """Of every stage; the same object for stages that run the same."""
    parts: list[list[Stage]] = [[] for _ in range(schedule.stages)]
    if workload.uniform:
        parts = [[workload.stages[0]]] * schedule.stages
    else:
        for copy in model_copies(schedule):
            for place, part in zip(copy, workload.stages, strict=True):
                parts[place.stage].append(part)
    known: dict[tuple[object, ...], _Once] = {}
    found = []
    for stage, own in enumerate(parts):
        at_end = stage in (0, schedule.stages - 1)
        key = (at_end, *map(id, own))
        if key not in known:
            known[key] = _stage_of(own, at_end)
        found.append(known[key])
    return found


def _stage_of(parts: Sequence[Stage], at_end: bool) -> _Once:
    """The prologue's forward comes first; its backward, in reverse, and the epilogue come last."""
    backward = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
    before: list[Issued] = []
    after: list[Issued] = []
    for part in parts:
        before += once_ops(part.prologue, (Phase.FORWARD,))
        after += once_ops(reversed(part.prologue), backward)
        after += once_ops(part.epilogue, ONCE_PHASES)
    of = [group_of(issued.op.work) for issued in after]
    kept = [each for each in zip(after, of, strict=True) if at_end or each[1] is not Group.EMBEDDING]
    begun = [group_of(issued.op.work) for issued in before]
    groups = [group for group in (*begun, *[group for _, group in kept]) if group is not None]
    return _Once(before, *_cut_at_meetings(kept), frozenset(groups))


class _Rounds:
    """What runs once per step: in rounds that begin where stages must meet."""

    def __init__(self, terms: Terms, slow_stages: Mapping[int, float]) -> None:
        self.pieces, self.slow_stages = pieces_under(terms), slow_stages

    def before(self, once: Sequence[_Once]) -> list[Round]:
        issued = {stage: each.before for stage, each in enumerate(once) if each.before}
        return [Round(self._segments(issued, "before"))] if issued else []

    def after(self, once: Sequence[_Once]) -> list[Round]:
        """The first begins when all communication has ended."""
        issued = {stage: each.after[0] for stage, each in enumerate(once)}
        rounds = [Round(self._segments(issued, "finish communication", finish=True))]
        met = [0] * len(once)
        for group in max((each.meetings for each in once), key=len):
            # Each hands on when the last of those before it came, so that the last knows of all.
            issued, nothing = {}, list[Issued]()
            for stage, each in enumerate(once):
                if met[stage] < len(each.meetings) and each.meetings[met[stage]] is group:
                    met[stage] += 1
                    issued[stage] = each.after[met[stage]]
            first, *others = present = list(issued)
            here = self._segments({first: nothing}, "come") | self._segments(
                dict.fromkeys(others, nothing), "come", others=1
            )
            turns = {stage: (before,) for before, stage in pairwise(present)}
            rounds.append(Round(here, turns, in_turn=True))
            everyone = (present[-1],)
            rounds.append(Round(self._segments(issued, "meet", others=1), dict.fromkeys(present, everyone)))
        return rounds

    def _segments(
        self, issued: Mapping[int, Sequence[Issued]], name: str, others: int = 0, finish: bool = False
    ) -> dict[int, Segment]:
        """For stages what they call; those that issue the same at the same speed call the same."""
        made: dict[tuple[float, int], Segment] = {}
        found = {}
        for stage, ops in issued.items():
            factor = self.slow_stages.get(stage, 1.0)
            key = (factor, id(ops))
            if key not in made:
                made[key] = Segment("", ((self.pieces.once(ops, name, others, finish, factor), 1),))
            found[stage] = made[key]
        return found


def _cut_at_meetings(ops: Iterable[tuple[Issued, Channel | None]]) -> tuple[list[list[Issued]], list[Channel]]:
    """*ops*, each with its group, cut before each collective that spans stages, and the groups of those."""
    parts: list[list[Issued]] = [[]]
    meetings: list[Channel] = []
    for issued, group in ops:
        if group in ACROSS_STAGES and isinstance(issued.op.work, Collective):
            parts.append([])
            meetings.append(group)
        parts[-1].append(issued)
    return parts, meetings
