"""The fluid engine: tasks whose communication is flows that share links; a program written out runs as such tasks.

Where none of its links is ever short an operation ends after its price, to the tick: where nothing is shared the result
is the folded engine's, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, reduce
from operator import or_
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepcast.ir.arrays import FloatArray, IntArray, UIntArray
from stepcast.ir.flows import FlowSet, Links, join_flows
from stepcast.ir.types import dataclass
from stepcast.simulation.fluid import kernel as codes
from stepcast.simulation.fluid.filling import CAPACITY, PER_FLOW, PER_LINK, SAME, Column, FlowTables
from stepcast.simulation.fluid.kernel import FluidWork, Log
from stepcast.simulation.kernels import compile_functions
from stepcast.simulation.program import Program, Times
from stepcast.simulation.segments import ProgramError, list_bits
from stepcast.simulation.unfolded import as_lists

COSTLY_FLOWS, COSTLY_TASKS = 1_000_000, 2_000_000
MANY = 10_000
"""Flows beyond what the caches of a processor hold."""

PLAIN = SimpleNamespace(**{function.__name__: function for function in codes.FUNCTIONS}, compiled=False)


def load_kernel(compiled: bool | None = None) -> SimpleNamespace:
    """Return the functions of the kernel by name, and whether they are ``compiled``.

    *compiled* asks for numba or forbids it; by default it is used when it is installed.
    """
    kernel = _compile_kernel() if compiled is not False else None
    if compiled and kernel is None:
        raise ProgramError("the compiled engine needs numba: pip install stepcast[compiled]")
    return kernel or PLAIN


@cache
def _compile_kernel() -> SimpleNamespace | None:
    # The kernel makes no arrays, so none need be counted: that would take most of its time.
    functions = compile_functions(codes.FUNCTIONS, codes.INLINED, counts=False)
    return SimpleNamespace(**functions, compiled=True) if functions else None


# Runs of tasks. Some tasks are flows.


def busiest_bytes(flows: FlowSet) -> FloatArray:
    """Return for each flow the bytes on the link that carries most of it."""
    most = np.zeros(len(flows))
    np.maximum.at(most, flows.flow, flows.bytes_on)
    return most


def count_bounds(counts: Sequence[int] | IntArray) -> IntArray:
    """Return the bounds of groups of so many items."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class SharedFlows:
    """Sets of flows that begin together, on links that may be short.

    The level of a flow is its bytes per second on its busiest link, by its weight; each unit of it takes ``use[e]`` of
    ``link[e]``, e from ``first[flow]`` on.
    """

    first: IntArray
    link: IntArray
    use: FloatArray
    capacity: FloatArray  # of each link
    amount: FloatArray  # of each flow the bytes on its busiest link, by its weight
    set_of: IntArray  # of each flow, rising
    alone_s: FloatArray  # of each set


@dataclass(frozen=True, eq=False)
class FluidTasks:
    """Tasks and what waits for them: ``next_task[next_first[t]:next_first[t + 1]]`` wait for task t. After the tasks,
    ``start_s`` and ``flows_of`` have repeating traffic.
    """

    next_first: IntArray
    next_task: IntArray
    own_s: FloatArray  # seconds of a task without flows; of others what follows once they have ended
    start_s: FloatArray  # the earliest
    flows_of: IntArray  # the set of its flows; -1 for none
    period_s: FloatArray = np.zeros(0)  # of repeating traffic

    def __len__(self) -> int:
        return len(self.own_s)


class Precision(NamedTuple):
    """The limits up to which changes of rates are followed."""

    patience: int = 5_000_000  # rates of flows that are solved exactly
    near: float = 1e-3  # when *patience* is used up, changes of levels of links below this share are not followed


DEFAULT_PRECISION = Precision()


@dataclass(frozen=True, eq=False)
class FluidTimes:
    """When every task began and ended, and the level of each flow from when to when."""

    start_s: FloatArray
    end_s: FloatArray
    flow: IntArray
    from_s: FloatArray
    to_s: FloatArray
    level: FloatArray
    solved: int  # how often rates were solved
    visited: int  # flows that were visited for that
    unfinished: int  # tasks that wait for themselves
    near_from_s: float  # from when on small changes of rates were not followed; infinite: all were
    near: float  # and how small they were, as a share

    @property
    def exact(self) -> bool:
        return self.near_from_s == np.inf


