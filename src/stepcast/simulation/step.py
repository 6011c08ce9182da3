"""One training step as a program: the pipeline's slots, and what runs once before and after them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.group import Channel, Group, HostWay
from stepcast.ir.identity import ByIdentity
from stepcast.ir.work import Collective, group_of
from stepcast.ir.workload import Block, Phase, Stage, Workload, unfold_blocks
from stepcast.simulation.costs import IssueCost, LeadCost, Prices
from stepcast.simulation.engine import makespans_s
from stepcast.simulation.lanes import PHASES_OF, Lanes
from stepcast.simulation.lowering import (
    IssuedOp,
    LoweringTerms,
    PieceFactory,
    join_slot_ops,
    list_once_ops,
    list_slot_ops,
    piece_factory,
)
from stepcast.simulation.messages import DEFAULT_MICRO_BATCH, Messages, Send, SlotKind
from stepcast.simulation.pipeline import Round, pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction
from stepcast.simulation.segments import Cost, Segment, TimedOp

# The blocks of each chunk of a pipeline.


class Body(StrEnum):
    """The meaning of the body of a uniform workload."""

    STAGE = "stage"  # what every stage runs, as in SimAI
    MODEL = "model"  # the whole model, to be split over the stages


Blocks = tuple[Block, ...]
VariedBlocks = Mapping[SlotAction, Mapping[int, Blocks]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The blocks of one model chunk: in most micro-batches, and by actions in those that differ."""

    default: Blocks
    varied: VariedBlocks
    in_turn: bool
    final: int  # the last micro-batch

    def blocks(self, slot: SlotKind) -> Blocks:
        which = slot.representative
        if self.in_turn:
            # A split backward among whole ones may be the first of its kind and the last of all.
            ends = slot.last and slot.kind is not SlotAction.FORWARD
            first_or_last = 0 if slot.first else self.final if slot.last else DEFAULT_MICRO_BATCH
            which = self.final if ends else first_or_last
        return self.varied[slot.kind].get(which, self.default)


