"""Programs: for each rank the sequence of its **calls** of segments, each input bound to an output of another call.

Structure comes first and seconds last: an op names its **cost**, which is a number of seconds or a key of a price list,
and one program runs with any number of price lists. This module does not know what ops do.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from itertools import chain as join
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.limits import TASKS
from stepcast.ir.types import cached_property, dataclass, replace
from stepcast.simulation.kernels import find_kernel, find_levels
from stepcast.simulation.seconds import TABLE, PieceTable, in_ticks
from stepcast.simulation.segments import NO_LANE, Chain, Cost, Piece, ProgramError, Segment, Shape, list_bits

Signal = tuple[int, int]
"""A call, as ``ProgramBuilder.call`` numbered it, and one of its outputs."""
Number = TypeVar("Number", np.int64, np.float64)


class DeadlockError(ProgramError):
    """Calls that wait for each other: one of them, and the one that it waits for."""

    def __init__(self, words: str, call: int, blocker: int) -> None:
        super().__init__(words)
        self.call, self.blocker = call, blocker


class ProgramBuilder:
    """Collects the calls of every rank in order, for programs that are no plain pipeline."""

    def __init__(self, lanes: tuple[str, ...], ranks: int) -> None:
        self._lanes = lanes
        self._segments: dict[int, tuple[int, Segment]] = {}
        self._calls: list[list[int]] = [[] for _ in range(ranks)]
        self._segment: list[int] = []
        self._sources: list[dict[int, Signal]] = []

    def call(self, rank: int, segment: Segment, sources: Sequence[Signal | None] = ()) -> int:
        """Append a call of *segment* to *rank* with its inputs bound to *sources*; return the number of the call."""
        number, _ = self._segments.setdefault(id(segment), (len(self._segments), segment))
        call = len(self._segment)
        self._segment.append(number)
        self._sources.append({port: source for port, source in enumerate(sources) if source is not None})
        self._calls[rank].append(call)
        return call

    def bind(self, call: int, port: int, source: Signal) -> None:
        """Bind an input of an existing call to a call that may have come later."""
        self._sources[call][port] = source

    def program(self) -> "Program":
        segments = tuple(segment for _, segment in self._segments.values())
        order = [call for calls in self._calls for call in calls]
        place = {call: index for index, call in enumerate(order)}
        inputs = max((segment.inputs for segment in segments), default=0)
        source_call, source_port = np.full((2, len(order), inputs), -1, np.int64)
        for call, sources in enumerate(self._sources):
            for port, (source, output) in sources.items():
                if not 0 <= port < segments[self._segment[call]].inputs or source not in place:
                    raise ProgramError(f"call {call} binds input {port} to call {source}: one of them is not there")
                source_call[place[call], port] = place[source]
                source_port[place[call], port] = output
        start = np.cumsum([0, *(len(calls) for calls in self._calls)]).astype(np.int64)
        segment_of_call = np.array([self._segment[call] for call in order], np.int64)
        names = tuple(segment.name for segment in segments)
        return Program(self._lanes, segments, CallTable(start, segment_of_call, source_call, source_port, names=names))


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The calls level by level, and what each waits for: 1 + places in this order, 0 for the start of the step."""

    order: IntArray
    bounds: list[int]  # of the levels in *order*
    segment: IntArray  # of the calls in *order*
    waits: IntArray  # (1 + inputs) x calls in *order*: the call before on its rank, then the source of each input
    ports: IntArray  # inputs x calls in *order*: the output of the source, -1 without one

    @cached_property
    def _periods(self) -> dict[int, tuple[int, int] | None]:
        return {}

    def find_period(self, size: int) -> tuple[int, int] | None:
        """Return the first and the last of the levels whose *size* calls repeat the *size* calls before, so that they
        could follow any number of times; None where none do.
        """
        if size not in self._periods:
            self._periods[size] = None
            level_at = {bound: level for level, bound in enumerate(self.bounds)}
            # Of the calls before each one, those whose segment is not that of the call *size* later.
            differ = np.append(0, np.cumsum(self.segment[:-size] != self.segment[size:]))
            for last, end in reversed(list(enumerate(self.bounds))):
                start, middle = end - 2 * size, end - size
                is_same = middle in level_at and start in level_at and differ[start] == differ[middle]
                if is_same and self._repeats(start, size):
                    self._periods[size] = level_at[middle], last
                    break
        return self._periods[size]

    def _repeats(self, start: int, size: int) -> bool:
        """Whether the calls from *start* wait for the same as those *size* later, which wait for no earlier ones."""
        earlier, later = slice(start, start + size), slice(start + size, start + 2 * size)
        before, after = self.waits[:, earlier], self.waits[:, start + size :]
        is_same = np.array_equal(np.where(before > 0, before + size, 0), after[:, :size])
        is_near = (after == 0) | (after > start)
        return is_same and np.array_equal(self.ports[:, earlier], self.ports[:, later]) and bool(is_near.all())

    @cached_property
    def _entries(self) -> dict[tuple[int, int], IntArray]:
        return {}

    def find_entries(self, lanes: int, rows: int) -> IntArray:
        """Return (lanes + inputs) x calls: the place of each entry time among all that calls leave behind, which are
        *rows* times of each, first those of *lanes*.
        """
        if (lanes, rows) not in self._entries:
            previous, sources = self.waits[0] * rows, self.waits[1:] * rows
            inputs = np.where(self.ports >= 0, sources + lanes + self.ports, 0)
            self._entries[lanes, rows] = np.concatenate([previous + np.arange(lanes)[:, None], inputs])
        return self._entries[lanes, rows]


