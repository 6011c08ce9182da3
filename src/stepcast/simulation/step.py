"""One training step as a program: the pipeline's slots, and what runs once before and after them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.group import Channel, Group, HostWay
from stepcast.ir.identity import ByIdentity, Remembered
from stepcast.ir.work import Collective, Work, group_of
from stepcast.ir.workload import Phase, Stage, Workload, unfold_blocks
from stepcast.simulation.chunks import Body, Chunk, find_representatives, model_copies, number_signature, split_chunks
from stepcast.simulation.costs import Prices
from stepcast.simulation.engine import makespans_s
from stepcast.simulation.lanes import Lanes
from stepcast.simulation.lowering import (
    ContentionSlot,
    CostSlot,
    IssuedOp,
    LoweringTerms,
    OpList,
    PieceFactory,
    describe_list,
    join_slot_ops,
    list_once_ops,
    piece_factory,
)
from stepcast.simulation.messages import Messages, Send, SlotKind
from stepcast.simulation.pipeline import Round, pipeline_program
from stepcast.simulation.program import Program, in_ticks
from stepcast.simulation.schedule import ChunkPlace, Schedule
from stepcast.simulation.segments import Cost, Piece, Segment, TimedOp

ONCE_PHASES = (Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
# Groups whose members are on different stages: their collectives begin when the last stage has come.
ACROSS_STAGES = (Group.EMBEDDING, Group.PP, Group.WORLD)


MESSAGE, LEAD = "message", "lead"
"""The costs of a message between two stages, and of a host that began before the step."""
PricedList = tuple[OpList, float]
"""A list of ops, and how many times slower than it should be its stage computes."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A program whose costs are slots, shared by all steps that differ in their costs alone.

    The seconds of a step are 0, those of a message, those of the works (and issues) of its lists, and what computing
    loses to communication; *index* has for each op of the program its place among them.
    """

    program: Program
    lanes: Lanes
    alone: frozenset[Channel]
    rounds_before: int
    rounds_after: int
    index: IntArray
    is_issue: BoolArray
    used: frozenset[int]  # the lists that some piece runs
    contention: list[tuple[int, ContentionSlot]]  # with the list that it belongs to

    @classmethod
    def of(
        cls, program: Program, terms: LoweringTerms, lists: Sequence[PricedList], rounds_before: int, rounds_after: int
    ) -> "StepPlan":
        sizes = [len(ops.issued) for ops, _ in lists]
        starts = 2 + np.cumsum([0, *sizes]) * (2 if terms.eager else 1)
        contention: list[tuple[int, ContentionSlot]] = []
        index, is_issue = [], []
        for piece in program.pieces:
            own = _index_slots(piece.costs)
            if piece.source >= 0:
                own = np.where(own >= 2, own - 2 + starts[piece.source], own)
                is_issue.append(own >= starts[piece.source] + sizes[piece.source])
                if piece.costs and isinstance(piece.costs[-1], ContentionSlot):
                    own[-1] = starts[-1] + len(contention)
                    is_issue[-1][-1] = False
                    contention.append((piece.source, piece.costs[-1]))
            else:
                is_issue.append(np.zeros(len(own), bool))
            index.append(own)
        places, issues = np.concatenate([np.zeros(0, np.int64), *index]), np.concatenate([np.zeros(0, bool), *is_issue])
        used = frozenset([piece.source for piece in program.pieces])
        return cls(program, terms.lanes, terms.alone, rounds_before, rounds_after, places, issues, used, contention)

    @cached_property
    def has_messages(self) -> bool:
        return bool((self.index == 1).any())


_INDICES: ByIdentity[IntArray] = ByIdentity(4096)


def _index_slots(costs: tuple[Cost, ...]) -> IntArray:
    """Return 0 for costs of nothing, 1 for messages and 2 + the place of slots in their list."""

    def place(cost: Cost) -> int:
        return 2 + cost.place if isinstance(cost, CostSlot) else int(cost == MESSAGE)

    return _INDICES.of(costs, lambda costs, key: np.array([place(cost) for cost in costs], np.int64), 0)


@dataclass(frozen=True, eq=False)
class Step:
    """A step that can be simulated: its program, its prices, and what is needed to read the result."""

    plan: StepPlan
    schedule: Schedule
    lists: list[PricedList]
    message: Cost  # of one micro-batch between two stages
    prices: Prices
    program: Program  # of the plan, or the same under another schedule

    @property
    def lanes(self) -> Lanes:
        return self.plan.lanes

    def price(self, prices: Prices) -> FloatArray:
        """Return the seconds of each op of the program under *prices*, in whole ticks."""
        plan, alone = self.plan, self.plan.alone
        works: dict[int, FloatArray] = {}
        parts = [np.array([0.0, prices.message_s(self.message) if plan.has_messages else 0.0])]
        for number, (ops, factor) in enumerate(self.lists):
            if number not in plan.used:
                parts.append(np.zeros(len(ops.issued) * (2 if self.lanes.host else 1)))
                continue
            works[number] = prices.works_s(ops, alone)
            parts.append(prices.spend_s(ops, works[number], factor))
            if self.lanes.host:
                parts.append(prices.issues_s(ops))
        lost_s = []
        for number, slot in plan.contention:
            ops, factor = self.lists[number]
            lost_s.append(prices.contention_s(slot, ops, works[number].tolist(), factor))
        return in_ticks(np.concatenate([*parts, lost_s])[plan.index])

    @cached_property
    def base_seconds(self) -> FloatArray:
        """The seconds of each op, for a host that begins with the step."""
        return self.price(self.prices)

    @property
    def works(self) -> list[tuple[Work | None, float]]:
        """The work of each op of the program written out, None where it is no work of a list, with its delay."""
        works: list[tuple[Work | None, float]] = []
        for piece in self.program.written_out.pieces:
            issued = self.lists[piece.source][0].issued if piece.source >= 0 else []
            for cost in piece.costs:
                if isinstance(cost, CostSlot) and cost.place < len(issued):
                    layer, op, _ = issued[cost.place]
                    works.append((op.work, 0.0 if group_of(op.work) is None else layer.process_s))
                else:
                    works.append((self.message if cost == MESSAGE else None, 0.0))  # type: ignore[arg-type]
        return works

    def list_works(self) -> Iterator[Work]:
        """Yield the works that run, equal ones more than once."""
        for number in sorted(self.plan.used - {-1}):
            yield from [work for work, runs in self.lists[number][0].running(self.plan.alone) if runs]
        if self.plan.has_messages and not isinstance(self.message, float | int):
            yield self.message  # type: ignore[misc]

    @property
    def has_lead(self) -> bool:
        """Whether a host that issues one step after the other may be ahead when the step begins."""
        return self.prices.ahead and self.prices.issue_s is not None

    @property
    def host_seconds(self) -> FloatArray:
        """The seconds of issuing alone."""
        return np.where(self.plan.is_issue, self.base_seconds, 0.0)

    def with_lead(self, lead_s: float) -> FloatArray:
        """Return the seconds for a host that is ahead by *lead_s*."""
        seconds = self.base_seconds.copy()
        seconds[self.program.costs.index(LEAD)] = -lead_s
        return seconds

    @cached_property
    def seconds(self) -> FloatArray:
        """The seconds of each op of the program.

        A host that issues one step after the other is ahead by what the GPU had left to do when it had issued the step
        before. Then kernels run one after the other, or the host without a pause, whichever takes longer.
        """
        if not self.has_lead:
            return self.base_seconds
        step_s, host_s = makespans_s(self.program, np.array([self.base_seconds, self.host_seconds]))
        return self.with_lead(float(step_s - host_s))

    @property
    def message_s(self) -> float:
        return self.prices.message_s(self.message)


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
    eager, slow = prices.issue_s is not None, conditions.slow_stages
    chunks, once = split_chunks(workload, schedule, body), _list_once(workload, schedule)
    # Places that run the same chunk at the same speed, and the lists of all of them.
    same: dict[tuple[int, float], int] = {}
    distinct_chunks: list[tuple[Chunk, float]] = []
    places = []
    for stage in range(schedule.stages):
        factor = slow.get(stage, 1.0)
        for number in range(schedule.chunks):
            chunk = chunks[ChunkPlace(stage, number)]
            index = same.setdefault((id(chunk), factor), len(same))
            if index == len(distinct_chunks):
                distinct_chunks.append((chunk, factor))
            places.append(index)
    lists = _ListNumbers()
    pattern = [lists.number(ops, factor) for chunk, factor in distinct_chunks for ops in chunk.lists]
    pattern += [lists.number(ops, slow.get(stage, 1.0)) for stage, own in enumerate(once) for ops in own.lists]
    groups = frozenset().union(*[ops.groups for ops, _ in lists.every])
    representatives = find_representatives(workload, schedule.micro_batches)
    alone = alone & groups
    key = (
        schedule,
        (send, alone, eager, prices.ahead, prices.takes is None, message == 0),
        tuple(places),
        tuple([chunk.signature for chunk, _ in distinct_chunks]),
        tuple([own.signature for own in once]),
        tuple(pattern),
        representatives,
    )
    plan = _PLANS.get(key)
    if plan is None:
        named = frozenset().union(*[ops.awaited for chunk, _ in distinct_chunks for ops in chunk.lists])
        channels = tuple(group for group in (*Group, *HostWay) if group in groups)
        lanes = Lanes(channels, send is Send.BLOCKING, eager, tuple(sorted(named)))
        terms = LoweringTerms(lanes, alone, eager, prices.takes is not None)
        slots = _SlotSegments(chunks, piece_factory(terms), prices, slow, lists)
        rounds = _RoundSegments(piece_factory(replace(terms, contention=False)), slow, lists)
        before, after = rounds.list_before(once), rounds.list_after(once)
        if eager and prices.ahead:
            # What begins before the step: the host, and whatever it would wait for.
            assert lanes.host_lane is not None
            op = TimedOp("lead", LEAD, lanes.host_lane, stores=(lanes.read,))
            lead = Segment.of("lead", [op], lanes=lanes.count)
            before.insert(0, Round(dict.fromkeys(range(schedule.stages), lead)))
        messages = Messages(lambda kind, source, target: 0.0 if message == 0 else MESSAGE, send, alike=True)
        program = pipeline_program(schedule, lanes.names, slots.make, messages, before, after, representatives, places)
        plan = StepPlan.of(program, terms, lists.every, len(before), len(after))
        if not slots.has_pairs:  # the order of their ops depends on prices
            if len(_PLANS) >= MOST_PLANS:
                _PLANS.clear()
            _PLANS[key] = plan
    return Step(plan, schedule, lists.every, message, prices, plan.program)


MOST_PLANS = 2048
_PLANS = Remembered[tuple[object, ...], StepPlan]()


class _ListNumbers:
    """Numbers lists of ops by what they are and how fast they run."""

    def __init__(self) -> None:
        self.every: list[PricedList] = []
        self._number: dict[tuple[int, float], int] = {}

    def number(self, ops: OpList, factor: float) -> int:
        number = self._number.setdefault((id(ops), factor), len(self.every))
        if number == len(self.every):
            self.every.append((ops, factor))
        return number


class _SlotSegments:
    """The segments of slots, each made once."""

    def __init__(
        self,
        chunks: Mapping[ChunkPlace, Chunk],
        factory: PieceFactory,
        prices: Prices,
        slow_stages: Mapping[int, float],
        lists: _ListNumbers,
    ) -> None:
        self.chunks, self.factory, self.prices, self.slow_stages, self.lists = (
            chunks,
            factory,
            prices,
            slow_stages,
            lists,
        )
        self.segments: dict[tuple[object, ...], Segment] = {}
        self.pieces: dict[tuple[int, bool], Piece] = {}
        self.has_pairs = False

    def make(self, stage: int, slots: tuple[SlotKind, ...]) -> Segment:
        """Return the segment of a call; stages that run the same blocks at the same speed share it."""
        factor = self.slow_stages.get(stage, 1.0)
        own = [self.chunks[ChunkPlace(stage, slot.chunk)] for slot in slots]
        key = (factor, *[(id(chunk), chunk.find_slot(slot)) for chunk, slot in zip(own, slots, strict=True)])
        if key not in self.segments:
            factory, streams = self.factory, len(slots)
            if streams == 1:
                middle = self._chain(own[0].slots[own[0].find_slot(slots[0])], factor)
            else:
                pairs = zip(own, slots, strict=True)
                ops = [join_slot_ops(unfold_blocks(chunk.blocks(slot)), slot.kind) for chunk, slot in pairs]
                joined, piece = factory.interleave(ops, self.prices.seconds, factor)
                middle = [(piece.with_source(self.lists.number(joined, factor)), 1)]
                self.has_pairs = True
            chain = ((factory.make_begin(streams), 1), *middle, (factory.make_end(streams), 1))
            self.segments[key] = Segment("", chain)
        return self.segments[key]

    def _chain(self, blocks: Sequence[tuple[OpList, int]], factor: float) -> list[tuple[Piece, int]]:
        """Return the pieces of *blocks* with their repeats."""
        pieces = [(self._piece(ops, factor, True), repeat) for ops, repeat in blocks]
        if pieces and pieces[-1][0].costs and isinstance(pieces[-1][0].costs[-1], ContentionSlot):
            # Collectives that outlast the last piece overlap no other.
            piece, repeat = pieces.pop()
            pieces += [(piece, repeat - 1)] if repeat > 1 else []
            pieces.append((self._piece(blocks[-1][0], factor, False), 1))
        return pieces

    def _piece(self, ops: OpList, factor: float, continues: bool) -> Piece:
        number = self.lists.number(ops, factor)
        if (number, continues) not in self.pieces:
            piece = self.factory.make_layers(ops.sequences, continues)
            self.pieces[number, continues] = piece.with_source(number)
        return self.pieces[number, continues]


@dataclass(frozen=True, eq=False)
class _OnceOps:
    """The ops that one stage runs once per step."""

    before: OpList
    after: tuple[OpList, ...]  # cut before each collective that spans stages
    meetings: tuple[Channel, ...]  # the groups of those

    @cached_property
    def lists(self) -> tuple[OpList, ...]:
        return (self.before, *self.after)

    @cached_property
    def signature(self) -> int:
        key = (self.meetings, *[ops.sequences for ops in self.lists])
        return number_signature(key)


_ONCE: ByIdentity[_OnceOps] = ByIdentity(8192)


def _list_once(workload: Workload, schedule: Schedule) -> list[_OnceOps]:
    """Return the ops of every stage; the same object for stages that run the same."""
    parts: list[list[Stage]] = [[] for _ in range(schedule.stages)]
    if workload.uniform:
        parts = [[workload.stages[0]]] * schedule.stages
    else:
        for copy in model_copies(schedule):
            for place, part in zip(copy, workload.stages, strict=True):
                parts[place.stage].append(part)
    once = []
    for stage, own in enumerate(parts):
        is_end = stage in (0, schedule.stages - 1)
        once.append(_ONCE.get(own, partial(_list_stage_once, own, is_end), is_end))
    return once


def _list_stage_once(parts: Sequence[Stage], is_end: bool) -> _OnceOps:
    """The prologue's forward comes first; its backward, in reverse, and the epilogue come last."""
    before: list[IssuedOp] = []
    last: list[IssuedOp] = []
    for part in parts:
        before += list_once_ops(part.prologue, (Phase.FORWARD,))
        last += list_once_ops(reversed(part.prologue), (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT))
        last += list_once_ops(part.epilogue, ONCE_PHASES)
    after: list[list[IssuedOp]] = [[]]
    meetings: list[Channel] = []
    for issued in last:
        group = group_of(issued.op.work)
        if group is Group.EMBEDDING and not is_end:
            continue
        if group in ACROSS_STAGES and isinstance(issued.op.work, Collective):
            after.append([])
            meetings.append(group)
        after[-1].append(issued)
    return _OnceOps(describe_list(before), tuple(map(describe_list, after)), tuple(meetings))