def split_chunks(workload: Workload, schedule: Schedule, body: Body) -> dict[ChunkPlace, Chunk]:
    """Return the layers of every chunk of *schedule*."""
    copies = model_copies(schedule)
    if not workload.uniform:
        if len(workload.stages) != len(copies[0]):
            raise ValueError(
                f"the workload has {len(workload.stages)} pieces, schedule {schedule.name} {len(copies[0])}"
            )
        # Stages that are one object run the same: so do their chunks.
        distinct = {id(stage): stage for stage in workload.stages}
        known = {number: _make_chunk(stage, workload, schedule) for number, stage in distinct.items()}
        chunks = [known[id(stage)] for stage in workload.stages]
        return {place: chunk for copy in copies for place, chunk in zip(copy, chunks, strict=True)}
    whole = _make_chunk(workload.stages[0], workload, schedule)
    if body is Body.MODEL:
        chunks = _split_chunk(whole, len(copies[0]))
        return {place: chunk for copy in copies for place, chunk in zip(copy, chunks, strict=True)}
    chunks = _split_chunk(whole, schedule.chunks // len(copies))
    return {place: chunks[place.chunk % len(chunks)] for copy in copies for place in copy}


@lru_cache(maxsize=256)
def model_copies(schedule: Schedule) -> list[list[ChunkPlace]]:
    """Return the places of each copy of the model, from its start to its end; DualPipe runs two copies."""
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


def _find_representatives(workload: Workload, micro_batches: int) -> list[int]:
    """Return for each micro-batch of the schedule the first one that differs from the default in the same way, or
    DEFAULT_MICRO_BATCH. A schedule from a file may have more micro-batches than the workload.
    """
    differs: dict[int, list[tuple[int, int, int]]] = {}
    for number, stage in enumerate(workload.stages):
        for variation in stage.variations if not stage.in_turn else ():
            difference = (number, variation.position, id(variation.layer))
            differs.setdefault(variation.micro_batch, []).append(difference)
    first: dict[tuple[tuple[int, int, int], ...], int] = {}
    representatives = [DEFAULT_MICRO_BATCH] * micro_batches
    for micro_batch in range(min(workload.micro_batches, micro_batches)):
        if micro_batch in differs:
            representatives[micro_batch] = first.setdefault(tuple(differs[micro_batch]), micro_batch)
    return representatives


_VARIED: ByIdentity[VariedBlocks] = ByIdentity(1024)


def _make_chunk(stage: Stage, workload: Workload, schedule: Schedule) -> Chunk:
    varied = _VARIED.of(stage, _vary_blocks, schedule.actions)
    return Chunk(stage.body, varied, stage.in_turn, workload.micro_batches - 1)


def _vary_blocks(stage: Stage, actions: frozenset[SlotAction]) -> VariedBlocks:
    return dict(zip(actions, stage.varied_blocks([PHASES_OF[action] for action in actions]), strict=True))


def _split_chunk(whole: Chunk, parts: int) -> list[Chunk]:
    """Return consecutive parts of nearly equal numbers of layers; the same cuts in every micro-batch."""
    if parts == 1:
        return [whole]
    count = sum(len(block.layers) * block.repeat for block in whole.default)
    if count < parts:
        raise ValueError(f"{count} layers cannot be split into {parts} chunks; use fewer stages or chunks")
    chunks = []
    for start, end in pairwise([round(count * part / parts) for part in range(parts + 1)]):
        default = _cut_blocks(whole.default, start, end)
        varied: dict[SlotAction, dict[int, Blocks]] = {}
        for action, bodies in whole.varied.items():
            cut = {which: _cut_blocks(blocks, start, end) for which, blocks in bodies.items()}
            # Equal parts stay one object, so that they are priced once.
            varied[action] = {which: blocks for which, blocks in cut.items() if blocks != default}
        chunks.append(replace(whole, default=default, varied=varied))
    return chunks


def _cut_blocks(blocks: Blocks, start: int, end: int) -> Blocks:
    """Return the layers from *start* to *end* of *blocks*, still folded."""
    cut: list[Block] = []
    for block in blocks:
        length = len(block.layers)
        first, skipped = divmod(max(start, 0), length)
        last, taken = divmod(min(end, length * block.repeat), length)
        if first == last and skipped < taken:
            cut.append(Block(block.layers[skipped:taken]))
        elif first < last:
            if skipped:
                cut.append(Block(block.layers[skipped:]))
            if repeat := last - first - (skipped > 0):
                cut.append(Block(block.layers, repeat))
            if taken:
                cut.append(Block(block.layers[:taken]))
        start, end = start - length * block.repeat, end - length * block.repeat
        if end <= 0:
            break
    return tuple(cut)


# The step.

ONCE_PHASES = (Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
# Groups whose members are on different stages: their collectives begin when the last stage has come.
ACROSS_STAGES = (Group.EMBEDDING, Group.PP, Group.WORLD)


@dataclass(frozen=True, eq=False)
class Step:
    """A step that can be simulated: its program, its prices, and what is needed to read the result."""

    program: Program
    schedule: Schedule
    lanes: Lanes
    message: Cost  # of one micro-batch between two stages
    prices: Prices
    rounds_before: int
    rounds_after: int

    @cached_property
    def base_seconds(self) -> FloatArray:
        """The price of each of the program's costs, for a host that begins with the step."""
        return self.program.price_costs(self.prices)

    @property
    def has_lead(self) -> bool:
        """Whether a host that issues one step after the other may be ahead when the step begins."""
        return self.prices.ahead and self.prices.issue_s is not None

    @property
    def host_seconds(self) -> FloatArray:
        """The prices of issuing alone."""
        issues = np.array([isinstance(cost, IssueCost) for cost in self.program.costs])
        return np.where(issues, self.base_seconds, 0.0)

    def with_lead(self, lead_s: float) -> FloatArray:
        """Return the prices for a host that is ahead by *lead_s*."""
        seconds = self.base_seconds.copy()
        seconds[self.program.costs.index(LeadCost())] = -lead_s
        return seconds

    @cached_property
    def seconds(self) -> FloatArray:
        """The price of each of the program's costs.

        A host that issues one step after the other is ahead by what the GPU had left to do when it had issued the step
        before. Then kernels run one after the other, or the host without a pause, whichever takes longer.
        """
        if not self.has_lead:
            return self.base_seconds
        step_s, host_s = makespans_s(self.program, np.array([self.base_seconds, self.host_seconds]))
        return self.with_lead(float(step_s - host_s))

    @property
    def message_s(self) -> float:
        return self.prices(self.message)


@dataclass(frozen=True)
class Conditions:
    """Factors of time by which stages or groups are slower than they should be."""

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
    """Build the program of *workload* under *schedule*, one rank for each stage; groups that are *alone* have one rank
    and do not communicate. The schedule may have fewer micro-batches where all but the first and the last are equal.

    With *prices* of issuing, each rank is paced by a host that issues its work op by op, otherwise by captured graphs;
    with prices of contention, communication slows down the computing that it overlaps.
    """
    prices = replace(prices, slow_groups=conditions.slow_groups)
    eager = prices.issue_s is not None
    chunks = split_chunks(workload, schedule, body)
    once = _list_once(workload, schedule)
    groups, named = _find_lanes(schedule, chunks.values(), once)
    lanes = Lanes(groups, send is Send.BLOCKING, eager, named)
    terms = LoweringTerms(lanes, alone.intersection(groups), eager, prices.takes is not None)
    slots = _SlotSegments(chunks, piece_factory(terms), prices, conditions.slow_stages)
    rounds = _RoundSegments(piece_factory(replace(terms, contention=False)), conditions.slow_stages)
    before, after = rounds.list_before(once), rounds.list_after(once)
    if eager and prices.ahead:
        # What begins before the step: the host, and whatever it would wait for.
        assert lanes.host_lane is not None
        op = TimedOp("lead", LeadCost(), lanes.host_lane, stores=(lanes.read,))
        lead = Segment.of("lead", [op], lanes=lanes.count)
        before.insert(0, Round(dict.fromkeys(range(schedule.stages), lead)))
    program = pipeline_program(
        schedule,
        lanes.names,
        slots.make,
        Messages(lambda kind, source, target: message, send, alike=True),
        before,
        after,
        _find_representatives(workload, schedule.micro_batches),
        [slots.key(stage, chunk) for stage in range(schedule.stages) for chunk in range(schedule.chunks)],
    )
    return Step(program, schedule, lanes, message, prices, len(before), len(after))


def _find_lanes(
    schedule: Schedule, chunks: Iterable[Chunk], once: Iterable["_OnceOps"]
) -> tuple[tuple[Channel, ...], tuple[str, ...]]:
    """Return the groups that communicate, in the order of their table, and the ops that others wait for in a later
    piece, so that their ends must be stored.
    """
    groups: set[Channel] = set()
    named: set[str] = set()
    distinct = {id(chunk): chunk for chunk in chunks}.values()
    for action in schedule.actions:
        bodies = [body for chunk in distinct for body in (chunk.default, *chunk.varied[action].values())]
        layers = {id(block.layers): block.layers for body in bodies for block in body}
        slots = [list_slot_ops(part, action) for part in layers.values()]
        groups = groups.union(*[ops.groups for ops in slots])
        named = named.union(*[ops.awaited for ops in slots])
    groups = groups.union(*[ops.groups for ops in once])
    return tuple(group for group in (*Group, *HostWay) if group in groups), tuple(sorted(named))


class _SlotSegments:
    """The segments of slots, each made once."""

    def __init__(
        self,
        chunks: Mapping[ChunkPlace, Chunk],
        factory: PieceFactory,
        prices: Prices,
        slow_stages: Mapping[int, float],
    ) -> None:
        self.chunks, self.factory, self.prices, self.slow_stages = chunks, factory, prices, slow_stages
        self.segments: dict[tuple[object, ...], Segment] = {}

    def key(self, stage: int, chunk: int) -> object:
        """Return a key that is equal for places that run the same."""
        return self.slow_stages.get(stage, 1.0), id(self.chunks[ChunkPlace(stage, chunk)])

    def make(self, stage: int, slots: tuple[SlotKind, ...]) -> Segment:
        """Return the segment of a call; stages that run the same blocks at the same speed share it."""
        factor = self.slow_stages.get(stage, 1.0)
        bodies = [self.chunks[ChunkPlace(stage, slot.chunk)].blocks(slot) for slot in slots]
        key = (factor, *map(id, bodies), *[slot.kind for slot in slots])
        if key not in self.segments:
            factory, streams = self.factory, len(bodies)
            if streams == 1:
                middle = factory.make_slot(bodies[0], slots[0].kind, factor)
            else:
                pairs = zip(bodies, slots, strict=True)
                ops = [join_slot_ops(unfold_blocks(body), slot.kind).issued for body, slot in pairs]
                middle = [(factory.interleave(ops, self.prices.seconds, factor), 1)]
            chain = ((factory.make_begin(streams), 1), *middle, (factory.make_end(streams), 1))
            self.segments[key] = Segment("", chain)
        return self.segments[key]


@dataclass(frozen=True, eq=False)
class _OnceOps:
    """The ops that one stage runs once per step."""

    before: list[IssuedOp]
    after: list[list[IssuedOp]]  # cut before each collective that spans stages
    meetings: list[Channel]  # the groups of those
    groups: frozenset[Channel]


def _list_once(workload: Workload, schedule: Schedule) -> list[_OnceOps]:
    """Return the ops of every stage; the same object for stages that run the same."""
    parts: list[list[Stage]] = [[] for _ in range(schedule.stages)]
    if workload.uniform:
        parts = [[workload.stages[0]]] * schedule.stages
    else:
        for copy in model_copies(schedule):
            for place, part in zip(copy, workload.stages, strict=True):
                parts[place.stage].append(part)
    known: dict[tuple[object, ...], _OnceOps] = {}
    once = []
    for stage, own in enumerate(parts):
        is_end = stage in (0, schedule.stages - 1)
        key = (is_end, *map(id, own))
        if key not in known:
            known[key] = _list_stage_once(own, is_end)
        once.append(known[key])
    return once


def _list_stage_once(parts: Sequence[Stage], is_end: bool) -> _OnceOps:
    """The prologue's forward comes first; its backward, in reverse, and the epilogue come last."""
    before: list[IssuedOp] = []
    last: list[IssuedOp] = []
    for part in parts:
        before += list_once_ops(part.prologue, (Phase.FORWARD,))
        last += list_once_ops(reversed(part.prologue), (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT))
        last += list_once_ops(part.epilogue, ONCE_PHASES)
    groups = {group_of(issued.op.work) for issued in before}
    after: list[list[IssuedOp]] = [[]]
    meetings: list[Channel] = []
    for issued in last:
        group = group_of(issued.op.work)
        if group is Group.EMBEDDING and not is_end:
            continue
        groups.add(group)
        if group in ACROSS_STAGES and isinstance(issued.op.work, Collective):
            after.append([])
            meetings.append(group)
        after[-1].append(issued)
    return _OnceOps(before, after, meetings, frozenset([group for group in groups if group is not None]))


class _RoundSegments:
    """Makes the rounds of what runs once per step, which begin where stages must meet."""

    def __init__(self, factory: PieceFactory, slow_stages: Mapping[int, float]) -> None:
        self.factory, self.slow_stages = factory, slow_stages

    def list_before(self, once: Sequence[_OnceOps]) -> list[Round]:
        issued = {stage: ops.before for stage, ops in enumerate(once) if ops.before}
        return [Round(self._make(issued, "before"))] if issued else []

    def list_after(self, once: Sequence[_OnceOps]) -> list[Round]:
        """Return the rounds; the first begins when all communication has ended."""
        issued = {stage: ops.after[0] for stage, ops in enumerate(once)}
        rounds = [Round(self._make(issued, "finish communication", finish=True))]
        met = [0] * len(once)
        for group in max((ops.meetings for ops in once), key=len):
            # Each passes on when the last of those before it came, so that the last knows of all.
            issued, nothing = {}, list[IssuedOp]()
            for stage, ops in enumerate(once):
                if met[stage] < len(ops.meetings) and ops.meetings[met[stage]] is group:
                    met[stage] += 1
                    issued[stage] = ops.after[met[stage]]
            first, *others = present = list(issued)
            here = self._make({first: nothing}, "come") | self._make(dict.fromkeys(others, nothing), "come", others=1)
            turns = {stage: (before,) for before, stage in pairwise(present)}
            rounds.append(Round(here, turns, in_turn=True))
            everyone = (present[-1],)
            rounds.append(Round(self._make(issued, "meet", others=1), dict.fromkeys(present, everyone)))
        return rounds

    def _make(
        self, issued: Mapping[int, Sequence[IssuedOp]], name: str, others: int = 0, finish: bool = False
    ) -> dict[int, Segment]:
        """Return the segment of each stage; those that issue the same at the same speed share it."""
        known: dict[tuple[float, int], Segment] = {}
        segments = {}
        for stage, ops in issued.items():
            factor = self.slow_stages.get(stage, 1.0)
            key = (factor, id(ops))
            if key not in known:
                known[key] = Segment("", ((self.factory.make_once(ops, name, others, finish, factor), 1),))
            segments[stage] = known[key]
        return segments