@dataclass(frozen=True, eq=False)
class CallTable:
    """The calls of all ranks and what each waits for. Programs that differ only in their segments share it.

    The calls of rank r are ``rank_start[r]`` to ``rank_start[r + 1]``, in order.
    """

    rank_start: IntArray
    segment: IntArray  # of each call
    source_call: IntArray  # calls x inputs: the call that gives the input; -1 if it is there from the start
    source_port: IntArray  # calls x inputs: the output of that call
    rank_names: tuple[str, ...] = ()
    micro_batches: IntArray | None = None  # calls x 2, for labels only: the micro-batches of a call, -1 for none
    names: tuple[str, ...] = ()  # of the segments

    def __post_init__(self) -> None:
        bounds = self.rank_start
        if self.rank_names and len(self.rank_names) != self.ranks:
            raise ProgramError(f"{self.ranks} ranks but {len(self.rank_names)} names")
        if bounds[0] != 0 or bounds[-1] != len(self.segment) or (bounds[1:] < bounds[:-1]).any():
            raise ProgramError("rank_start must rise from 0 to the number of calls")
        if self.source_call.shape[0] != len(self.segment) or self.source_port.shape != self.source_call.shape:
            raise ProgramError(f"sources must be {len(self.segment)} calls x inputs")

    @property
    def ranks(self) -> int:
        return len(self.rank_start) - 1

    @property
    def calls(self) -> int:
        return len(self.segment)

    @cached_property
    def rank(self) -> IntArray:
        """The rank of each call."""
        return np.repeat(np.arange(self.ranks), np.diff(self.rank_start))

    @cached_property
    def needed_outputs(self) -> IntArray:
        """The number of outputs that each segment must have, up to the last one that is called."""
        if len(self.segment) and self.segment.min() < 0:
            raise ProgramError("a call names a segment that is not there")
        bound = self.source_call >= 0
        call, port = self.source_call[bound], self.source_port[bound]
        if call.size and (call.max() >= self.calls or port.min() < 0):
            raise ProgramError("an input is bound to an output that is not there")
        needed = np.zeros(self.segment.max(initial=-1) + 1, np.int64)
        np.maximum.at(needed, self.segment[call], port + 1)
        return needed

    @cached_property
    def previous(self) -> IntArray:
        """1 + the call before each call on its rank; 0 for the first."""
        previous = np.arange(self.calls)
        previous[self.rank_start[:-1][np.diff(self.rank_start) > 0]] = 0
        return previous

    @cached_property
    def plan(self) -> CallPlan:
        """The calls by level."""
        levels, counts = self.levels, np.bincount(self.levels)
        # Short numbers are sorted by counting.
        order = np.argsort(levels.astype(np.int16) if len(counts) < 2**15 else levels, kind="stable")
        place = np.zeros(self.calls + 1, np.int64)
        place[1 + order] = np.arange(1, self.calls + 1)
        waits = np.empty((1 + self.source_call.shape[1], self.calls), np.int64)
        waits[0] = place[self.previous[order]]
        waits[1:] = place.take(1 + self.source_call.take(order, 0).T)
        ports = np.where(waits[1:] > 0, self.source_port.take(order, 0).T, -1)
        return CallPlan(order, [0, *np.cumsum(counts).tolist()], self.segment[order], waits, ports)

    def entries(self, left_s: FloatArray, lanes: int) -> FloatArray:
        """Return calls x (lanes + inputs): the entry times of every call, from what all calls left behind."""
        given = left_s[1 + self.source_call, np.where(self.source_call >= 0, lanes + self.source_port, 0)]
        return np.concatenate([left_s[self.previous, :lanes], np.where(self.source_call >= 0, given, 0.0)], axis=1)

    @cached_property
    def levels(self) -> IntArray:
        """The level of each call: the number of calls on the longest chain that leads to it.

        ProgramError if calls wait for each other in a circle.
        """
        kernel, starts = find_kernel(find_levels), self.rank_start
        if kernel is None and self.calls > self.ranks >= 16:  # numpy is faster
            level = _find_levels_together(starts, self.source_call)
        else:
            level, ready = np.full(self.calls, -1), np.arange(self.ranks)[::-1].copy()
            tables = (self.source_call, starts, level, starts[:-1].copy(), ready, ready.copy(), level.copy())
            arrays = tables if kernel else [table.reshape(-1).tolist() for table in tables]
            (kernel or find_levels)(self.source_call.shape[1], self.ranks, *arrays)
            level = np.asarray(arrays[2], np.int64)
        waiting = np.flatnonzero(level < 0)
        if waiting.size:
            call = int(waiting[0])
            blocker = next(source for source in self.source_call[call].tolist() if source >= 0 > level[source])
            words = f"deadlock: {self._name_call(call)} waits for {self._name_call(blocker)}"
            raise DeadlockError(words, call, blocker)
        return level

    @property
    def segment_names(self) -> tuple[str, ...]:
        return self.names

    def _name_call(self, call: int) -> str:
        rank, segment = int(self.rank[call]), int(self.segment[call])
        name = self.rank_names[rank] if self.rank_names else f"rank {rank}"
        called = self.segment_names[segment] if self.segment_names else f"segment {segment}"
        return f"call {call - self.rank_start[rank]} of {name} ({called})"


