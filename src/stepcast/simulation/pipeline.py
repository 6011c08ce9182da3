"""A schedule and the segments of its stages, joined into one program.

A call runs one slot, or two that are interleaved; its segment has one input and one output for each of them: the
activation or gradient that it needs, and the one that it produces. Each stage is a rank; rendezvous messages add a rank
for each pair of stages and direction. Which rank calls which segment when, and what waits for what, depends on the
schedule alone: it is a ``PipelineTemplate``, built once with array operations and shared by all strategies.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import IntArray, distinct, distinct_rows
from stepcast.ir.types import ByIdentity, cached_property, dataclass
from stepcast.simulation import messages as wiring
from stepcast.simulation.program import CallTable, Program
from stepcast.simulation.schedule import Schedule, SlotAction
from stepcast.simulation.segments import Chain, Piece, ProgramError, Segment, TimedOp, intern_chain


class RoundTemplate(NamedTuple):
    """One call of some stages, once per step. Stages that meet in it wait for outputs of the round before."""

    stages: tuple[int, ...]
    waits: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Stages with those whose output 0 of the round before is input 0, 1, ... of their segments."""
    in_turn: bool = False  # they wait for outputs of this same round instead, one after the other


Rounds = tuple[RoundTemplate, ...]


class Round(NamedTuple):
    """A round with the segments of its stages; stages that run the same need only the first."""

    template: RoundTemplate
    segments: Mapping[int, Segment]

    @classmethod
    def of(
        cls, segments: Mapping[int, Segment], waits: Mapping[int, tuple[int, ...]] | None = None, in_turn: bool = False
    ) -> "Round":
        """Return the round of the stages that have *segments*; *waits* as in its template."""
        return cls(RoundTemplate(tuple(segments), tuple((waits or {}).items()), in_turn), segments)


Slots = tuple[wiring.SlotKind, ...]
"""The one or two slots of a call."""


@dataclass(frozen=True, eq=False)
class PipelineTemplate(CallTable):
    """The calls of a pipeline without their segments, whose numbers are those of the kinds of its slots, of the calls
    of its rounds and of its channels.
    """

    # Always given; fields that follow optional ones need a default.
    slots: "SlotTable" = None  # type: ignore[assignment]
    rounds: "RoundTable" = None  # type: ignore[assignment]

    @property
    def segment_names(self) -> tuple[str, ...]:
        codes = ["+".join([f"{slot.kind.letter}.{slot.chunk}" for slot in slots]) for slots in self.slots.codes]
        kinds = [codes[code] or "messages" for code in self.slots.near[0].tolist()]
        return (*kinds, *[""] * len(self.rounds.calls), *["message"] * len(self.slots.channels))

    @cached_property
    def _groups(self) -> dict[object, "CallGroups"]:
        return {}

    def group_calls(self, same: "SameCalls") -> "CallGroups":
        """Return the kinds of calls that run something different."""
        key = (same.places, same.turns, same.variants)
        groups = self._groups.get(key)
        if groups is None:
            calls, runs, which = self.slots.group(same)
            rounds, others = self.rounds.group(same.turns)
            channels = len(calls) + len(rounds) + np.arange(len(self.slots.channels))
            groups = CallGroups(calls, runs, rounds, np.concatenate([which, len(calls) + others, channels]))
            self._groups[key] = groups
        return groups


SlotGroups = tuple[list[tuple[wiring.CallFrame, int]], list[tuple[int, Slots]], IntArray]


class CallGroups(NamedTuple):
    """The kinds of calls of a pipeline that run something different: those of slots, of rounds, then the channels."""

    slots: list[tuple[wiring.CallFrame, int]]  # with the number of what they run among *runs*
    runs: list[tuple[int, Slots]]  # stage and slots of one of the calls that run the same slots of the same chunks
    rounds: list[tuple[int, int]]  # round and stage
    which: IntArray  # for each kind of the template its number


@lru_cache(maxsize=512)
def build_template(
    schedule: Schedule, mode: wiring.Send, representatives: tuple[int, ...], before: Rounds, after: Rounds
) -> PipelineTemplate:
    """Build the calls of *schedule*; *representatives* has for each micro-batch the one it runs the same as."""
    return _lay_rounds(schedule.stages, before, after).join(_find_calls(schedule, mode, representatives))


