"""Tasks and flows as tables for the kernel, compiled where that pays; rates, transfers and runs of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowSet, Links
from stepcast.ir.types import dataclass
from stepcast.simulation.fluid import kernel as codes
from stepcast.simulation.fluid.filling import BOUND, CAPACITY, LEVEL, PER_FLOW, PER_LINK, Column, Live, Net, Scratch
from stepcast.simulation.fluid.kernel import FluidWork, Log, State
from stepcast.simulation.kernels import compile_functions
from stepcast.simulation.segments import ProgramError
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


# Tables of flows.


def busiest_bytes(flows: FlowSet) -> FloatArray:
    """Return for each flow the bytes on the link that carries most of it."""
    most = np.zeros(len(flows))
    np.maximum.at(most, flows.flow, flows.bytes_on)
    return most


def count_bounds(counts: Sequence[int] | IntArray) -> IntArray:
    """Return the bounds of groups of so many items."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def make_net(links: Links, flows: FlowSet) -> Net:
    """Return the table of *flows*. The level of a flow is its bytes per second on its busiest link over its weight."""
    most = busiest_bytes(flows)
    use = flows.bytes_on * (flows.weight / np.where(most > 0, most, 1.0))[flows.flow]
    used = use > 0
    first = count_bounds(np.bincount(flows.flow[used], minlength=len(flows)))
    return Net(first, flows.link[used], flows.flow[used], use[used], links.capacity_bytes_per_s)


def _places(count: int) -> IntArray:
    return np.zeros(count, np.int64)


def _make_live(net: Net, bound: FloatArray) -> Live:
    """Return the state in which no flow is active."""
    links, entries, flows = len(net.capacity), len(net.link), len(net.first) - 1
    of_links, of_flows = np.zeros((links, PER_LINK)), np.zeros((flows, PER_FLOW))
    of_links[:, CAPACITY] = net.capacity
    of_flows[:, BOUND] = bound
    return Live(
        slot_first=count_bounds(np.bincount(net.link, minlength=links)),
        slot_entry=_places(entries),
        slot_flow=_places(entries),
        slot=_places(entries),
        members=_places(links),
        wanted=np.zeros(links),
        links=of_links.ravel(),
        flows=of_flows.ravel(),
    )


def _make_scratch(net: Net) -> Scratch:
    links, flows = len(net.capacity), len(net.first) - 1
    return Scratch(
        fresh=_places(flows),
        touched=_places(links),
        touch_mark=_places(links),
        flows=_places(flows),
        visit_mark=_places(links),
        visits=_places(links),
        key=np.full(links, np.inf),
        heap=_places(links),
        heap_place=np.full(links, -1, np.int64),
    )


def rates(links: Links, flows: FlowSet, alone_s: FloatArray | None = None, compiled: bool | None = None) -> FloatArray:
    """Return the share of its bytes that each flow moves per second while all are active.

    None is faster than it takes *alone_s*; without that its links alone bound it.
    """
    net = make_net(links, flows)
    alone_s = flows.longest_s(links) if alone_s is None else alone_s
    amount = busiest_bytes(flows) / flows.weight
    bound = np.divide(amount, alone_s, out=np.zeros(len(flows)), where=alone_s > 0)
    live = _make_live(net, bound)
    load_kernel(compiled).fill(net, live, _make_scratch(net))
    level = live.flows[LEVEL::PER_FLOW]
    shares: FloatArray = np.divide(level, amount, out=np.full(len(flows), np.inf), where=amount > 0)
    return shares


# Runs of tasks, some of which are flows.


@dataclass(frozen=True, eq=False)
class FluidTasks:
    """Tasks and what waits for them: ``next_task[next_first[t]:next_first[t + 1]]`` wait for task t."""

    next_first: IntArray
    next_task: IntArray
    earliest_s: FloatArray
    own_s: FloatArray  # seconds of a task without flows; of others what follows once they have ended
    kind: IntArray  # the kind of its flows; -1 for none

    def __len__(self) -> int:
        return len(self.own_s)


@dataclass(frozen=True, eq=False)
class FlowKinds:
    """Sets of flows that begin together, and kinds of tasks: a multiple of a set, and how long it takes alone."""

    net: Net
    amount: FloatArray  # of each flow the bytes on its busiest link, by its weight
    set_first: IntArray
    kind_set: IntArray
    kind_alone_s: FloatArray
    kind_scale: FloatArray


@dataclass(frozen=True, eq=False)
class RepeatingTraffic:
    """The kind, first start and period of each repeating traffic."""

    kind: IntArray
    start_s: FloatArray
    period_s: FloatArray


@dataclass(frozen=True)
class Precision:
    """The limits up to which changes of rates are followed."""

    near: float = 1e-3  # when *patience* is used up, changes of levels of links below this share are not followed
    patience: int = 5_000_000  # rates of flows that are solved exactly