def run_tasks(
    tasks: FluidTasks,
    flows: SharedFlows,
    *,
    record: bool = True,
    compiled: bool | None = None,
    precision: Precision = DEFAULT_PRECISION,
) -> FluidTimes:
    """Run from the start until all *tasks* have ended.

    *compiled* asks for numba or forbids it; by default it is used when it is installed and worth its while.
    """
    count, set_first = len(tasks), count_bounds(np.bincount(flows.set_of, minlength=len(flows.alone_s)))
    # Compiling takes half a minute the first time and later a second, in which Python does a few steps.
    own_flows = tasks.flows_of[:count]
    begun = int(np.diff(set_first)[own_flows[own_flows >= 0]].sum())
    if compiled is None and begun * len(flows.amount) ** 0.5 <= COSTLY_FLOWS and count <= COSTLY_TASKS:
        compiled = False
    kernel = load_kernel(compiled)
    tables, work = _make_tables(flows), _make_work(tasks, flows, set_first, precision)
    roots: Column = np.append(np.flatnonzero(work.missing == 0), np.arange(count, len(tasks.start_s)))
    log = _make_log(max(1024, 4 * len(flows.amount)) if record else 0)
    if not kernel.compiled:
        tables, work, log, roots = as_lists(tables), as_lists(work), as_lists(log), roots.tolist()
    kernel.start_roots(work, roots)
    parts: list[Log] = []
    while True:
        code = kernel.advance(tables, work, log)
        parts.append(Log(*(np.array(part[: work.counts[codes.LOGGED]]) for part in log)))
        if code != codes.FULL:
            break
        work.counts[codes.LOGGED] = 0
        needed = work.counts[codes.ACTIVE] + 1
        if len(log.flow) < 2 * needed:
            log = _make_log(4 * needed) if kernel.compiled else as_lists(_make_log(4 * needed))
    if code == codes.CLASH:
        raise ValueError("flows would begin again before they have ended")
    flow, from_s, to_s, level = (np.concatenate(part) for part in zip(*parts, strict=True))
    return FluidTimes(
        start_s=np.array(work.start_s[:count]),
        end_s=np.array(work.end_s),
        flow=flow.astype(np.int64),
        from_s=from_s,
        to_s=to_s,
        level=level,
        solved=int(work.counts[codes.SOLVED]),
        visited=int(work.counts[codes.VISITED]),
        unfinished=int(work.counts[codes.LEFT]),
        near_from_s=float(work.near_from_s[0]),
        near=precision.near,
    )


def _make_log(size: int) -> Log:
    return Log(np.zeros(size, np.int64), np.zeros(size), np.zeros(size), np.zeros(size))


def _places(count: int) -> IntArray:
    return np.zeros(count, np.int64)


def _make_tables(flows: SharedFlows) -> FlowTables:
    """Return the state in which no flow is active."""
    links, entries, count = len(flows.capacity), len(flows.link), len(flows.amount)
    of_links, of_flows = np.zeros((links, PER_LINK)), np.zeros((count, PER_FLOW))
    of_links[:, CAPACITY] = flows.capacity
    return FlowTables(
        first=flows.first,
        link=flows.link,
        use=flows.use,
        slot_first=count_bounds(np.bincount(flows.link, minlength=links)),
        slot_entry=_places(entries),
        slot_flow=_places(entries),
        slot=_places(entries),
        members=_places(links),
        wanted=np.zeros(links),
        links=of_links.ravel(),
        flows=of_flows.ravel(),
        counts=_places(5),
        near=np.zeros(1),
        fresh=_places(count),
        touched=_places(links),
        touch_mark=_places(links),
        changed=_places(count),
        visit_mark=_places(links),
        visits=_places(links),
        key=np.full(links, np.inf),
        heap=_places(links),
        heap_place=np.full(links, -1, np.int64),
    )


