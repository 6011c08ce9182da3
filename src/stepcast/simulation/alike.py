"""Calls that begin alike: of the same segment, with the same lanes free and inputs there.

They run alike, so that what is asked of every single op is computed once for each distinct beginning.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepcast.simulation.arrays import Floats, Ints, Program, Segment
from stepcast.simulation.distinct import distinct, distinct_rows
from stepcast.simulation.engine import Run, latest
from stepcast.simulation.segments import COMPUTE

# Two calls begin alike when their lanes and inputs differ by less than this.
ALIKE_S = 1e-11


@dataclass(frozen=True, eq=False)
class Alike:
    """The distinct beginnings of a run's calls."""

    first: Ints
    """One call for each of them."""
    of_call: Ints
    """The beginning of every call."""
    segment: Ints
    """The segment of each beginning: the first one that is equal to its own."""
    begins_s: Floats
    """beginnings x (lanes + inputs): when each is free or there, counted from the compute lane's turn."""
    same: Ints
    """For each segment the first one that is equal to it."""
    program: Program

    def by_segment(self) -> Iterator[tuple[Segment, Ints, Floats]]:
        """Each segment with the numbers of its beginnings and when they are."""
        for number in distinct(self.segment).values:
            rows = np.flatnonzero(self.segment == number)
            yield self.program.segments[number], rows, self.begins_s[rows]


def alike(run: Run) -> Alike:
    program = run.program
    same = _same_segments(program)
    begins_s = _beginnings(run)
    keys = np.concatenate(
        [same[program.segment][:, None], np.rint(begins_s / ALIKE_S).astype(np.int64)], axis=1
    )
    found = distinct_rows(keys)
    segment = same[program.segment[found.first]]
    return Alike(found.first, found.inverse, segment, begins_s[found.first], same, program)


def op_times(segment: Segment, begins_s: Floats) -> tuple[Floats, Floats]:
    """ops x beginnings: when each op of *segment* starts and ends."""
    shape = segment.shape
    nodes = np.empty((shape.first_op + shape.ops, len(begins_s)))
    nodes[: shape.first_op] = begins_s[:, : shape.first_op].T
    starts = np.empty((shape.ops, len(begins_s)))
    for op, before in enumerate(shape.waits):
        starts[op] = latest(nodes, before)
        nodes[shape.first_op + op] = starts[op] + segment.duration_s[op]
    return starts, nodes[shape.first_op :]


def _beginnings(run: Run) -> Floats:
    """What happens beside computation before the compute lane's turn cannot take longer than all of it
    together, so how much earlier than that a lane is free or an input there makes no difference.
    """
    program = run.program
    beside_s = np.array(
        [segment.duration_s[segment.shape.lane != COMPUTE].sum() for segment in program.segments]
    )
    since: Floats = run.entry_s - run.entry_s[:, COMPUTE : COMPUTE + 1]
    begins: Floats = np.maximum(since, -beside_s[program.segment, None])
    return begins


def _same_segments(program: Program) -> Ints:
    """Stages that do the same share their segments."""
    known: dict[tuple[object, ...], int] = {}

    def key(segment: Segment) -> tuple[object, ...]:
        return segment.shape.key, segment.shape.names, segment.duration_s.tobytes(), segment.takes.tobytes()

    same = [known.setdefault(key(segment), number) for number, segment in enumerate(program.segments)]
    return np.array(same, np.int64)