NO_TRAFFIC = RepeatingTraffic(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
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
    flows: FlowKinds,
    repeats: RepeatingTraffic = NO_TRAFFIC,
    *,
    record: bool = True,
    compiled: bool | None = None,
    precision: Precision = DEFAULT_PRECISION,
) -> FluidTimes:
    """Run from the start until all *tasks* have ended.

    *compiled* asks for numba or forbids it; by default it is used when it is installed and worth its while.
    """
    # Compiling takes half a minute the first time and later a second, in which Python does a few steps.
    begun = int(np.diff(flows.set_first)[flows.kind_set[tasks.kind[tasks.kind >= 0]]].sum())
    is_costly = begun * len(flows.amount) ** 0.5 > COSTLY_FLOWS or len(tasks) > COSTLY_TASKS
    if compiled is None and not is_costly:
        compiled = False
    kernel = load_kernel(compiled)
    missing = np.bincount(tasks.next_task, minlength=len(tasks)).astype(np.int64)
    roots: Column = np.flatnonzero(missing == 0)
    log = _make_log(max(1024, 4 * len(flows.amount)) if record else 0)
    net, live, scratch = flows.net, _make_live(flows.net, np.zeros(len(flows.amount))), _make_scratch(flows.net)
    work, state = _make_work(tasks, flows, repeats, precision), _make_state(tasks, flows, repeats, missing)
    if not kernel.compiled:
        net, live, scratch = as_lists(net), as_lists(live), as_lists(scratch)
        work, state, log, roots = as_lists(work), as_lists(state), as_lists(log), roots.tolist()
    kernel.start_roots(work, state, roots)
    parts: list[Log] = []
    while True:
        code = kernel.advance(net, live, scratch, work, state, log)
        parts.append(Log(*(np.array(part[: state.counts[codes.LOGGED]]) for part in log)))
        if code != codes.FULL:
            break
        state.counts[codes.LOGGED] = 0
        needed = state.counts[codes.ACTIVE] + 1
        if len(log.flow) < 2 * needed:
            log = _make_log(4 * needed) if kernel.compiled else as_lists(_make_log(4 * needed))
    if code == codes.CLASH:
        raise ValueError("flows would begin again before they have ended")
    flow, from_s, to_s, level = (np.concatenate(part) for part in zip(*parts, strict=True))
    return FluidTimes(
        start_s=np.array(state.start_s[: len(tasks)]),
        end_s=np.array(state.end_s[: len(tasks)]),
        flow=flow.astype(np.int64),
        from_s=from_s,
        to_s=to_s,
        level=level,
        solved=int(state.counts[codes.SOLVED]),
        visited=int(state.counts[codes.VISITED]),
        unfinished=int(state.counts[codes.LEFT]),
        near_from_s=float(state.near_from_s[0]),
        near=precision.near,
    )


def _make_log(size: int) -> Log:
    return Log(np.zeros(size, np.int64), np.zeros(size), np.zeros(size), np.zeros(size))


def _make_work(tasks: FluidTasks, flows: FlowKinds, repeats: RepeatingTraffic, precision: Precision) -> FluidWork:
    sizes = np.diff(flows.set_first)
    return FluidWork(
        next_first=tasks.next_first,
        next_task=tasks.next_task,
        own_s=tasks.own_s,
        kind=np.concatenate([tasks.kind, repeats.kind]),
        kind_set=flows.kind_set,
        kind_alone_s=flows.kind_alone_s,
        kind_scale=flows.kind_scale,
        set_first=flows.set_first,
        set_of=np.repeat(np.arange(len(sizes)), sizes),
        amount=flows.amount,
        tasks=len(tasks),
        period_s=repeats.period_s,
        patience=precision.patience,
        near=precision.near,
    )


def _make_state(tasks: FluidTasks, flows: FlowKinds, repeats: RepeatingTraffic, missing: IntArray) -> State:
    count, sets = len(flows.amount), len(flows.set_first) - 1
    starts = int((tasks.kind >= 0).sum()) + len(repeats.kind) + 1
    blocks = -(-count // codes.BLOCK)
    counts = _places(9)
    counts[codes.LEFT] = len(tasks)
    return State(
        counts=counts,
        missing=missing,
        start_s=np.concatenate([tasks.earliest_s, repeats.start_s]),
        end_s=np.zeros(len(tasks)),
        begin_s=np.zeros(starts),
        begin_task=_places(starts),
        stack=_places(len(tasks) + 1),
        set_task=_places(sets),
        set_left=_places(sets),
        set_end_s=np.zeros(sets),
        pace=np.zeros(count * codes.PER_PACE),
        flow_end_s=np.full(count, np.inf),
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
    moving = np.arange(count)
    kind = np.where((alone_s > 0) & (flows.longest_s(links) > 0), moving, -1)
    amount = busiest_bytes(flows) / flows.weight
    tasks = FluidTasks(_places(count + 1), _places(0), start_s, np.where(kind < 0, alone_s, 0.0), kind)
    sets = FlowKinds(make_net(links, flows), amount, np.arange(count + 1), moving, alone_s, np.ones(count))
    times = run_tasks(tasks, sets, record=record, compiled=compiled, precision=precision)
    if order is None:
        return times
    place = np.argsort(order)
    return replace(times, start_s=times.start_s[place], end_s=times.end_s[place], flow=order[times.flow])