class _RoundSegments:
    """Makes the rounds of what runs once per step, which begin where stages must meet."""

    def __init__(self, factory: PieceFactory, slow_stages: Mapping[int, float], lists: _ListNumbers) -> None:
        self.factory, self.slow_stages, self.lists = factory, slow_stages, lists

    def list_before(self, once: Sequence[_OnceOps]) -> list[Round]:
        issued = {stage: ops.before for stage, ops in enumerate(once) if ops.before.issued}
        return [Round(self._make(issued, "before"))] if issued else []

    def list_after(self, once: Sequence[_OnceOps]) -> list[Round]:
        """Return the rounds; the first begins when all communication has ended."""
        issued = {stage: ops.after[0] for stage, ops in enumerate(once)}
        rounds = [Round(self._make(issued, "finish communication", finish=True))]
        met = [0] * len(once)
        for group in max((ops.meetings for ops in once), key=len):
            # Each passes on when the last of those before it came, so that the last knows of all.
            issued, nothing = {}, describe_list([])
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
        self, issued: Mapping[int, OpList], name: str, others: int = 0, finish: bool = False
    ) -> dict[int, Segment]:
        """Return the segment of each stage; those that issue the same at the same speed share it."""
        known: dict[tuple[float, int], Segment] = {}
        segments = {}
        for stage, ops in issued.items():
            factor = self.slow_stages.get(stage, 1.0)
            key = (factor, id(ops))
            if key not in known:
                piece = self.factory.make_once(ops.sequences, name, others, finish)
                source = self.lists.number(ops, factor) if ops.issued else -1
                known[key] = Segment("", ((piece.with_source(source), 1),))
            segments[stage] = known[key]
        return segments