_TEMPLATES: ByIdentity[PipelineTemplate] = ByIdentity(1024)


class RoundTable:
    """The calls of all rounds, each with the number of its round and its stage."""

    def __init__(self, stages: int, before: Rounds, after: Rounds) -> None:
        rounds = (*before, *after)
        self.calls = [(number, stage) for number, template in enumerate(rounds) for stage in template.stages]
        index = {call: place for place, call in enumerate(self.calls)}
        self.stage = np.array([stage for _, stage in self.calls], np.int64)
        # On each side of the slots the calls of each stage, and the number of those before each call.
        self.counts: tuple[list[int], list[int]] = ([0] * stages, [0] * stages)
        sides, place = [self.counts[number >= len(before)] for number, _ in self.calls], []
        for side, (_, stage) in zip(sides, self.calls, strict=True):
            place.append(side[stage])
            side[stage] += 1
        self.place, self.is_after = np.array(place, np.int64), np.array([call[0] >= len(before) for call in self.calls])
        # Calls x inputs: the call that gives the input, or -1.
        most = max([0, *[len(others) for template in rounds for _, others in template.waits]])
        self.sources = np.full((len(self.calls), most), -1, np.int64)
        for number, template in enumerate(rounds):
            awaited = number if template.in_turn else number - 1
            for stage, others in template.waits:
                if absent := [other for other in others if (awaited, other) not in index]:
                    words = f"stage {stage} waits for stage {absent[0]}, which takes no part in the round before"
                    raise ProgramError(words)
                self.sources[index[number, stage], : len(others)] = [index[awaited, other] for other in others]
        self.groups: dict[tuple[int, ...], tuple[list[tuple[int, int]], IntArray]] = {}

    def group(self, turns: tuple[int, ...]) -> tuple[list[tuple[int, int]], IntArray]:
        """Return one of the calls of each round that run the same (their stages have the same turn and wait for as many
        others), and its number for each call.
        """
        if turns not in self.groups:
            turn_of, waits = turns or range(len(self.calls)), (self.sources >= 0).sum(1).tolist()
            keys = [(number, turn_of[stage], count) for (number, stage), count in zip(self.calls, waits, strict=True)]
            first = dict(zip(reversed(keys), reversed(self.calls), strict=True))
            number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
            self.groups[turns] = [first[key] for key in number], np.array([number[key] for key in keys], np.int64)
        return self.groups[turns]

    def join(self, slots: "SlotTable") -> PipelineTemplate:
        """Return the calls of *slots* on each stage between those of the rounds, then those of the channels."""
        first, last = map(np.array, self.counts)
        ends = np.cumsum(slots.counts + first + last)
        starts = ends - slots.counts - last  # of the slots
        kinds, rounds, calls, own = len(slots.stage), len(self.calls), len(slots.kind), int(slots.counts.sum())
        # The number of each call of a slot or channel, then -1 for none. Channels follow all stages.
        numbers = np.arange(rounds, rounds + calls + 1)
        numbers[:own] = np.arange(own) + np.repeat(starts - np.cumsum(slots.counts) + slots.counts, slots.counts)
        numbers[calls] = -1
        placed = numbers[:calls]
        turns = np.where(self.is_after, (starts + slots.counts)[self.stage], (starts - first)[self.stage]) + self.place
        segment = np.empty(calls + rounds, np.int64)
        segment[placed] = slots.kind
        segment[placed[own:]] += rounds
        segment[turns] = np.arange(kinds, kinds + rounds)
        inputs, met = slots.source_call.shape[1], self.sources.shape[1]
        source_call, source_port = np.full((2, len(segment), max(inputs, met)), -1, np.int64)
        source_call[placed, :inputs] = numbers.take(slots.source_call)
        source_port[placed, :inputs] = slots.source_port
        if rounds:
            source_call[turns, :met] = np.where(self.sources < 0, -1, turns[self.sources])
            source_port[turns, :met] = np.minimum(self.sources, 0)
        labels = np.full((len(segment), 2), -1, np.int64)
        labels[placed] = slots.batches
        rank_start = np.concatenate([[0], ends, ends[-1] + np.cumsum(slots.channel_counts, dtype=np.int64)])
        return PipelineTemplate(
            rank_start, segment, source_call, source_port, slots.rank_names, labels, (), slots, self
        )


