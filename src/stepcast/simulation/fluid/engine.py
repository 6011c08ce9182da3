"""The fluid engine: a program written out, its communication as flows that share links.

Where none of its links is ever short an operation ends after its price, to the tick: where nothing is shared
the answer is the folded engine's, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowSet, Links, join_flows
from stepcast.simulation.fluid.filling import SAME
from stepcast.simulation.fluid.run import Flows, FluidTimes, Net, Repeats, Tasks, busiest_bytes, one_by_one, run
from stepcast.simulation.program import Program, Times

# Sets of flows and who runs them, made ready for the kernel: what can never share keeps its price.

# Flows and links that are alike: they get the same, so one of each stands for all.
#
# Two flows are alike when they begin together, weigh the same and put the same bytes on links that are alike;
# two links, when they have the same capacity and carry the same bytes of flows that are alike. The coarsest
# such division is found by refining one that is too coarse (Paige and Tarjan 1987; Grohe and others,
# Dimension reduction via colour refinement, 2014). Max-min fair rates are equal within each class, as filling
# shows: flows that are alike rise alike, so links that are alike are full at the same moment and stop flows
# that are alike.
# That holds for any classes of flows that are under way, whichever they are.

DIGITS = 40
"""Bits of bytes that are looked at: what differs by less differs by its rounding."""


class Alike(NamedTuple):
    """The class of every flow, those of earlier sets first, and of every link."""

    flow: IntArray
    link: IntArray


def alike(links: Links, flows: FlowSet, begins: IntArray) -> Alike:
    """Classes of *flows*, where those with the same number in *begins* begin together."""
    mantissa, exponent = np.frexp(flows.bytes_on)
    bytes_seen = _mixed(np.rint(mantissa * 2.0**DIGITS).astype(np.uint64) + _mixed(exponent.astype(np.uint64)))
    by_link = np.argsort(flows.link, kind="stable")
    used, link_first = np.unique(flows.link[by_link], return_index=True)
    full = np.flatnonzero(np.diff(flows.first))
    flow = _numbered(begins, flows.weight)
    link = _numbered(links.tier, links.capacity_bytes_per_s)
    known = 0
    while known < (known := int(flow.max(initial=-1)) + int(link.max(initial=-1)) + 2):
        seen = np.zeros(len(flow), np.uint64)
        if len(full):
            seen[full] = np.add.reduceat(_mixed(bytes_seen + _mixed(link)[flows.link]), flows.first[full])
        flow = _numbered(flow, seen)
        carried = np.zeros(len(link), np.uint64)
        if len(used):
            entries = _mixed(bytes_seen + _mixed(flow)[flows.flow])[by_link]
            carried[used] = np.add.reduceat(entries, link_first)
        link = _numbered(link, carried)
    return Alike(flow, link)


def _mixed(values: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Whole numbers scattered over 64 bits (splitmix64's finaliser)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _numbered(first: IntArray, second: NDArray[np.generic]) -> IntArray:
    """The pairs numbered from 0, in their order."""
    order = np.lexsort((second, first))
    one, two = first[order], second[order]
    new = np.ones(len(order), np.int64)
    new[1:] = (one[1:] != one[:-1]) | (two[1:] != two[:-1])
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(new) - 1
    return numbers


class Merged(NamedTuple):
    """Classes in place of flows and links: what all flows of a class put on one link of another."""

    flow: IntArray
    link: IntArray
    bytes_on: FloatArray


def merged(found: Alike, flows: FlowSet) -> Merged:
    """The entries of classes, by flow and then by link."""
    links = int(found.link.max(initial=-1)) + 1
    keys = found.flow[flows.flow] * max(links, 1) + found.link[flows.link]
    entries, of = np.unique(keys, return_inverse=True)
    total = np.bincount(of.ravel(), flows.bytes_on, len(entries)).astype(np.float64)
    flow, link = np.divmod(entries, max(links, 1))
    count = np.bincount(found.link, minlength=links)
    return Merged(flow, link, total / count[link])


@dataclass(frozen=True, eq=False)
class Traffic:
    """Sets of flows that begin together, and kinds of them: so many times the bytes of a set, and as long as
    that takes alone.

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
        """Of each flow its set."""
        return np.repeat(np.arange(len(self.sets)), [len(each) for each in self.sets])

    @cached_property
    def alike(self) -> Alike:
        return alike(self.links, self.flows, self.set_of)

    @cached_property
    def merged(self) -> Merged:
        return merged(self.alike, self.flows)

    @cached_property
    def classes(self) -> "Classes":
        return Classes.of(self)


@dataclass(frozen=True, eq=False)
class Classes:
    """Flows that are alike taken together, and links that are."""

    set_of: IntArray
    """Of each class of flows its set."""
    amount: FloatArray
    """Of one flow of each class the bytes on its busiest link, by its weight."""
    capacity: FloatArray
    """Of one link of each class."""
    entries: Merged

    @classmethod
    def of(cls, traffic: Traffic) -> "Classes":
        found, flows = traffic.alike, traffic.flows
        _, one_flow = np.unique(found.flow, return_index=True)
        _, one_link = np.unique(found.link, return_index=True)
        return cls(
            traffic.set_of[one_flow],
            (busiest_bytes(flows) / flows.weight)[one_flow],
            traffic.links.capacity_bytes_per_s[one_link],
            traffic.merged,
        )


