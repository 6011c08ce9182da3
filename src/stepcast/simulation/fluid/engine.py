"""The fluid engine: a program written out, its communication as flows that share links.

Where none of its links is ever short an operation ends after its price, to the tick: where nothing is shared
the answer is the folded engine's, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.simulation.arrays import Program, Times
from stepcast.simulation.fluid.run import FluidTimes, Repeats, Tasks, run
from stepcast.simulation.fluid.system import Pairs, System, Traffic, followers, system_of
from stepcast.simulation.plan import levels


@dataclass(frozen=True, eq=False)
class Shared:
    """A program whose tasks may be flows."""

    program: Program
    """Written out."""
    duration_s: FloatArray
    """Of each task what it takes alone."""
    traffic: Traffic
    task_kind: IntArray
    """Of each task its kind of traffic; -1 for none."""
    tail_s: FloatArray
    """Of each task the part of its time that follows once its flows have ended."""
    waits: Pairs
    """Which tasks wait for which."""
    repeats: Sequence[tuple[int, float, float]] = ()
    """Of other jobs: kind of traffic, first start and period."""
    still_s: FloatArray | float = 0.0
    """The part of ``tail_s`` that belongs to the operations themselves: their latency."""


@dataclass(frozen=True, eq=False)
class FluidRun:
    """What the fluid engine found."""

    shared: Shared
    system: System
    found: FluidTimes

    @cached_property
    def times(self) -> Times:
        return Times(self.found.start_s, self.found.end_s)

    @property
    def makespan_s(self) -> float:
        return self.times.makespan_s


def simulate_fluid(shared: Shared, *, record: bool = True, compiled: bool | None = None) -> FluidRun:
    """ProgramError if calls wait for each other in a circle."""
    program, traffic = shared.program, shared.traffic
    system = system_of(traffic)
    fixed = np.zeros(len(traffic.kind_set) + 1, bool)
    fixed[system.fixed] = fixed[-1] = True
    kind = np.where(fixed[shared.task_kind], -1, shared.task_kind)
    own_s = np.where(kind < 0, shared.duration_s, shared.tail_s)
    tasks = Tasks(*followers(program.tasks, shared.waits), np.zeros(program.tasks), own_s, kind)
    others = [each for each in shared.repeats if not fixed[each[0]]]
    repeats = Repeats(
        np.array([each[0] for each in others], np.int64),
        np.array([each[1] for each in others], np.float64),
        np.array([each[2] for each in others], np.float64),
    )
    found = run(tasks, system.flows, repeats, record=record, compiled=compiled)
    if found.unfinished:
        levels(program)  # names the calls that wait for each other
    return FluidRun(shared, system, found)