def _number_slots(
    schedule: Schedule, representatives: tuple[int, ...]
) -> tuple[list[Slots], IntArray, IntArray, IntArray]:
    """Return the slots of calls of any stage (nothing comes first), and for each call its stage, the number of its
    slots, and its micro-batches, -1 where it has no second slot.
    """
    action, batch, chunk, with_next = np.ascontiguousarray(schedule.slots.T)
    index, stage = np.arange(len(action)), np.repeat(np.arange(schedule.stages), schedule.counts)
    slot = action * schedule.chunks + chunk
    own = stage * (len(SlotAction) * schedule.chunks) + slot
    number, place = 4 * slot, np.full(schedule.stages * len(SlotAction) * schedule.chunks, -1, np.int64)
    place[own[::-1]] = index[::-1]
    number[place[place >= 0]] += 2  # the first of its action and chunk
    if SlotAction.WEIGHT in schedule.actions:
        # Weight gradients are complete after the last whole backward or the last weight half, whichever is later.
        place[:] = -1
        own -= (action == SlotAction.WEIGHT) * (SlotAction.WEIGHT - SlotAction.BACKWARD) * schedule.chunks
    place[own] = index
    number[place[place >= 0]] += 1  # the last one
    different = sorted({*representatives}) or [wiring.DEFAULT_MICRO_BATCH]
    if len(different) > 1:
        number = number * len(different) + np.searchsorted(different, representatives)[batch]
    second, most = np.full_like(batch, -1), 0
    if schedule.has_pairs:
        most = int(number.max()) + 2
        starts = np.flatnonzero(np.concatenate([[True], with_next[:-1] == 0]))
        paired = with_next[starts] > 0
        partner = np.where(paired, starts + 1, starts)
        second = np.where(paired, batch[partner], -1)
        number = number[starts] * most + np.where(paired, 1 + number[partner], 0)
        batch, stage = batch[starts], stage[starts]
    values, _, code = distinct(number)

    def describe(value: int) -> wiring.SlotKind:
        value, representative = divmod(value, len(different))
        value, ends = divmod(value, 4)
        kind, chunk = divmod(value, schedule.chunks)
        return wiring.SlotKind(ACTIONS[kind], chunk, ends >= 2, ends % 2 > 0, different[representative])

    pairs = [divmod(value, most) if most else (value, 0) for value in values.tolist()]
    codes: list[Slots] = [(), *[(describe(own), *([describe(other - 1)] if other else [])) for own, other in pairs]]
    return codes, stage, code + 1, np.stack([batch, second], axis=1)