@dataclass(frozen=True, eq=False)
class System:
    """What the kernel gets of some traffic, and which kinds need not come to it at all."""

    flows: Flows
    fixed: IntArray
    """The kinds that no other can slow: each takes what it takes alone."""
    class_of: IntArray
    """Of each flow of the kernel its class."""


def system_of(traffic: Traffic) -> System:
    """Links that cannot be short, whatever runs at once, are left out, and kinds that have no others."""
    classes = traffic.classes
    flow, link, bytes_on = classes.entries
    short = _most_wanted(traffic) > classes.capacity * (1 + SAME)
    kept = short[link] & (bytes_on > 0)
    # A set is fixed where none of its flows has a link that may be short.
    shared = np.zeros(len(traffic.sets), bool)
    shared[classes.set_of[flow[kept]]] = True
    flows_kept = np.flatnonzero(shared[classes.set_of])
    place = np.full(len(classes.amount), -1, np.int64)
    place[flows_kept] = np.arange(len(flows_kept))
    links_kept, link_of = np.unique(link[kept], return_inverse=True)
    amount = classes.amount[flows_kept]
    owner = place[flow[kept]]
    net = Net(
        first=one_by_one(np.bincount(owner, minlength=len(flows_kept)).tolist()),
        link=link_of.ravel().astype(np.int64),
        owner=owner,
        use=bytes_on[kept] / amount[owner],
        capacity=classes.capacity[links_kept],
    )
    sizes = np.bincount(classes.set_of[flows_kept], minlength=len(traffic.sets))
    flows = Flows(net, amount, one_by_one(sizes.tolist()), traffic.kind_set, traffic.kind_alone_s, traffic.kind_scale)
    return System(flows, np.flatnonzero(~shared[traffic.kind_set]), flows_kept)


def _most_wanted(traffic: Traffic) -> FloatArray:
    """Of each class of links, what is asked of one link at most: in each place the most that one set asks."""
    classes = traffic.classes
    flow, link, bytes_on = classes.entries
    pace = np.zeros(len(traffic.sets))
    np.maximum.at(pace, traffic.kind_set, traffic.kind_scale / traffic.kind_alone_s)
    links = len(classes.capacity)
    sets, by_set = np.unique(classes.set_of[flow] * links + link, return_inverse=True)
    asked = np.bincount(by_set.ravel(), bytes_on, len(sets)) * pace[sets // links]
    places, by_place = np.unique(traffic.place[sets // links] * links + sets % links, return_inverse=True)
    most = np.zeros(len(places))
    np.maximum.at(most, by_place.ravel(), asked)
    return np.bincount(places % links, most, links).astype(np.float64)


# A program written out, as tasks and what waits for what.

Pairs = tuple[IntArray, IntArray]
"""The tasks that others wait for, and those that wait for them."""


def waits_of(program: Program) -> Pairs:
    """Of *program*, whose every piece is a call of its own.

    A node of a shape that is a lane means the last task there of the calls before; tasks are numbered in the
    order of calls, so that it is the highest of them so far.
    """
    shapes, shape_of = program.segment_shapes
    shape = shape_of[program.segment]
    lanes, tasks = len(program.lanes), program.task_start
    standing = _standing(program, shape)
    output = np.full((len(shapes), max([1, *(len(each.outputs) for each in shapes)])), -1, np.int64)
    for row, each in zip(output, shapes, strict=True):
        row[: len(each.outputs)] = each.outputs
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, each in enumerate(shapes):
        calls = np.flatnonzero(shape == number)
        if not len(calls) or not each.ops:
            continue
        begins = tasks[calls]
        node = np.full((each.first_op + each.ops, len(calls)), -1, np.int64)
        for lane in {int(node) for node in each.before if node < lanes}:
            node[lane] = standing[lane][calls]
        for port in range(each.inputs):
            call = program.source_call[calls, port]
            op = output[shape[call], np.maximum(program.source_port[calls, port], 0)]
            node[lanes + port] = np.where(call >= 0, tasks[call] + op, -1)
        node[each.first_op :] = begins + np.arange(each.ops)[:, None]
        op_of = np.repeat(np.arange(each.ops), np.diff(each.before_start))
        waited, waits = node[each.before].ravel(), node[each.first_op + op_of].ravel()
        known = waited >= 0
        sources.append(waited[known])
        targets.append(waits[known])
    return np.concatenate(sources), np.concatenate(targets)


def _standing(program: Program, shape: IntArray) -> dict[int, IntArray]:
    """Of each lane and register that is waited for: for each call the last task in it before, or -1."""
    shapes, _ = program.segment_shapes
    lanes = len(program.lanes)
    read = sorted({int(node) for each in shapes for node in each.before if node < lanes})
    first_of_rank = program.task_start[program.rank_start[:-1]][program.rank]
    found = {}
    for lane in read:
        last = np.array([each.last[lane] for each in shapes], np.int64)[shape]
        left = np.where(last >= 0, program.task_start[:-1] + last, -1)
        before = np.concatenate([[-1], np.maximum.accumulate(left)[:-1]]) if len(left) else left
        found[lane] = np.where(before >= first_of_rank, before, -1)
    return found


def followers(tasks: int, pairs: Pairs) -> Pairs:
    """For each of *tasks* where those begin that wait for it, and all of them."""
    sources, targets = pairs
    order = np.argsort(sources, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=tasks))])
    return first.astype(np.int64), targets[order]


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
        _ = program.table.levels  # names the calls that wait for each other
    return FluidRun(shared, system, found)