def _find_levels_together(starts: IntArray, sources: IntArray) -> IntArray:
    """Return the level of each call. In each round every rank runs its next call, if all that it waits for have run."""
    calls, inputs = sources.shape
    # After all calls: one that never runs, which follows the last of each rank, and inputs that are there at the start.
    level = np.append(np.full(calls + 1, -1), 0)
    waits = np.append(sources.T if inputs else level[None, :calls], np.full((inputs or 1, 1), calls), axis=1)
    following = np.arange(1, calls + 2)
    following[starts[1:] - 1] = calls
    position, rounds = np.where(starts[:-1] < starts[1:], starts[:-1], calls), 0
    while True:
        (ready,) = np.logical_and.reduce(level.take(waits.take(position, 1)) >= 0).nonzero()
        if not ready.size:
            return level[:calls]
        running = position.take(ready)
        level[running] = rounds
        position[ready] = following.take(running)
        rounds += 1


@lru_cache(maxsize=1024)
def _list_read(mask: int) -> IntArray:
    return np.array(list_bits(mask), np.int64)


@dataclass(frozen=True, eq=False)
class Program:
    """Segments and the calls of them."""

    lanes: tuple[str, ...]  # lanes, then registers
    segments: tuple[Segment, ...]
    table: CallTable
    segment_of: IntArray | None = None  # the index here of each segment that the table names; None: the same

    def __post_init__(self) -> None:
        if self.segment_of is not None:  # the segments were made for this table
            return
        if {segment.chain.lanes for segment in self.segments} - {len(self.lanes)}:
            raise ProgramError(f"every segment must have the {len(self.lanes)} lanes of the program")
        needed, outputs = self.table.needed_outputs, np.array([segment.outputs for segment in self.segments], np.int64)
        if len(needed) > len(outputs):
            raise ProgramError("a call names a segment that is not there")
        if self.table.source_call.shape[1] != self.inputs:
            raise ProgramError(f"sources must be {self.calls} calls x {self.inputs} inputs")
        if (outputs[: len(needed)] < needed).any():
            raise ProgramError("an input is bound to an output that is not there")

    @property
    def rank(self) -> IntArray:
        return self.table.rank

    @property
    def ranks(self) -> int:
        return self.table.ranks

    @property
    def calls(self) -> int:
        return self.table.calls

    @cached_property
    def segment(self) -> IntArray:
        """The segment of each call."""
        return self.table.segment if self.segment_of is None else self.segment_of[self.table.segment]

    def find_segments(self, plan: CallPlan) -> IntArray:
        """Return the segments of the calls in the order of *plan*."""
        return plan.segment if self.segment_of is None else self.segment_of[plan.segment]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the segments of the call table."""
        return self.table.segment_names or tuple([segment.name for segment in self.segments])

    @cached_property
    def limits(self) -> tuple[IntArray, int, int, int, int]:
        """The lanes and registers whose times a call may need, always the first lane; the most inputs and outputs of
        any segment, the width of the largest matrix of a piece, and the most nodes of a piece.
        """
        mask, inputs, outputs, width, nodes = 1, 0, 0, 1, 1
        for read, ins, outs, wide, several in [segment.chain.limits for segment in self.segments]:
            mask |= read
            inputs = ins if ins > inputs else inputs  # in a sixth of the time that zip and max take
            outputs = outs if outs > outputs else outputs
            width = wide if wide > width else width
            nodes = several if several > nodes else nodes
        return _list_read(mask), inputs, outputs, width, nodes

    @property
    def inputs(self) -> int:
        """The most inputs of any segment."""
        return self.limits[1]

    @cached_property
    def number_of(self) -> dict[tuple[Piece, int], int]:
        """The number of each distinct piece with the list that its costs belong to, -1 for none."""
        bound = [zip(own.chain.pieces, own.piece_lists, strict=True) for own in self.segments]
        return {key: number for number, key in enumerate(dict.fromkeys(join.from_iterable(bound)))}

    @cached_property
    def pieces(self) -> list[tuple[Piece, int]]:
        """The distinct pieces, each with the list that its costs belong to."""
        return list(self.number_of)

    @cached_property
    def ops_of(self) -> list[slice]:
        """The ops of each piece among those of all pieces."""
        ends = [0, *accumulate([piece.shape.ops for piece, _ in self.pieces])]
        return list(starmap(slice, pairwise(ends)))

    @property
    def costs(self) -> tuple[Cost, ...]:
        """The cost of each op of all pieces, piece by piece."""
        return tuple(join.from_iterable([piece.costs for piece, _ in self.pieces]))

    @cached_property
    def chains(self) -> list[list[tuple[int, int]]]:
        """The pieces of each segment by their number, with their repeats."""
        triples = [zip(own.chain.pieces, own.piece_lists, own.times, strict=True) for own in self.segments]
        return [[(self.number_of[piece, source], repeat) for piece, source, repeat in own] for own in triples]

    @cached_property
    def layout(self) -> tuple[IntArray, IntArray]:
        """The records of pieces, and all segments as the compiled engine reads them: sizes, the number of pieces of
        each, the records of all pieces, their lists and their repeats, and the lanes that are read.
        """
        is_coded = any(segment.lists for segment in self.segments)
        table = TABLE if is_coded else PieceTable(False)
        records, every = table.find([segment.chain for segment in self.segments])
        places, lists, repeats, lengths = list[int](), list[int](), list[int](), list(map(len, every))
        for own, segment in zip(every, self.segments, strict=True):
            places += own
            lists += segment.piece_lists
            repeats += segment.times
        read, *sizes = self.limits
        counts = (len(lengths), len(places), len(self.lanes), *sizes[:2], len(read), *sizes[2:])
        return records, np.array([*counts, *lengths, *places, *lists, *repeats, *read.tolist()], np.int64)

    def price_costs(self) -> FloatArray:
        """Return the costs, which must be seconds, in whole ticks."""
        if not all(isinstance(cost, float | int) for cost in self.costs):
            raise ProgramError("costs that are not seconds need a list of prices")
        return in_ticks(np.array(self.costs, np.float64))

    def write_out_seconds(self, seconds: FloatArray) -> FloatArray:
        """Return *seconds* of the ops of all pieces in the order of ``written_out``."""
        numbers = [self.number_of[bound] for bound in self.written_out.pieces]
        return np.concatenate([np.zeros(0), *[seconds[self.ops_of[number]] for number in numbers]])

    @cached_property
    def is_unfolded(self) -> bool:
        return all(sum(segment.times) == 1 for segment in self.segments)

    @cached_property
    def written_out(self) -> "Program":
        """The same program with every repeat of every piece as a call of its own."""
        TASKS.check(self.written_tasks)
        if self.segment_of is not None:
            named = zip(self.segment_of.tolist(), self.names, strict=True)
            segments = [replace(self.segments[index], name=name) for index, name in named]
            return Program(self.lanes, tuple(segments), self.table).written_out
        if self.is_unfolded:
            return self
        flat: dict[tuple[int, str], int] = {}
        parts = []
        for chain, name in zip(self.chains, self.names, strict=True):
            numbers = [flat.setdefault((number, name), len(flat)) for number, _ in chain]
            parts.append(np.repeat(numbers, [repeat for _, repeat in chain]))
        start = self.flat_start
        most = max(segment.outputs for segment in self.segments)
        places = np.zeros((len(self.segments), max(most, 1), 2), np.int64)
        for row, segment in zip(places, self.segments, strict=True):
            first = [0, *accumulate(segment.times)]
            for port, (index, output) in enumerate(segment.chain.output_places):
                row[port] = first[index], output
        source_call, source_port = np.full((2, start[-1], self.inputs), -1, np.int64)
        rows, ports = np.nonzero(self.table.source_call >= 0)
        sources = self.table.source_call[rows, ports]
        place = places[self.segment[sources], self.table.source_port[rows, ports]]
        source_call[start[rows], ports] = start[sources] + place[:, 0]
        source_port[start[rows], ports] = place[:, 1]
        batches = self.table.micro_batches
        labels = None if batches is None else np.repeat(batches, np.diff(start), axis=0)
        names = tuple(name for _, name in flat)
        sources_of = (self._spread(parts, start), source_call, source_port)
        table = CallTable(start[self.table.rank_start], *sources_of, self.table.rank_names, labels, names)
        pieces = [(*self.pieces[number], name) for number, name in flat]
        flat_segments = [Segment(name, Chain((piece,)), (own,)) for piece, own, name in pieces]
        return Program(self.lanes, tuple(flat_segments), table)

    @property
    def written_tasks(self) -> int:
        """The number of tasks of ``written_out``."""
        ops = [sum(self.pieces[number][0].shape.ops * repeat for number, repeat in chain) for chain in self.chains]
        return int(np.array(ops, np.int64)[self.segment].sum()) if ops else 0

    @cached_property
    def flat_start(self) -> IntArray:
        """The first call of ``written_out`` for each call, and their number."""
        pieces = np.array([sum(segment.times) for segment in self.segments], np.int64)
        return np.concatenate([[0], np.cumsum(pieces[self.segment])]).astype(np.int64)

    @cached_property
    def task_start(self) -> IntArray:
        """The first task of each call. Tasks are ops of calls: op i of call c is task ``task_start[c] + i``."""
        ops = np.array([segment.shape.ops for segment in self.segments], np.int64)
        starts = np.zeros(self.calls + 1, np.int64)
        np.cumsum(ops[self.segment], out=starts[1:])
        return starts

    @property
    def tasks(self) -> int:
        return int(self.task_start[-1])

    @cached_property
    def segment_shapes(self) -> tuple[tuple[Shape, ...], IntArray]:
        """The distinct shapes of segments of one piece, and the shape of each segment."""
        number: dict[Shape, int] = {}
        index = [number.setdefault(segment.shape, len(number)) for segment in self.segments]
        return tuple(number), np.array(index, np.int64)

    @cached_property
    def source_tasks(self) -> IntArray:
        """calls x inputs: the task whose end gives the input, or -1; for a program written out."""
        most = max([1, *[segment.outputs for segment in self.segments]])
        output = np.zeros((len(self.segments), most), np.int64)
        for row, segment in zip(output, self.segments, strict=True):
            row[: segment.outputs] = segment.shape.outputs
        op = output[self.segment[self.table.source_call], np.maximum(self.table.source_port, 0)]
        return np.where(self.table.source_call >= 0, self.task_start[:-1][self.table.source_call] + op, -1)

    def segment_seconds(self, seconds: FloatArray) -> list[FloatArray]:
        """Return the duration of each op of each segment of one piece."""
        return [seconds[self.ops_of[number]] for ((number, _),) in self.chains]

    def task_calls(self) -> IntArray:
        """Return the call of every task."""
        return np.repeat(np.arange(self.calls), np.diff(self.task_start))

    def task_lanes(self) -> IntArray:
        """Return the lane of every task, or NO_LANE."""
        return self.per_task([segment.shape.lane for segment in self.segments])

    def task_durations_s(self, seconds: FloatArray | None = None) -> FloatArray:
        """Return the duration of every task: the array to change for jitter or slow ranks, then run unfolded."""
        return self.per_task(self.segment_seconds(self.price_costs() if seconds is None else seconds))

    def per_task(self, per_segment: Sequence[NDArray[Number]]) -> NDArray[Number]:
        """Return values of the ops of each segment as values of every task."""
        return self._spread(per_segment, self.task_start)

    def _spread(self, per_segment: Sequence[NDArray[Number]], start: IntArray) -> NDArray[Number]:
        """Return values of the parts of each segment as values of the parts of every call, which begin at *start*."""
        if not self.calls:
            return np.zeros(0, per_segment[0].dtype if per_segment else np.int64)
        all_parts = np.concatenate(per_segment)
        parts = np.array([len(part) for part in per_segment], np.int64)
        offset = (np.cumsum(parts) - parts)[self.segment] - start[:-1]
        spread = np.repeat(offset, np.diff(start))
        spread += np.arange(start[-1])
        return all_parts[spread]

    def lane_busy_s(self, seconds: FloatArray | None = None, runs: IntArray | None = None) -> FloatArray:
        """Return ranks x lanes: the time in which each lane runs an op. Calls run once, or each as often as *runs*."""
        seconds = self.price_costs() if seconds is None else seconds
        busy_s = np.zeros((len(self.pieces), len(self.lanes)))
        for row, (piece, _), ops in zip(busy_s, self.pieces, self.ops_of, strict=True):
            used = piece.shape.lane != NO_LANE
            np.add.at(row, piece.shape.lane[used], seconds[ops][used])
        per_segment = np.zeros((len(self.segments), len(self.lanes)))
        for row, chain in zip(per_segment, self.chains, strict=True):
            for number, repeat in chain:
                row += repeat * busy_s[number]
        per_call = per_segment[self.segment] if runs is None else per_segment[self.segment] * runs[:, None]
        bounds = pairwise(self.table.rank_start.tolist())
        return np.array([per_call[first:last].sum(axis=0) for first, last in bounds])


@dataclass(frozen=True, eq=False)
class Times:
    """The start and end of every task of a program."""

    start_s: FloatArray
    end_s: FloatArray

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))
