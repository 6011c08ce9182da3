"""One training step as a program: the pipeline's slots, and what runs once before and after them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.layout import Channel, Group, HostWay
from stepcast.ir.types import ByIdentity, cached_property, dataclass, replace
from stepcast.ir.work import Collective, Work, group_of
from stepcast.ir.workload import Layer, Stage, Workload, unfold_blocks
from stepcast.simulation import lowering
from stepcast.simulation.chunks import Body, Chunk, find_positions, find_representatives, split_chunks
from stepcast.simulation.costs import Prices
from stepcast.simulation.engine import makespans_s
from stepcast.simulation.lanes import Lanes
from stepcast.simulation.messages import Messages, Send, SlotKind
from stepcast.simulation.pipeline import Round, RoundTemplate, SameCalls, pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.seconds import (
    CODES,
    FIRST_WORK,
    KIND_NUMBERS,
    LEAD,
    MESSAGE,
    CollectiveGroup,
    CostSlot,
    WorkSeconds,
    find_shared,
    in_ticks,
)
from stepcast.simulation.segments import Chain, Cost, Segment, TimedOp

# Groups whose members are on different stages: their collectives begin when the last stage has come.
ACROSS_STAGES = (Group.EMBEDDING, Group.PP, Group.WORLD)


NO_WAITS: Mapping[int, tuple[int, ...]] = {}
NO_OPS = lowering.OpList.join(())
PricedList = tuple[lowering.OpList, float]
"""A list of ops, and how many times slower than it should be its stage computes."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A program whose costs are places in lists of works, shared by all steps of the same chunks."""

    program: Program
    lanes: Lanes
    alone: frozenset[Channel]
    rounds: tuple[int, int]  # before the slots and after them
    lists: tuple[PricedList, ...]

    @cached_property
    def starts(self) -> list[int]:
        """The first work of each list, and the end of all."""
        return [0, *accumulate([ops.size for ops, _ in self.lists])]

    @cached_property
    def op_lists(self) -> list[lowering.OpList]:
        return [ops for ops, _ in self.lists]

    @cached_property
    def terms(self) -> tuple[IntArray, FloatArray]:
        """The starts and the factors of the lists, after those of the list -1."""
        return np.array([0, *self.starts], np.int64), np.array([1.0, *[factor for _, factor in self.lists]])

    @cached_property
    def shared(self) -> tuple[bool, frozenset[CollectiveGroup]]:
        """Whether there are messages, and the kinds of collectives that slow computing down."""
        pieces = {piece for segment in self.program.segments for piece in segment.chain.pieces}
        messages, kinds = zip(*map(find_shared, pieces), strict=True)
        return any(messages), frozenset().union(*kinds)

    @cached_property
    def is_uneven(self) -> bool:
        """Whether some ops take longer than their works by themselves."""
        return any(factor != 1.0 or ops.sequence.has_delays for ops, factor in self.lists)