def _make_work(tasks: FluidTasks, flows: SharedFlows, set_first: IntArray, precision: Precision) -> FluidWork:
    """Return the state in which no task has begun."""
    count, sets, of_flows = len(tasks), len(flows.alone_s), len(flows.amount)
    starts, blocks = len(tasks.start_s), -(-of_flows // codes.BLOCK)
    counts = _places(7)
    counts[codes.LEFT] = count
    return FluidWork(
        next_first=tasks.next_first,
        next_task=tasks.next_task,
        own_s=tasks.own_s,
        flows_of=tasks.flows_of,
        period_s=tasks.period_s,
        set_first=set_first,
        set_of=flows.set_of,
        alone_s=flows.alone_s,
        amount=flows.amount,
        patience=precision.patience,
        near=precision.near,
        counts=counts,
        missing=np.bincount(tasks.next_task, minlength=count).astype(np.int64),
        start_s=tasks.start_s.copy(),
        end_s=np.zeros(count),
        begin_task=_places(starts),
        begin_place=np.full(starts, -1, np.int64),
        stack=_places(count + 1),
        set_task=_places(sets),
        set_left=_places(sets),
        set_end_s=np.zeros(sets),
        pace=np.zeros(of_flows * codes.PER_PACE),
        flow_end_s=np.full(of_flows, np.inf),
        block_end_s=np.full(blocks, np.inf),
        block_mark=_places(blocks),
        near_from_s=np.full(1, np.inf),
    )


# Flows by themselves, each from its own start.


def transfers(
    links: Links,
    flows: FlowSet,
    start_s: FloatArray | None = None,
    alone_s: FloatArray | None = None,
    *,
    record: bool = False,
    compiled: bool | None = None,
    precision: Precision = DEFAULT_PRECISION,
) -> FluidTimes:
    """Return when each of *flows* begins and ends; none takes less than *alone_s*, or than its links allow."""
    count, order = len(flows), None
    alone_s = flows.longest_s(links) if alone_s is None else alone_s
    start_s = np.zeros(count) if start_s is None else start_s
    if count >= MANY:
        # In the order of the link on which each meets most others: what changes together is stored together.
        crowd = np.bincount(flows.link, minlength=len(links))[flows.link]
        fullest = np.lexsort((-crowd, flows.flow))[flows.first[:-1][np.diff(flows.first) > 0]]
        meets = np.full(count, -1, np.int64)
        meets[flows.flow[fullest]] = flows.link[fullest]
        order = np.argsort(meets, kind="stable")
        flows, start_s, alone_s = flows.select(order), start_s[order], alone_s[order]
    most, moving = busiest_bytes(flows), np.arange(count)
    flows_of = np.where((alone_s > 0) & (flows.longest_s(links) > 0), moving, -1)
    tasks = FluidTasks(_places(count + 1), _places(0), np.where(flows_of < 0, alone_s, 0.0), start_s, flows_of)
    use = flows.bytes_on * (flows.weight / np.where(most > 0, most, 1.0))[flows.flow]
    used = use > 0
    first = count_bounds(np.bincount(flows.flow[used], minlength=count))
    entries = first, flows.link[used], use[used], links.capacity_bytes_per_s
    shared = SharedFlows(*entries, most / flows.weight, moving, alone_s)
    times = run_tasks(tasks, shared, record=record, compiled=compiled, precision=precision)
    if order is None:
        return times
    place = np.argsort(order)
    return replace(times, start_s=times.start_s[place], end_s=times.end_s[place], flow=order[times.flow])


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
    ordered_first, ordered_second = first[order], second[order]
    new = np.ones(len(order), np.int64)
    new[1:] = (ordered_first[1:] != ordered_first[:-1]) | (ordered_second[1:] != ordered_second[:-1])
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
    """Sets of flows that begin together, and how long each set takes alone.

    A set runs in a place: what is in one place (a lane of a stage, another job) runs one after the other.
    """

    links: Links
    sets: tuple[FlowSet, ...]
    place: IntArray
    alone_s: FloatArray

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
        amount = (busiest_bytes(flows) / flows.weight)[first_flow]
        capacity = self.links.capacity_bytes_per_s[first_link]
        return TrafficClasses(self.set_of[first_flow], amount, capacity, merge_entries(groups, flows))

    def most_wanted(self) -> FloatArray:
        """Return for each class of links the most that is asked of one link: in each place the most of one set."""
        classes = self.classes
        flow, link, bytes_on = classes.entries
        links = len(classes.capacity)
        sets, by_set = np.unique(classes.set_of[flow] * links + link, return_inverse=True)
        asked = np.bincount(by_set.ravel(), bytes_on, len(sets)) * (1.0 / self.alone_s)[sets // links]
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
    """The flows of some traffic that others may slow."""

    flows: SharedFlows
    is_fixed: NDArray[np.bool_]  # of each set: no other can slow it, so that it takes what it takes alone
    class_of: IntArray  # of each flow of the kernel


def make_system(traffic: Traffic) -> FluidSystem:
    """Return the system without links that cannot be short, whatever runs at once, and sets that have no others."""
    classes = traffic.classes
    flow, link, bytes_on = classes.entries
    short = traffic.most_wanted() > classes.capacity * (1 + SAME)
    used = short[link] & (bytes_on > 0)
    is_fixed = np.ones(len(traffic.sets), bool)
    is_fixed[classes.set_of[flow[used]]] = False
    class_of = np.flatnonzero(~is_fixed[classes.set_of])
    place = np.full(len(classes.amount), -1, np.int64)
    place[class_of] = np.arange(len(class_of))
    used_links, link_of = np.unique(link[used], return_inverse=True)
    amount, owner = classes.amount[class_of], place[flow[used]]
    flows = SharedFlows(
        first=count_bounds(np.bincount(owner, minlength=len(class_of))),
        link=link_of.ravel().astype(np.int64),
        use=bytes_on[used] / amount[owner],
        capacity=classes.capacity[used_links],
        amount=amount,
        set_of=classes.set_of[class_of],
        alone_s=traffic.alone_s,
    )
    return FluidSystem(flows, is_fixed, class_of)


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
    for lane in list_bits(reduce(or_, [shape.reads for shape in shapes], 0)):
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
        for lane in list_bits(shape.reads):
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
    flows_of: IntArray  # the set of flows of each task; -1 for none
    tail_s: FloatArray  # of each task the part of its time that follows once its flows have ended
    waits: Pairs  # which tasks wait for which
    repeats: Sequence[tuple[int, float, float]] = ()  # of other jobs: set of flows, first start and period
    still_s: FloatArray | float = 0.0  # the part of ``tail_s`` that is the latency of the operations themselves


@dataclass(frozen=True, eq=False)
class FluidRun:
    """The result of the fluid engine."""

    shared: SharedProgram
    system: FluidSystem
    fluid_times: FluidTimes

    @cached_property
    def times(self) -> Times:
        return Times(self.fluid_times.start_s, self.fluid_times.end_s)

    @property
    def makespan_s(self) -> float:
        return self.times.makespan_s


def simulate_fluid(shared: SharedProgram, *, record: bool = True, compiled: bool | None = None) -> FluidRun:
    """Run the program; ProgramError if calls wait for each other in a circle."""
    program, system = shared.program, make_system(shared.traffic)
    is_alone = np.append(system.is_fixed, True)  # the last: tasks without flows
    flows_of = np.where(is_alone[shared.flows_of], -1, shared.flows_of)
    own_s = np.where(flows_of < 0, shared.duration_s, shared.tail_s)
    sources, targets = shared.waits
    next_first = count_bounds(np.bincount(sources, minlength=program.tasks))
    next_task = targets[np.argsort(sources, kind="stable")]
    others = [other for other in shared.repeats if not is_alone[other[0]]]
    sets, start_s, period_s = np.array(others, np.float64).reshape(-1, 3).T
    tasks = FluidTasks(
        next_first,
        next_task,
        own_s,
        np.append(np.zeros(program.tasks), start_s),
        np.append(flows_of, sets.astype(np.int64)),
        period_s.copy(),
    )
    times = run_tasks(tasks, system.flows, record=record, compiled=compiled)
    if times.unfinished:
        _ = program.table.levels  # names the calls that wait for each other
    return FluidRun(shared, system, times)
