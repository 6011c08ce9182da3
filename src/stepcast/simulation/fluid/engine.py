"""The fluid engine: a program written out, its communication as flows that share links.

Where none of its links is ever short an operation ends after its price, to the tick: where nothing is shared the result
is the folded engine's, bit for bit.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepcast.ir.arrays import FloatArray, IntArray, UIntArray
from stepcast.ir.flows import FlowSet, Links, join_flows
from stepcast.ir.types import dataclass
from stepcast.simulation.fluid import run
from stepcast.simulation.fluid.filling import SAME, Net
from stepcast.simulation.program import Program, Times

# Classes of flows and links that get the same, so that one of each represents all.
#
# Two flows are equivalent when they begin together, weigh the same and put the same bytes on equivalent links; two
# links, when they have the same capacity and carry the same bytes of equivalent flows. The coarsest such division is
# found by refining one that is too coarse (Paige and Tarjan 1987; Grohe and others, Dimension reduction via colour
# refinement, 2014). Max-min fair rates are equal within each class, as filling shows: equivalent flows rise equally, so
# equivalent links are full at the same moment and stop equivalent flows. That holds for any set of active classes.

DIGITS = 40
"""Bits of bytes that are compared: smaller differences are rounding."""


class FlowClasses(NamedTuple):
    """The class of every flow, those of earlier sets first, and of every link."""

    flow: IntArray
    link: IntArray


def find_classes(links: Links, flows: FlowSet, begins: IntArray) -> FlowClasses:
    """Return the classes of *flows*, where those with the same number in *begins* begin together."""
    mantissa, exponent = np.frexp(flows.bytes_on)
    bytes_seen = _mix(np.rint(mantissa * 2.0**DIGITS).astype(np.uint64) + _mix(exponent.astype(np.uint64)))
    by_link = np.argsort(flows.link, kind="stable")
    used, link_first = np.unique(flows.link[by_link], return_index=True)
    full = np.flatnonzero(np.diff(flows.first))
    flow = _number_pairs(begins, flows.weight)
    link = _number_pairs(links.tier, links.capacity_bytes_per_s)
    known = 0
    while known < (known := int(flow.max(initial=-1)) + int(link.max(initial=-1)) + 2):
        seen = np.zeros(len(flow), np.uint64)
        if len(full):
            seen[full] = np.add.reduceat(_mix(bytes_seen + _mix(link)[flows.link]), flows.first[full])
        flow = _number_pairs(flow, seen)
        carried = np.zeros(len(link), np.uint64)
        if len(used):
            carried[used] = np.add.reduceat(_mix(bytes_seen + _mix(flow)[flows.flow])[by_link], link_first)
        link = _number_pairs(link, carried)
    return FlowClasses(flow, link)


def _mix(values: NDArray[np.generic]) -> UIntArray:
    """Scatter integers over 64 bits (splitmix64's finaliser)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _number_pairs(first: IntArray, second: NDArray[np.generic]) -> IntArray:
    """Return pairs numbered from 0, in their order."""
    order = np.lexsort((second, first))
    one, two = first[order], second[order]
    new = np.ones(len(order), np.int64)
    new[1:] = (one[1:] != one[:-1]) | (two[1:] != two[:-1])
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(new) - 1
    return numbers


class ClassEntries(NamedTuple):
    """Entries of classes in place of flows and links: the bytes of all flows of a class on one link of another."""

    flow: IntArray
    link: IntArray
    bytes_on: FloatArray


def merge_entries(classes: FlowClasses, flows: FlowSet) -> ClassEntries:
    """Return the entries of *classes*, by flow and then by link."""
    links = int(classes.link.max(initial=-1)) + 1
    keys = classes.flow[flows.flow] * max(links, 1) + classes.link[flows.link]
    entries, index = np.unique(keys, return_inverse=True)
    total = np.bincount(index.ravel(), flows.bytes_on, len(entries)).astype(np.float64)
    flow, link = np.divmod(entries, max(links, 1))
    count = np.bincount(classes.link, minlength=links)
    return ClassEntries(flow, link, total / count[link])


@dataclass(frozen=True, eq=False)
class Traffic:
    """Sets of flows that begin together, and kinds of them: a multiple of the bytes of a set, and how long it takes
    alone.

    A set runs in a place: what is in one place (a lane of a stage, another job) runs one after the other.
    """

    links: Links
    sets: tuple[FlowSet, ...]
    place: IntArray
    kind_set: IntArray
    kind_alone_s: FloatArray
    kind_scale: FloatArray

    @cached_property
    def flows(self) -> FlowSet:
        return join_flows(self.sets)

    @cached_property
    def set_of(self) -> IntArray:
        """The set of each flow."""
        return np.repeat(np.arange(len(self.sets)), [len(flows) for flows in self.sets])

    @cached_property
    def flow_classes(self) -> FlowClasses:
        return find_classes(self.links, self.flows, self.set_of)

    @cached_property
    def classes(self) -> "TrafficClasses":
        groups, flows = self.flow_classes, self.flows
        _, first_flow = np.unique(groups.flow, return_index=True)
        _, first_link = np.unique(groups.link, return_index=True)
        amount = (run.busiest_bytes(flows) / flows.weight)[first_flow]
        capacity = self.links.capacity_bytes_per_s[first_link]
        return TrafficClasses(self.set_of[first_flow], amount, capacity, merge_entries(groups, flows))

    def most_wanted(self) -> FloatArray:
        """Return for each class of links the most that is asked of one link: in each place the most of one set."""
        classes = self.classes
        flow, link, bytes_on = classes.entries
        pace = np.zeros(len(self.sets))
        np.maximum.at(pace, self.kind_set, self.kind_scale / self.kind_alone_s)
        links = len(classes.capacity)
        sets, by_set = np.unique(classes.set_of[flow] * links + link, return_inverse=True)
        asked = np.bincount(by_set.ravel(), bytes_on, len(sets)) * pace[sets // links]
        places, by_place = np.unique(self.place[sets // links] * links + sets % links, return_inverse=True)
        most = np.zeros(len(places))
        np.maximum.at(most, by_place.ravel(), asked)
        return np.bincount(places % links, most, links).astype(np.float64)


@dataclass(frozen=True, eq=False)
class TrafficClasses:
    """Classes of flows and of links."""

    set_of: IntArray  # of each class of flows
    amount: FloatArray  # of one flow of each class the bytes on its busiest link, by its weight
    capacity: FloatArray  # of one link of each class
    entries: ClassEntries


@dataclass(frozen=True, eq=False)
class FluidSystem:
    """The tables of some traffic for the kernel, and the kinds that need not come to it."""

    flows: run.FlowKinds
    fixed: IntArray  # the kinds that no other can slow: each takes what it takes alone
    class_of: IntArray  # of each flow of the kernel


def make_system(traffic: Traffic) -> FluidSystem:
    """Return the system without links that cannot be short, whatever runs at once, and kinds that have no others."""
    classes = traffic.classes
    flow, link, bytes_on = classes.entries
    short = traffic.most_wanted() > classes.capacity * (1 + SAME)
    used = short[link] & (bytes_on > 0)
    # A set is fixed where none of its flows has a link that may be short.
    shared = np.zeros(len(traffic.sets), bool)
    shared[classes.set_of[flow[used]]] = True
    class_of = np.flatnonzero(shared[classes.set_of])
    place = np.full(len(classes.amount), -1, np.int64)
    place[class_of] = np.arange(len(class_of))
    used_links, link_of = np.unique(link[used], return_inverse=True)
    amount = classes.amount[class_of]
    owner = place[flow[used]]
    net = Net(
        first=run.count_bounds(np.bincount(owner, minlength=len(class_of))),
        link=link_of.ravel().astype(np.int64),
        owner=owner,
        use=bytes_on[used] / amount[owner],
        capacity=classes.capacity[used_links],
    )
    bounds = run.count_bounds(np.bincount(classes.set_of[class_of], minlength=len(traffic.sets)))
    flows = run.FlowKinds(net, amount, bounds, traffic.kind_set, traffic.kind_alone_s, traffic.kind_scale)
    return FluidSystem(flows, np.flatnonzero(~shared[traffic.kind_set]), class_of)


# A program written out, as tasks and what waits for what.

Pairs = tuple[IntArray, IntArray]
"""The tasks that others wait for, and those that wait for them."""


def waits_of(program: Program) -> Pairs:
    """Return what waits for what in *program*, whose every piece is a call of its own.

    A node of a shape that is a lane means the last task there of the calls before; tasks are numbered in the order of
    calls, so that it is the highest of them so far.
    """
    shapes, shape_of = program.segment_shapes
    shape_of_call = shape_of[program.segment]
    lanes, tasks = len(program.lanes), program.task_start
    first_of_rank = tasks[program.table.rank_start[:-1]][program.rank]
    # For each lane and register that is waited for, and each call, the last task in it before, or -1.
    latest = {}
    for lane in sorted(set().union(*[shape.reads for shape in shapes])):
        last = np.array([shape.last[lane] for shape in shapes], np.int64)[shape_of_call]
        left = np.where(last >= 0, tasks[:-1] + last, -1)
        before = np.concatenate([[-1], np.maximum.accumulate(left)[:-1]]) if len(left) else left
        latest[lane] = np.where(before >= first_of_rank, before, -1)
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, shape in enumerate(shapes):
        calls = np.flatnonzero(shape_of_call == number)
        if not len(calls) or not shape.ops:
            continue
        node = np.full((shape.first_op + shape.ops, len(calls)), -1, np.int64)
        for lane in shape.reads:
            node[lane] = latest[lane][calls]
        for port in range(shape.inputs):
            node[lanes + port] = program.source_tasks[calls, port]
        node[shape.first_op :] = tasks[calls] + np.arange(shape.ops)[:, None]
        op_of = np.repeat(np.arange(shape.ops), np.diff(shape.before_start))
        waited, waits = node[shape.before].ravel(), node[shape.first_op + op_of].ravel()
        known = waited >= 0
        sources.append(waited[known])
        targets.append(waits[known])
    return np.concatenate(sources), np.concatenate(targets)


@dataclass(frozen=True, eq=False)
class SharedProgram:
    """A program written out whose tasks may be flows."""

    program: Program
    duration_s: FloatArray  # of each task alone
    traffic: Traffic
    task_kind: IntArray  # the kind of traffic of each task; -1 for none
    tail_s: FloatArray  # of each task the part of its time that follows once its flows have ended
    waits: Pairs  # which tasks wait for which
    repeats: Sequence[tuple[int, float, float]] = ()  # of other jobs: kind of traffic, first start and period
    still_s: FloatArray | float = 0.0  # the part of ``tail_s`` that is the latency of the operations themselves


@dataclass(frozen=True, eq=False)
class FluidRun:
    """The result of the fluid engine."""

    shared: SharedProgram
    system: FluidSystem
    fluid_times: run.FluidTimes

    @cached_property
    def times(self) -> Times:
        return Times(self.fluid_times.start_s, self.fluid_times.end_s)

    @property
    def makespan_s(self) -> float:
        return self.times.makespan_s


def simulate_fluid(shared: SharedProgram, *, record: bool = True, compiled: bool | None = None) -> FluidRun:
    """Run the program; ProgramError if calls wait for each other in a circle."""
    program, traffic = shared.program, shared.traffic
    system = make_system(traffic)
    fixed = np.zeros(len(traffic.kind_set) + 1, bool)
    fixed[system.fixed] = fixed[-1] = True
    kind = np.where(fixed[shared.task_kind], -1, shared.task_kind)
    own_s = np.where(kind < 0, shared.duration_s, shared.tail_s)
    sources, targets = shared.waits
    next_first = run.count_bounds(np.bincount(sources, minlength=program.tasks))
    next_task = targets[np.argsort(sources, kind="stable")]
    tasks = run.FluidTasks(next_first, next_task, np.zeros(program.tasks), own_s, kind)
    others = [other for other in shared.repeats if not fixed[other[0]]]
    kinds, starts, periods = zip(*others, strict=True) if others else ((), (), ())
    floats = (np.array(part, np.float64) for part in (starts, periods))
    repeats = run.RepeatingTraffic(np.array(kinds, np.int64), *floats)
    times = run.run_tasks(tasks, system.flows, repeats, record=record, compiled=compiled)
    if times.unfinished:
        _ = program.table.levels  # names the calls that wait for each other
    return FluidRun(shared, system, times)