@dataclass(frozen=True, eq=False)
class Step:
    """A step that can be simulated: its program, its prices, and what is needed to read the result."""

    plan: StepPlan
    schedule: Schedule
    message: Cost  # of one micro-batch between two stages
    prices: Prices
    program: Program  # of the plan, or the same under another schedule

    @property
    def lanes(self) -> Lanes:
        return self.plan.lanes

    def price(self, prices: Prices) -> WorkSeconds:
        """Return the seconds of the works under *prices*."""
        plan, (has_messages, kinds) = self.plan, self.plan.shared
        works_s = prices.works_s(plan.op_lists, plan.alone)
        message_s = prices.message_s(self.message) if has_messages else 0.0
        issues = prices.issues_s(plan.op_lists) if self.lanes.host else []
        exact_s = seconds = np.concatenate([(0.0, message_s, 0.0), works_s, *issues])
        if prices.slow_groups or plan.is_uneven:
            seconds = exact_s.copy()
            for (ops, factor), (start, stop) in zip(plan.lists, pairwise(plan.starts), strict=True):
                own = slice(FIRST_WORK + start, FIRST_WORK + stop)
                seconds[own] = prices.spend_s(ops, exact_s[own], factor)
        shares, slows = np.zeros(len(KIND_NUMBERS)), np.ones(len(KIND_NUMBERS))
        if prices.takes:
            for kind, group in kinds:
                number = KIND_NUMBERS[kind, group]
                shares[number], slows[number] = prices.takes(kind, group), prices.slow_groups.get(group, 1.0)
        return WorkSeconds(in_ticks(seconds), exact_s, *plan.terms, shares, slows)

    @cached_property
    def base_seconds(self) -> WorkSeconds:
        """The seconds of the works, for a host that begins with the step."""
        return self.price(self.prices)

    @property
    def works(self) -> list[tuple[Work | None, float]]:
        """The work of each op of the program written out, None where it is no work of a list, with its delay."""
        works: list[tuple[Work | None, float]] = []
        for piece, own in self.program.written_out.pieces:
            issued = self.plan.lists[own][0].issued if own >= 0 else []
            for cost in piece.costs:
                if isinstance(cost, CostSlot) and not cost.is_issue:
                    layer, op, _ = issued[cost.place]
                    works.append((op.work, 0.0 if group_of(op.work) is None else layer.process_s))
                else:
                    works.append((self.message if cost == MESSAGE else None, 0.0))  # type: ignore[arg-type]
        return works

    def list_works(self) -> Iterator[Work]:
        """Yield the works that run, equal ones more than once."""
        for ops in self.plan.op_lists:
            features = zip(ops.works, ops.sequence.ops, strict=True)
            yield from [work for work, op in features if op.runs and op.group not in self.plan.alone]
        if self.plan.shared[0] and not isinstance(self.message, float | int):
            yield self.message  # type: ignore[misc]

    @property
    def has_lead(self) -> bool:
        """Whether a host that issues one step after the other may be ahead when the step begins."""
        return self.prices.ahead and self.prices.issue_s is not None

    def host_seconds(self, prices: WorkSeconds) -> WorkSeconds:
        """Return those of *prices* that are spent with issuing."""
        return replace(self.pace_host(prices, 1.0, 0.0), exact_s=np.zeros_like(prices.exact_s))

    def pace_host(self, prices: WorkSeconds, pace: float, others: float = 1.0) -> WorkSeconds:
        """Return *prices* with a host that takes *pace* times as long, and all else *others* times."""
        issues = FIRST_WORK + prices.works
        seconds = np.concatenate([prices.seconds[:issues] * others, prices.seconds[issues:] * pace])
        return replace(prices, seconds=in_ticks(seconds))

    def with_lead(self, prices: WorkSeconds, lead_s: float) -> WorkSeconds:
        """Return *prices* for a host that is ahead by *lead_s*."""
        seconds = prices.seconds.copy()
        seconds[CODES[LEAD]] = -lead_s
        return replace(prices, seconds=seconds)

    def add_lead(self, prices: WorkSeconds) -> WorkSeconds:
        """Return *prices* for a host that issues one step after the other.

        It is ahead by what the GPU had left to do when it had issued the step before. Then kernels run one after the
        other, or the host without a pause, whichever takes longer.
        """
        if not self.has_lead:
            return prices
        step_s, host_s = makespans_s(self.program, [prices, self.host_seconds(prices)])
        return self.with_lead(prices, step_s - host_s)

    @cached_property
    def seconds(self) -> WorkSeconds:
        """The seconds of the works."""
        return self.add_lead(self.base_seconds)

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
    speeds = tuple([conditions.slow_stages.get(stage, 1.0) for stage in range(schedule.stages)])
    chunks, places = split_chunks(workload, schedule, body)
    once, turns = _list_once(workload, schedule, places, speeds)
    representatives = find_representatives(workload, schedule.micro_batches)

    def make_plan() -> StepPlan:
        builder = _PlanBuilder(schedule, chunks, places, once, turns, prices, speeds, alone, send, message == 0)
        return builder.build(representatives)

    terms = (send, alone, prices.issue_s is None, prices.ahead, prices.takes is None, message == 0)
    key = (places, turns, terms, speeds, representatives)
    # Slots that run as a pair are put into an order that depends on prices.
    plan = make_plan() if schedule.has_pairs else _PLANS.get((schedule, *chunks, *once), make_plan, *key)
    return Step(plan, schedule, message, prices, plan.program)


