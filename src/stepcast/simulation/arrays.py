"""What the engines run: segments, and the calls that every rank makes of them.

A **lane** runs its ops one after the other in the order in which they were issued (a GPU stream). A
**segment** is a piece of work of one rank, such as the forward of a stage: ops in lanes, some of which wait
for inputs of the segment and some of which are its outputs. A **program** is, for each rank, the sequence of
its **calls** of segments, each input bound to an output of another call. An op starts when its lane is free
and everything it waits for has ended; the first op of a lane starts at 0. Nothing here knows what the ops do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)

NO_LANE = -1
"""The lane of an op that occupies none: it starts when what it waits for has ended (a delay, a meeting
point)."""


class ProgramError(ValueError):
    """A segment or program that contradicts itself or can never end."""


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op of a segment: its lane, its duration and what it waits for besides the op before it in its
    lane."""

    name: str
    duration_s: float
    lane: int = 0
    after: tuple[int, ...] = ()
    """Earlier ops of the segment."""
    inputs: tuple[int, ...] = ()
    """Inputs of the segment."""
    lanes: tuple[int, ...] = ()
    """Lanes whose work issued so far, in this call or before it, must have ended."""
    takes: float = 0.0
    """Seconds that work in other lanes loses for each second beside it (see ``slowed``)."""


@dataclass(frozen=True, eq=False)
class Shape:
    """The ops of a segment without their durations.

    What an op waits for is a list of nodes, the op before it in its lane first: node ``k`` below ``lanes`` is
    the time at which lane ``k`` was free when the call began, then come the inputs, then the ops.
    """

    lanes: int
    inputs: int
    names: tuple[str, ...]
    lane: Ints
    before: Ints
    before_start: Ints
    outputs: Ints
    """The op whose end is the output."""

    def __post_init__(self) -> None:
        laneless = np.flatnonzero(self.lane == NO_LANE)
        if laneless.size:
            needed = np.concatenate([self.before - self.first_op, self.outputs])
            for op in laneless[~np.isin(laneless, needed)]:
                raise ProgramError(f"op {op} ({self.names[op]}) has no lane and nothing waits for it")

    @property
    def first_op(self) -> int:
        """The node of op 0."""
        return self.lanes + self.inputs

    @property
    def ops(self) -> int:
        return len(self.lane)

    @cached_property
    def last_in_lane(self) -> Ints:
        """For each lane its last op, or -1."""
        last = np.full(self.lanes, -1, np.int64)
        used = self.lane != NO_LANE
        np.maximum.at(last, self.lane[used], np.flatnonzero(used))
        return last

    @cached_property
    def waits(self) -> tuple[tuple[int, ...], ...]:
        """``before`` of each op as plain tuples."""
        nodes, bounds = self.before.tolist(), self.before_start.tolist()
        return tuple(tuple(nodes[start:stop]) for start, stop in pairwise(bounds))

    @cached_property
    def key(self) -> tuple[int, int, bytes, bytes, bytes, bytes]:
        """Equal for shapes that behave the same."""
        arrays = (self.lane, self.before, self.before_start, self.outputs)
        lane, before, before_start, outputs = (array.tobytes() for array in arrays)
        return self.lanes, self.inputs, lane, before, before_start, outputs


@dataclass(frozen=True, eq=False)
class Segment:
    """A shape with the durations of its ops, and what they take from work beside them."""

    name: str
    shape: Shape
    duration_s: Floats
    takes: Floats

    def __post_init__(self) -> None:
        if self.duration_s.shape != (self.shape.ops,):
            raise ProgramError(
                f"segment {self.name}: {self.shape.ops} ops but {self.duration_s.size} durations"
            )
        if not (np.isfinite(self.duration_s).all() and (self.duration_s >= 0).all()):
            raise ProgramError(f"segment {self.name}: a duration is negative or not finite")

    @classmethod
    def of(
        cls, name: str, ops: Sequence[TimedOp], *, lanes: int, inputs: int = 0, outputs: Sequence[int] = ()
    ) -> "Segment":
        """The segment of *ops*, listed in the order in which they are issued."""
        shape = _shape(name, ops, lanes, inputs, outputs)
        duration_s, takes = (
            np.array(each, np.float64) for each in ([op.duration_s for op in ops], [op.takes for op in ops])
        )
        return cls(name, shape, duration_s, takes)

    def scaled(self, factor: float) -> "Segment":
        """The same ops, each *factor* times as long."""
        return replace(self, duration_s=self.duration_s * factor)

    def giving(self, outputs: Sequence[int]) -> "Segment":
        """The same ops with only these of its outputs, in this order."""
        old = self.shape
        kept = old.outputs[np.array(outputs, np.int64)]
        shape = Shape(old.lanes, old.inputs, old.names, old.lane, old.before, old.before_start, kept)
        return replace(self, shape=shape)

    def then(self, other: "Segment", bind: Mapping[int, int] | None = None) -> "Segment":
        """Both in one: the ops of *other* issued after these.

        *bind* gives inputs of *other* an output of this segment. The other inputs of *other* come after the
        inputs of this segment, its outputs after the outputs.
        """
        shape = _join(self.shape, other.shape, bind or {})
        duration_s = np.concatenate([self.duration_s, other.duration_s])
        return Segment(self.name, shape, duration_s, np.concatenate([self.takes, other.takes]))