class SlotTable:
    """The calls of the slots of all stages, stage by stage, then those of the channels between stages."""

    def __init__(self, schedule: Schedule, mode: wiring.Send, representatives: tuple[int, ...]) -> None:
        """In blocking mode an empty call at each end of a stage posts the first receive, or lets the last send pass."""
        self.schedule = schedule
        self.codes, stage, code, batches = _number_slots(schedule, representatives)
        if mode is wiring.Send.BLOCKING:
            ends = np.searchsorted(stage, np.arange(schedule.stages + 1))
            # Where one stage ends and the next begins, its own end comes first.
            bounds = np.concatenate([ends[1:], ends[:-1]])
            batches, code = np.insert(batches, bounds, -1, axis=0), np.insert(code, bounds, 0)
            stage = np.insert(stage, bounds, np.tile(np.arange(schedule.stages), 2))
        near = [code]  # the slots of each call, then those of the call after it and of the one before it
        if mode is not wiring.Send.EAGER:
            is_last = np.append(stage[1:] != stage[:-1], True)
            after = np.where(is_last, 0, np.roll(code, -1))
            near += [after, np.where(np.roll(is_last, 1), 0, np.roll(code, 1))]
        number = stage
        for part in (*near[2:], *near[:2]):
            number = number * len(self.codes) + part
        _, first, self.kind = distinct(number)
        self.counts, self.batches = np.bincount(stage, minlength=schedule.stages), batches
        self.stage, self.near = stage[first], np.stack([part[first] for part in near])  # of each kind
        self.rank_names = tuple([f"stage {stage}" for stage in range(schedule.stages)])
        self.groups: dict[object, SlotGroups] = {}
        self._find_frames(mode)
        self._bind_inputs(mode)

    def _find_frames(self, mode: wiring.Send) -> None:
        """Find the chunks of each slot of all codes, and the frame of each kind of call."""
        chunks, near, width = self.schedule.chunks, self.near, 1 + self.schedule.has_pairs
        slots = [[slot.kind * chunks + slot.chunk for slot in own] + [-1] * (width - len(own)) for own in self.codes]
        slot = np.array(slots, np.int64)
        self.chunk = np.maximum(np.where(slot.T < 0, slot[:, 0], slot.T), 0) % chunks
        place, own = self.stage[:, None] * (len(SlotAction) * chunks), slot[near]
        passages = np.where(own < 0, 0, _number_passages(self.schedule).take(place + own, mode="clip"))
        # One number for the passages of a call: the last comes first, 0 is none.
        own = passages[..., 0] if width == 1 else passages[..., 1] * (1 + len(PASSAGES)) + passages[..., 0]
        first, self.frame = distinct_rows(own)
        self.frames = []
        for numbers in own[:, first].T.tolist():
            pairs = [divmod(number, 1 + len(PASSAGES))[::-1] for number in numbers]
            parts = [tuple([PASSAGES[passage - 1] for passage in pair if passage]) for pair in pairs]
            self.frames.append(wiring.frame_template(mode, wiring.CallContext(parts[0], *parts[:0:-1])))

    def _bind_inputs(self, mode: wiring.Send) -> None:
        """Bind the inputs of calls to the calls and outputs that give the signals."""
        batches, places = self.schedule.micro_batches, self.schedule.stages * self.schedule.chunks
        size = (1 if mode is wiring.Send.EAGER else len(wiring.MessageSignal)) * 2 * places * batches
        self.signals = np.full((2, size + batches + 1), -1, np.int64)  # at the end those that nobody gives
        for entries in zip_longest(*[frame.given for frame in self.frames], fillvalue=wiring.NOWHERE):
            index, outputs = self._find_signals(entries)
            self.signals[0][index], self.signals[1][index] = np.arange(len(index)), outputs
        self.signals[:, size:] = -1
        wires = zip_longest(*[frame.wires for frame in self.frames], fillvalue=wiring.NOWHERE)
        ports = [self._find_signals(entries)[0] for entries in wires]
        # Messages that wait for their receiver are calls of their own: direction, sender, receiver, chunk and places.
        routes = []
        for direction in range(2) if mode is wiring.Send.RENDEZVOUS else ():
            for place, goal in enumerate(self.schedule.neighbours[1 - direction].tolist()):
                (sender, chunk), receiver = divmod(place, self.schedule.chunks), goal // self.schedule.chunks
                if receiver not in (-1, sender):
                    routes.append((direction, sender, receiver, chunk, place, goal))
        routes.sort()
        self.channels, self.channel_counts = [direction for direction, *_ in routes], list[int]()
        if routes:
            ports = self._add_channels(routes, ports, size // len(wiring.MessageSignal))
        index = np.stack(ports, axis=1) if ports else np.zeros((len(self.kind), 0), np.int64)
        self.source_call, self.source_port = self.signals[0].take(index), self.signals[1].take(index)
        del self.signals

    def _find_signals(self, entries: Sequence[wiring.Wire]) -> tuple[IntArray, IntArray]:
        """Return for each call the place of the signal that its frame has among *entries*, and its output."""
        near, schedule = self.schedule.neighbours, self.schedule
        signal, direction, way, slot, move, output = np.array(entries, np.int64).T.take(self.frame, 1)
        place = self.stage * schedule.chunks + self.chunk[slot, self.near[move, np.arange(len(move))]]
        place = np.where(way < 0, place, near[way, place])
        first = ((2 * signal + direction) * near.shape[1] + place) * schedule.micro_batches
        first = np.where(signal < 0, self.signals.shape[1] - schedule.micro_batches, first)
        moved = (2 * move + slot).take(self.kind) + np.arange(0, self.batches.size, 2)
        return first.take(self.kind) + self.batches.take(moved, mode="wrap"), output.take(self.kind)

    def _add_channels(self, routes: Sequence[tuple[int, ...]], ports: list[IntArray], step: int) -> list[IntArray]:
        """Add the messages of *routes* in the order of their senders; return the signals of the inputs of all calls,
        those of the calls of slots being *ports*. Signals of one kind begin *step* after those of the one before.
        """
        schedule, calls = self.schedule, len(self.kind)
        ranks = {rank: number for number, rank in enumerate(dict.fromkeys([route[:3] for route in routes]))}
        parts = []
        for kind, route in enumerate(routes, len(self.stage)):
            direction, chunk, ends = route[0], route[3], np.array(route[4:])[:, None]
            batch = np.array(schedule.micro_batches_of(chunk), np.int64)
            sent, received = (direction * len(schedule.neighbours[0]) + ends) * schedule.micro_batches + batch
            parts.append(np.stack(np.broadcast_arrays(ranks[route[:3]], sent, step + received, kind, batch)))
        rows = np.concatenate(parts, axis=1)
        rank, ready, posted, kind_of_call, batch = rows[:, np.lexsort((self.signals[0][rows[1]], rows[0]))]
        nowhere = np.full(calls + len(rank), self.signals.shape[1] - 1)
        self.signals[0][2 * step + ready] = np.arange(calls, len(nowhere))
        self.signals[1][2 * step + ready] = 0
        self.channel_counts = np.bincount(rank).tolist()
        names = [
            f"{('activations', 'gradients')[direction]} {sender} to {receiver}" for direction, sender, receiver in ranks
        ]
        self.rank_names = (*self.rank_names, *names)
        self.kind = np.concatenate([self.kind, kind_of_call])
        self.batches = np.concatenate([self.batches, np.stack([batch, np.full_like(batch, -1)], axis=1)])
        pairs = zip_longest(ports, (ready, posted), fillvalue=nowhere)
        return [np.concatenate([own[:calls], waits[: len(rank)]]) for own, waits in pairs]

    def group(self, same: "SameCalls") -> SlotGroups:
        """Return the kinds of calls that run something different, as ``CallGroups`` has them."""
        key = (same.places, same.variants)
        if key in self.groups:
            return self.groups[key]
        places, count, chunks = np.array(same.places, np.int64), max(same.places) + 1, self.schedule.chunks
        ends = (self.stage == 0) + 2 * (self.stage == self.schedule.stages - 1)
        order, own, after = ends * len(self.codes) + self.near[0], self.stage * chunks, self.near[:0:-1]
        if len(after):
            _, order = distinct_rows([order, *after])
        for part in places[own + self.chunk[:, self.near[0]]]:
            order = order * count + part
        _, where, groups = distinct(order)
        calls: dict[tuple[int, int], int] = {}
        runs: dict[Hashable, int] = {}
        known: dict[Hashable, Hashable] = {}
        first_calls: list[tuple[int, Slots]] = []
        which = []
        columns = [part[where].tolist() for part in (self.stage, self.near[0], self.frame)]
        for stage, code, frame in zip(*columns, strict=True):
            parts = []
            for slot in self.codes[code]:
                variant = same.places[stage * chunks + slot.chunk], slot.kind, slot[2:]
                if variant not in known:
                    known[variant] = variant[0], same.find(stage, slot)
                parts.append(known[variant])
            run = runs.setdefault(tuple(parts), len(runs))
            if run == len(first_calls):
                first_calls.append((stage, self.codes[code]))
            which.append(calls.setdefault((frame, run), len(calls)))
        kinds = [(self.frames[frame], run) for frame, run in calls]
        self.groups[key] = kinds, first_calls, np.array(which, np.int64)[groups]
        return self.groups[key]


_lay_rounds, _find_calls = lru_cache(maxsize=512)(RoundTable), lru_cache(maxsize=256)(SlotTable)
ACTIONS, WAYS = tuple(SlotAction), (None, wiring.LOCAL, 1.0)
PASSAGES = [wiring.Passage(action, comes, goes) for action in ACTIONS for comes in WAYS for goes in WAYS]


def _number_passages(schedule: Schedule) -> IntArray:
    """Return for each stage, action and chunk 1 + the number of its passage."""
    near = schedule.neighbours.reshape(2, schedule.stages, schedule.chunks)
    is_local = near // schedule.chunks == np.arange(schedule.stages)[:, None]
    comes, goes = np.where(is_local, 1, np.where(near < 0, 0, 2))
    passages = np.full((schedule.stages, len(ACTIONS), schedule.chunks), 28)
    passages[:, 0] = 1 + 3 * comes + goes
    passages[:, 1] = 10 + 3 * goes + comes
    passages[:, 2] = 9 + passages[:, 1]
    return passages.reshape(-1)


class SameCalls(NamedTuple):
    """The calls of a pipeline that run the same segment."""

    places: tuple[int, ...]  # chunk by chunk of each stage: equal where the same runs
    turns: tuple[int, ...] = ()  # equal for stages that run the same in rounds; nothing: all differ
    find: Callable[[int, wiring.SlotKind], Hashable] = lambda stage, slot: (slot.kind, *slot[2:])
    """(stage, slot) -> equal for slots of a place that run the same, whatever their chunk."""
    variants: Hashable = None  # equal where ``find`` gives the same for the same places


EMPTY = Segment("", Chain(()))
SegmentOf = Callable[[int, Slots], Segment]
"""(stage, the slots of the call) -> segment; called once for each kind of call of a stage."""


def pipeline_program(
    schedule: Schedule,
    lanes: tuple[str, ...],
    segment_of: SegmentOf,
    messages: wiring.Messages = wiring.FREE,
    before: Sequence[Round] = (),
    after: Sequence[Round] = (),
    representatives: Sequence[int] = (),
    same_calls: SameCalls | None = None,
) -> Program:
    """Build the program of *schedule*, with the rounds that come *before* the slots and *after* them.

    *representatives* has for each micro-batch the one it runs the same as; nothing: all run the default. Without
    *same_calls*, *segment_of* is called for all stages.
    """
    mode, same_as = messages.mode, tuple(representatives)
    templates = [tuple([round_.template for round_ in rounds]) for rounds in (before, after)]
    parts = (schedule, *templates[0], *templates[1])  # which take longer to compare than to look up
    build = partial(build_template, schedule, mode, same_as, *templates)
    template = _TEMPLATES.get(parts, build, mode, same_as, len(before))
    groups = template.group_calls(same_calls or SameCalls(tuple(range(schedule.stages * schedule.chunks))))
    own, count = [round_.segments for round_ in (*before, *after)], len(lanes)
    bases = [segment_of(stage, slots) if slots else EMPTY for stage, slots in groups.runs]
    every = []
    for frame, run in groups.slots:
        base = bases[run]
        every.append(Segment("", _frame_chain(base.chain, frame, messages, count), base.lists, base.repeats))
    every += [own[number][stage] for number, stage in groups.rounds]
    for direction in template.slots.channels:
        op = TimedOp("message", messages.cost, messages.send_lanes[direction], inputs=(0, 1))
        every.append(Segment.of("message", (op,), lanes=count, inputs=2, outputs=(0,)))
    segments: dict[Segment, int] = {}
    numbers = [segments.setdefault(segment, len(segments)) for segment in every]
    return Program(lanes, tuple(segments), template, np.array(numbers, np.int64)[groups.which])


@lru_cache(maxsize=8192)
def _frame_chain(chain: Chain, frame: wiring.CallFrame, messages: wiring.Messages, lanes: int) -> Chain:
    """Return *chain* with its messages, which are joined to its ends alone."""
    pieces = chain.pieces
    if len(pieces) < 3 or any(piece.shape.ports[1] for piece in pieces[1:-1]):
        return intern_chain(_frame_pieces(pieces, frame, messages, lanes))
    first, last = _frame_pieces((pieces[0], pieces[-1]), frame, messages, lanes)
    return intern_chain((first, *pieces[1:-1], last))


@lru_cache(maxsize=1024)
def _frame_pieces(
    pieces: tuple[Piece, ...], frame: wiring.CallFrame, messages: wiring.Messages, lanes: int
) -> tuple[Piece, ...]:
    """Return *pieces* with their messages."""
    base = Segment("", Chain(pieces)) if pieces else None
    return wiring.build_frame(base, frame.context.with_cost(messages.cost), messages, lanes).segment.chain.pieces