_PLANS: ByIdentity[StepPlan] = ByIdentity(2048)


class _PlanBuilder:
    """Puts the chunks of a step into the slots of its schedule."""

    def __init__(
        self,
        schedule: Schedule,
        chunks: Sequence[Chunk],
        places: tuple[int, ...],
        once: Sequence["_OnceOps"],
        turns: tuple[int, ...],
        prices: Prices,
        speeds: tuple[float, ...],
        alone: frozenset[Group],
        send: Send,
        is_free: bool,
    ) -> None:
        """*places*: the chunk of each place; *turns*: the ops of each stage among *once*; *speeds*: how many times
        slower than it should be each stage computes; *is_free*: messages take no time.
        """
        self.schedule, self.chunks, self.places, self.once, self.turns = schedule, chunks, places, once, turns
        self.prices, self.speeds, self.messages = prices, speeds, _find_messages(0.0 if is_free else MESSAGE, send)
        sequences = [ops.sequence for own in once for ops in own.lists]
        slots = {ops.sequence for chunk in chunks for lists, _ in chunk.slots.values() for ops in lists}
        groups = frozenset().union(*[sequence.groups for sequence in (*slots, *sequences)])
        named = frozenset().union(*[sequence.awaited for sequence in slots])
        terms = (send is Send.BLOCKING, prices.issue_s is not None, prices.takes is not None)
        self.factory, self.once_factory = _find_factories(groups, named, alone & groups, *terms)
        self.lanes, self.terms = self.factory.lanes, self.factory.terms
        self.lists: dict[PricedList, int] = {}

    def build(self, representatives: tuple[int, ...]) -> StepPlan:
        schedule, speeds, once = self.schedule, self.speeds, self.once
        before, after = _plan_rounds(self.turns, tuple([(ops.lists[0].size > 0, ops.meetings) for ops in once]))
        rounds = list(map(self._make_round, before)), list(map(self._make_round, after))
        if self.terms.eager and self.prices.ahead:
            # What begins before the step: the host, and whatever it would wait for.
            assert self.lanes.host_lane is not None
            op = TimedOp("lead", LEAD, self.lanes.host_lane, stores=(self.lanes.read,))
            lead = Segment.of("lead", [op], lanes=self.lanes.count)
            rounds[0].insert(0, Round.of(dict.fromkeys(range(schedule.stages), lead)))
        # Chunks that run at different speeds are different.
        number = {speed: len(self.chunks) * index for index, speed in enumerate(dict.fromkeys(speeds))}
        same = [place + number[speeds[index // schedule.chunks]] for index, place in enumerate(self.places)]
        variants = tuple([chunk.variants for chunk in self.chunks])
        same_calls = SameCalls(
            tuple(same), self.turns, lambda stage, slot: self._chunk(stage, slot).find_slot(slot), variants
        )
        program = pipeline_program(
            schedule, self.lanes.names, self._segment, self.messages, *rounds, representatives, same_calls
        )
        counts = len(rounds[0]), len(rounds[1])
        return StepPlan(program, self.lanes, self.terms.alone, counts, tuple(self.lists))

    def _chunk(self, stage: int, slot: SlotKind) -> Chunk:
        return self.chunks[self.places[stage * self.schedule.chunks + slot.chunk]]

    def _segment(self, stage: int, slots: tuple[SlotKind, ...]) -> Segment:
        """Return the segment of a call of *slots*."""
        factor, lists = self.speeds[stage], self.lists
        own = [self._chunk(stage, slot) for slot in slots]
        if len(slots) == 1:
            every, repeats = own[0].slots[own[0].find_slot(slots[0])]
            chain = self.factory.make_chain(tuple([ops.sequence for ops in every]), bool(repeats) and repeats[-1] > 1)
        else:
            pairs = zip(own, slots, strict=True)
            ops = [lowering.join_slot_ops(unfold_blocks(chunk.blocks(slot)), slot.kind) for chunk, slot in pairs]
            joined, piece = self.factory.interleave(ops, self.prices.seconds, factor)
            begin, end = self.factory.make_ends(len(slots))
            chain, every, repeats = Chain((begin, piece, end)), [joined], (1,)
        numbers = [lists.setdefault((ops, factor), len(lists)) for ops in every]
        if len(chain.pieces) > 2 + len(numbers):  # the last of them is another piece
            numbers, repeats = [*numbers, numbers[-1]], (*repeats[:-1], repeats[-1] - 1, 1)
        return Segment("", chain, (-1, *numbers, -1), (1, *repeats, 1))

    def _make_round(self, plan: "_RoundPlan") -> Round:
        segments = {}
        for stage, turn, place, others in plan.parts:
            own = self.once[turn]
            ops = own.lists[place]
            source = self.lists.setdefault((ops, own.factor), len(self.lists)) if ops.size else -1
            chain = self.once_factory.make_once(ops.sequence, plan.name, others, plan.name == FINISH)
            segments[stage] = Segment("", chain, (source,))
        return Round(plan.template, segments)


_find_messages = lru_cache(Messages)
FINISH = "finish communication"
"""The round that begins when all communication has ended."""


class _RoundPlan(NamedTuple):
    """A round: for each kind of stage the first such stage, its turn, which of its lists it runs, and for how many
    others it waits.
    """

    name: str
    template: RoundTemplate
    parts: tuple[tuple[int, int, int, int], ...]


@lru_cache(maxsize=1024)
def _plan_rounds(
    turns: tuple[int, ...], once: tuple[tuple[bool, tuple[Channel, ...]], ...]
) -> tuple[list[_RoundPlan], list[_RoundPlan]]:
    """Return the rounds before and after the slots; *once* has for each turn whether anything runs before them, and
    the groups for which stages must meet after them.
    """

    def plan(
        name: str,
        present: Sequence[int],
        places: Sequence[int],
        waits: Mapping[int, tuple[int, ...]] = NO_WAITS,
        in_turn: bool = False,
    ) -> _RoundPlan:
        parts = {(turns[stage], len(waits.get(stage, ()))): stage for stage in reversed(present)}
        rows = [(stage, turn, places[turn], others) for (turn, others), stage in reversed(parts.items())]
        return _RoundPlan(name, RoundTemplate(tuple(present), tuple(waits.items()), in_turn), tuple(rows))

    every = range(len(turns))
    starting = [stage for stage in every if once[turns[stage]][0]]
    before = [plan("before", starting, [0] * len(once))] if starting else []
    place = [1] * len(once)
    after = [plan(FINISH, every, place)]
    for group in max([meetings for _, meetings in once], key=len):
        # Each passes on when the last of those before it came, so that the last knows of all.
        meets = [(*meetings, None)[number - 1] is group for number, (_, meetings) in zip(place, once, strict=True)]
        place = [number + comes for number, comes in zip(place, meets, strict=True)]
        present = [stage for stage in every if meets[turns[stage]]]
        in_turn = {stage: (before,) for before, stage in pairwise(present)}
        after.append(plan("come", present, [-1] * len(once), in_turn, in_turn=True))
        after.append(plan("meet", present, place, dict.fromkeys(present, (present[-1],))))
    return before, after


@lru_cache(maxsize=256)
def _find_factories(
    groups: frozenset[Channel], named: frozenset[str], alone: frozenset[Channel], *flags: bool
) -> tuple[lowering.PieceFactory, lowering.PieceFactory]:
    """Return what makes the pieces of slots, and of what runs once per step, where nothing slows computing down."""
    receives, eager, contention = flags
    channels = tuple([group for group in (*Group, *HostWay) if group in groups])
    lanes = Lanes(channels, receives, eager, tuple(sorted(named)))
    terms = lowering.LoweringTerms(lanes, alone, eager, contention)
    return lowering.PieceFactory(terms), lowering.PieceFactory(replace(terms, contention=False))


@dataclass(frozen=True, eq=False)
class _OnceOps:
    """The ops that one stage runs once per step."""

    lists: tuple[lowering.OpList, ...]  # those before the slots; those after, cut where stages meet; none
    meetings: tuple[Channel, ...]  # the groups for which they do
    factor: float  # how many times slower than it should be the stage computes


_ONCE: ByIdentity[_OnceOps] = ByIdentity(8192)


def _list_once(
    workload: Workload, schedule: Schedule, places: tuple[int, ...], speeds: tuple[float, ...]
) -> tuple[list[_OnceOps], tuple[int, ...]]:
    """Return the ops of different stages, and the number of those of each stage."""
    chunks = 0 if workload.uniform else schedule.chunks
    positions = None if workload.uniform else find_positions(schedule)
    known: dict[object, int] = {}
    once: dict[_OnceOps, int] = {}
    turns = []
    for stage, factor in enumerate(speeds):
        is_end = stage == 0 or stage == schedule.stages - 1
        key = (places[stage * chunks : (stage + 1) * chunks], is_end, factor)
        if key not in known:
            own = [0] if positions is None else positions[stage * chunks : (stage + 1) * chunks]
            parts = [workload.stages[position] for position in own]
            made_of = [layers for part in parts for layers in (part.prologue, part.epilogue)]
            ops = _ONCE.get(made_of, partial(_list_stage_once, parts, is_end, factor), is_end, factor)
            known[key] = once.setdefault(ops, len(once))
        turns.append(known[key])
    return list(once), tuple(turns)


def _list_stage_once(parts: Sequence[Stage], is_end: bool, factor: float) -> _OnceOps:
    """The prologue's forward comes first; its backward, in reverse, and the epilogue come last."""
    before = [lowering.OpList.of_layer(layer, layer.forward) for part in parts for layer in part.prologue]
    after: list[list[lowering.OpList]] = [[]]
    meetings: list[Channel] = []
    for part in parts:
        last = [(layer, True) for layer in reversed(part.prologue)] + [(layer, False) for layer in part.epilogue]
        for layer, is_begun in last:
            (first, *others), met = _CUT_LAYERS.of(layer, _cut_layer, (is_begun, is_end))
            after[-1].append(first)
            after += [[part] for part in others]
            meetings += met
    lists = [own[0] if len(own) == 1 else lowering.OpList.join(own) if own else NO_OPS for own in (before, *after)]
    return _OnceOps((*lists, NO_OPS), tuple(meetings), factor)


def _cut_layer(layer: Layer, terms: tuple[bool, bool]) -> tuple[list[lowering.OpList], list[Channel]]:
    """Return the ops of a layer cut where stages meet, and the groups for which they do."""
    is_begun, is_end = terms  # its forward ran before the slots; it is on the first or the last stage
    every = layer.input_gradient + layer.weight_gradient if is_begun else layer.all_ops
    ops = every if is_end else [op for op in every if group_of(op.work) is not Group.EMBEDDING]
    groups = [op.work.group if isinstance(op.work, Collective) else None for op in ops]
    cuts = [place for place, group in enumerate(groups) if group in ACROSS_STAGES]
    lists = [lowering.OpList.of_layer(layer, ops[start:stop]) for start, stop in pairwise((0, *cuts, len(ops)))]
    return lists, [groups[place] for place in cuts]  # type: ignore[misc]


_CUT_LAYERS: ByIdentity[tuple[list[lowering.OpList], list[Channel]]] = ByIdentity(8192)