def _shape(name: str, ops: Sequence[TimedOp], lanes: int, inputs: int, outputs: Sequence[int]) -> Shape:
    last = list(range(lanes))
    before: list[int] = []
    starts = [0]
    first_op = lanes + inputs
    for index, op in enumerate(ops):
        here = f"segment {name}: op {index} ({op.name})"
        if not NO_LANE <= op.lane < lanes or not all(0 <= lane < lanes for lane in op.lanes):
            raise ProgramError(f"{here} names a lane that is not there")
        if not all(0 <= earlier < index for earlier in op.after):
            raise ProgramError(f"{here} waits for an op that is not before it")
        if not all(0 <= port < inputs for port in op.inputs):
            raise ProgramError(f"{here} waits for an input that is not there")
        nodes = [] if op.lane == NO_LANE else [last[op.lane]]
        nodes += [first_op + earlier for earlier in op.after]
        nodes += [lanes + port for port in op.inputs]
        nodes += [last[lane] for lane in op.lanes]
        if not nodes:
            raise ProgramError(f"{here} has no lane and waits for nothing")
        before += dict.fromkeys(nodes)
        starts.append(len(before))
        if op.lane != NO_LANE:
            last[op.lane] = first_op + index
    if not all(0 <= output < len(ops) for output in outputs):
        raise ProgramError(f"segment {name}: an output is no op")
    names = tuple(op.name for op in ops)
    lane = [op.lane for op in ops]
    return Shape(
        lanes, inputs, names, *(np.array(part, np.int64) for part in (lane, before, starts, outputs))
    )


def _join(one: Shape, two: Shape, bind: Mapping[int, int]) -> Shape:
    """The nodes of *two* renamed to what they are when its ops follow those of *one*."""
    if one.lanes != two.lanes:
        raise ProgramError(f"segments of {one.lanes} and {two.lanes} lanes cannot be joined")
    free = [port for port in range(two.inputs) if port not in bind]
    inputs = one.inputs + len(free)
    first_op = one.lanes + inputs
    entry = np.where(one.last_in_lane < 0, np.arange(one.lanes), first_op + one.last_in_lane)
    ports = np.empty(two.inputs, np.int64)
    ports[free] = one.lanes + one.inputs + np.arange(len(free))
    for port, output in bind.items():
        ports[port] = first_op + one.outputs[output]
    names = np.concatenate([entry, ports, first_op + one.ops + np.arange(two.ops)])
    moved = np.where(one.before < one.first_op, one.before, one.before + len(free))
    return Shape(
        one.lanes,
        inputs,
        one.names + two.names,
        np.concatenate([one.lane, two.lane]),
        np.concatenate([moved, names[two.before]]),
        np.concatenate([one.before_start, one.before_start[-1] + two.before_start[1:]]),
        np.concatenate([one.outputs, one.ops + two.outputs]),
    )


@dataclass(frozen=True, eq=False)
class Program:
    """The calls of every rank. The calls of rank r are ``rank_start[r]`` to ``rank_start[r + 1]``, in
    order."""

    lanes: tuple[str, ...]
    segments: tuple[Segment, ...]
    rank_start: Ints
    segment: Ints
    """The segment of each call."""
    source_call: Ints
    """calls x inputs: the call that gives this input; -1 means there from the start."""
    source_port: Ints
    """calls x inputs: which output of that call."""
    rank_names: tuple[str, ...] = ()
    micro_batches: Ints | None = None
    """calls x 2, for labels only: the micro-batches that a call is about, -1 for none."""

    def __post_init__(self) -> None:
        if any(segment.shape.lanes != len(self.lanes) for segment in self.segments):
            raise ProgramError(f"every segment must have the {len(self.lanes)} lanes of the program")
        bounds = self.rank_start
        if self.rank_names and len(self.rank_names) != self.ranks:
            raise ProgramError(f"{self.ranks} ranks but {len(self.rank_names)} names")
        if bounds[0] != 0 or bounds[-1] != self.calls or (np.diff(bounds) < 0).any():
            raise ProgramError("rank_start must rise from 0 to the number of calls")
        if self.calls and not 0 <= self.segment.min() <= self.segment.max() < len(self.segments):
            raise ProgramError("a call names a segment that is not there")
        if (
            self.source_call.shape != (self.calls, self.inputs)
            or self.source_port.shape != self.source_call.shape
        ):
            raise ProgramError(f"sources must be {self.calls} calls x {self.inputs} inputs")
        call, port = (part[self.source_call >= 0] for part in (self.source_call, self.source_port))
        outputs = np.array([len(segment.shape.outputs) for segment in self.segments], np.int64)
        if call.size and (
            call.max() >= self.calls or port.min() < 0 or (port >= outputs[self.segment[call]]).any()
        ):
            raise ProgramError("an input is bound to an output that is not there")

    @property
    def ranks(self) -> int:
        return len(self.rank_start) - 1

    @property
    def calls(self) -> int:
        return len(self.segment)

    @cached_property
    def inputs(self) -> int:
        """The most inputs of any segment."""
        return max((segment.shape.inputs for segment in self.segments), default=0)

    @cached_property
    def rank(self) -> Ints:
        """The rank of each call."""
        return np.repeat(np.arange(self.ranks), np.diff(self.rank_start))

    @cached_property
    def task_start(self) -> Ints:
        """Tasks are ops of calls, numbered call by call: op i of call c is task ``task_start[c] + i``."""
        ops = np.array([segment.shape.ops for segment in self.segments], np.int64)
        starts = np.zeros(self.calls + 1, np.int64)
        np.cumsum(ops[self.segment], out=starts[1:])
        return starts

    @property
    def tasks(self) -> int:
        return int(self.task_start[-1])

    @cached_property
    def shapes(self) -> tuple[tuple[Shape, ...], Ints]:
        """The distinct shapes, and the shape of each segment."""
        index: dict[object, int] = {}
        shapes: list[Shape] = []
        of = []
        for segment in self.segments:
            number = index.setdefault(segment.shape.key, len(shapes))
            if number == len(shapes):
                shapes.append(segment.shape)
            of.append(number)
        return tuple(shapes), np.array(of, np.int64)

    def task_calls(self) -> Ints:
        """The call of every task."""
        return np.repeat(np.arange(self.calls), np.diff(self.task_start))

    def task_lanes(self) -> Ints:
        """The lane of every task, or NO_LANE."""
        return self.per_task([segment.shape.lane for segment in self.segments])

    def task_durations_s(self) -> Floats:
        """The duration of every task: the array to change for jitter or slow ranks, then run unfolded."""
        return self.per_task([segment.duration_s for segment in self.segments])

    def per_task(self, per_segment: Sequence[NDArray[Number]]) -> NDArray[Number]:
        """What each segment says of its ops, for every task."""
        if not self.calls:
            return np.zeros(0, per_segment[0].dtype if per_segment else np.int64)
        flat = np.concatenate(per_segment)
        ops = np.array([len(part) for part in per_segment], np.int64)
        offset = (np.cumsum(ops) - ops)[self.segment] - self.task_start[:-1]
        spread = np.repeat(offset, np.diff(self.task_start))
        spread += np.arange(self.tasks)
        return flat[spread]

    def lane_busy_s(self) -> Floats:
        """ranks x lanes: the time in which each lane runs an op."""
        per_segment = np.zeros((len(self.segments), len(self.lanes)))
        for row, segment in zip(per_segment, self.segments, strict=True):
            used = segment.shape.lane != NO_LANE
            np.add.at(row, segment.shape.lane[used], segment.duration_s[used])
        busy = np.zeros((self.ranks, len(self.lanes)))
        np.add.at(busy, self.rank, per_segment[self.segment])
        return busy


@dataclass(frozen=True, eq=False)
class Times:
    """When every task of a program starts and ends."""

    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))
