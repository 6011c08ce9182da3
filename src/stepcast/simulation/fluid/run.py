"""Tasks and flows put to the kernel, and what it found."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowError, FlowSet, Links
from stepcast.simulation.fluid import kernel
from stepcast.simulation.fluid import kernel as codes
from stepcast.simulation.fluid.filling import BOUND, CAPACITY, LEVEL, PER_FLOW, PER_LINK
from stepcast.simulation.segments import ProgramError

# Weighted max-min fair rates of flows: the rate of each, by itself or bound by what it can take alone.

# What the kernel works on, as flat tables: flows and links, tasks, and where everything stands.
#
# Parts are arrays where it is compiled and lists where it runs in Python.


class Net(NamedTuple):
    """Flows and links as flat tables; entry e of a flow says that each unit of its level takes ``use[e]`` of
    a link's capacity.
    """

    first: Any
    link: Any
    owner: Any
    """The flow of each entry."""
    use: Any
    capacity: Any


class Now(NamedTuple):
    """The flows that are under way, by link, and what they get."""

    slot_first: Any
    """Of each link where the slots of its entries begin; those under way have the first of them."""
    slot_entry: Any
    slot_flow: Any
    slot: Any
    """Of each entry under way its slot."""
    members: Any
    """Of each link the entries under way."""
    wanted: Any
    """Of each link what they would take at their bounds."""
    links: Any
    """Rows of numbers of each link, as ``filling`` names them."""
    flows: Any
    """Rows of numbers of each flow."""


class Scratch(NamedTuple):
    """What one solution needs; marks are of the solution that set them."""

    fresh: Any
    touched: Any
    touch_mark: Any
    flows: Any
    """Those that changed."""
    look_mark: Any
    looks: Any
    """Of each link how often it was looked at."""
    key: Any
    """Of each link where it stands in the heap."""
    heap: Any
    heap_place: Any


class FluidWork(NamedTuple):
    """Tasks, then repeating traffic; what waits for what; and which flows a task is."""

    next_first: Any
    next_task: Any
    own_s: Any
    """Seconds of a task that is no flows; of others what follows once they have ended."""
    kind: Any
    """Of each task which kind of flows it is; -1 for none."""
    kind_set: Any
    """Of each kind the set of flows: they begin together, and again only after all have ended."""
    kind_alone_s: Any
    kind_scale: Any
    """Bytes, as a multiple of those of the set."""
    set_first: Any
    set_of: Any
    """Of each flow its set."""
    amount: Any
    """Of each flow the level at which it would take a second."""
    tasks: int
    period_s: Any
    """Of repeating traffic."""
    patience: int
    """Flows whose rates are found exactly; then levels that change by less than *near* are not told."""
    near: float


class State(NamedTuple):
    """Where everything stands."""

    counts: Any
    missing: Any
    """Of each task how many that it waits for have not ended."""
    start_s: Any
    end_s: Any
    begin_s: Any
    begin_task: Any
    """Tasks of flows that will begin: a heap."""
    stack: Any
    set_task: Any
    """Of each set the task that it is under way for."""
    set_left: Any
    set_end_s: Any
    pace: Any
    """Rows of numbers of each flow, as ``kernel`` names them."""
    flow_end_s: Any
    block_end_s: Any
    block_mark: Any
    near_from_s: Any


class Log(NamedTuple):
    """At which level each flow was from when to when."""

    flow: Any
    from_s: Any
    to_s: Any
    level: Any


# The kernel, compiled by numba where it is installed, which is imported only here and only when used.

Function = Callable[..., Any]
WRITTEN_IN = {each.__name__ for each in kernel.WRITTEN_IN}


def kernel_of(compiled: bool | None = None) -> Any:
    """The functions of the kernel by name, which may know whether they are ``compiled``.

    *compiled* asks for numba or forbids it; by default it is used when it is installed.
    """
    found = _compiled() if compiled is not False else None
    if compiled and found is None:
        raise ProgramError("the compiled engine needs numba: pip install stepcast[compiled]")
    return found or PLAIN


PLAIN = SimpleNamespace(**{each.__name__: each for each in kernel.FUNCTIONS}, compiled=False)


@cache
def _compiled() -> SimpleNamespace | None:
    try:
        import numba
        from numba.core.options import DefaultOptions
    except ImportError:
        return None
    unkept: dict[str, Function] = {}

    # The kernel makes no arrays, so none need be counted: that would take most of its time.
    uncounted = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}

    def compile_(function: FunctionType, **options: Any) -> Function:
        inline = "always" if function.__name__ in WRITTEN_IN else "never"
        compile_one: Any = numba.njit
        found: Function = compile_one(function, error_model="numpy", inline=inline, **uncounted, **options)
        return found

    def plain() -> dict[str, Function]:
        return _bound(kernel.FUNCTIONS, compile_)

    try:
        kept = _bound(kernel.FUNCTIONS, partial(compile_, cache=True))
    except RuntimeError:  # nowhere to keep it, as in a container whose folders are read-only
        kept = plain()

    def named(name: str) -> Function:
        def call(*arguments: Any) -> Any:
            if not unkept:
                try:
                    return kept[name](*arguments)
                except OSError:  # compiled and not kept, as on a full disk; it has not run yet
                    unkept.update(plain())
            return unkept[name](*arguments)

        return call

    return SimpleNamespace(**{each.__name__: named(each.__name__) for each in kernel.FUNCTIONS}, compiled=True)


def _bound(functions: Sequence[FunctionType], compile_: Callable[[FunctionType], Function]) -> dict[str, Any]:
    """*functions*, each calling only those before it, by names that mean the compiled ones."""
    names: dict[str, Any] = {}
    for function in functions:
        names.update(function.__globals__)
    # Numba keeps what it compiled until the file of a function changes. Each contains what it calls of other
    # files, so all are told to be of the one that changed last, this one with its options included.
    newest = max({__file__, *(function.__code__.co_filename for function in functions)}, key=_changed)
    for function in functions:
        again = FunctionType(function.__code__.replace(co_filename=newest), names, function.__name__)
        again.__module__, again.__qualname__ = function.__module__, function.__qualname__
        names[function.__name__] = compile_(again)
    return names


def _changed(file: str) -> tuple[int, str]:
    try:
        return os.stat(file).st_mtime_ns, file
    except OSError:  # in an archive, where numba keeps nothing
        return 0, file


def rates(links: Links, flows: FlowSet, alone_s: FloatArray | None = None, compiled: bool | None = None) -> FloatArray:
    """The share of its bytes that each flow moves per second while all are under way.

    None is faster than it takes *alone_s*; without that its links alone bound it.
    """
    net = net_of(links, flows)
    alone_s = flows.longest_s(links) if alone_s is None else alone_s
    amount = busiest_bytes(flows) / flows.weight
    bound = np.divide(amount, alone_s, out=np.zeros(len(flows)), where=alone_s > 0)
    kernel = kernel_of(compiled)
    now, scratch = now_of(net, bound), scratch_of(net)
    kernel.fill(net, now, scratch)
    found: FloatArray = np.divide(now.flows[LEVEL::PER_FLOW], amount, out=np.full(len(flows), np.inf), where=amount > 0)
    return found


def net_of(links: Links, flows: FlowSet) -> Net:
    """Flow by flow. The level of a flow is its bytes per second on its busiest link over its weight."""
    most = busiest_bytes(flows)
    use = flows.bytes_on * (flows.weight / np.where(most > 0, most, 1.0))[flows.flow]
    kept = use > 0
    first = np.concatenate([[0], np.cumsum(np.bincount(flows.flow[kept], minlength=len(flows)))])
    return Net(first.astype(np.int64), flows.link[kept], flows.flow[kept], use[kept], links.capacity_bytes_per_s)


def busiest_bytes(flows: FlowSet) -> FloatArray:
    """Of each flow the bytes on the link that carries most of it."""
    most = np.zeros(len(flows))
    np.maximum.at(most, flows.flow, flows.bytes_on)
    return most


def now_of(net: Net, bound: FloatArray) -> Now:
    """Nothing is under way."""
    links, entries, flows = len(net.capacity), len(net.link), len(net.first) - 1
    slots = np.concatenate([[0], np.cumsum(np.bincount(net.link, minlength=links))])
    of_links, of_flows = np.zeros((links, PER_LINK)), np.zeros((flows, PER_FLOW))
    of_links[:, CAPACITY] = net.capacity
    of_flows[:, BOUND] = bound
    return Now(
        slot_first=slots.astype(np.int64),
        slot_entry=_places(entries),
        slot_flow=_places(entries),
        slot=_places(entries),
        members=_places(links),
        wanted=np.zeros(links),
        links=of_links.ravel(),
        flows=of_flows.ravel(),
    )


def scratch_of(net: Net) -> Scratch:
    links, flows = len(net.capacity), len(net.first) - 1
    return Scratch(
        fresh=_places(flows),
        touched=_places(links),
        touch_mark=_places(links),
        flows=_places(flows),
        look_mark=_places(links),
        looks=_places(links),
        key=np.full(links, np.inf),
        heap=_places(links),
        heap_place=np.full(links, -1, np.int64),
    )


def _places(count: int) -> IntArray:
    return np.zeros(count, np.int64)


COSTLY_FLOWS, COSTLY_TASKS = 1_000_000, 2_000_000


@dataclass(frozen=True, eq=False)
class Tasks:
    """What waits for what: task t is waited for by ``next_task[next_first[t]:next_first[t + 1]]``."""

    next_first: IntArray
    next_task: IntArray
    earliest_s: FloatArray
    own_s: FloatArray
    """Of a task that is no flows its time; of others what follows once they have ended."""
    kind: IntArray
    """Of each task which kind of flows it is; -1 for none."""

    def __len__(self) -> int:
        return len(self.own_s)


@dataclass(frozen=True, eq=False)
class Flows:
    """Sets of flows that begin together, and kinds of tasks: a set with so many times its bytes, that takes
    so long alone.
    """

    net: Net
    amount: FloatArray
    """Of each flow the bytes on its busiest link, by its weight."""
    set_first: IntArray
    kind_set: IntArray
    kind_alone_s: FloatArray
    kind_scale: FloatArray


@dataclass(frozen=True, eq=False)
class Repeats:
    """Of each repeating traffic its kind, its first start and its period."""

    kind: IntArray
    start_s: FloatArray
    period_s: FloatArray


@dataclass(frozen=True)
class Precision:
    """How far changes of rates are followed."""

    near: float = 1e-3
    """Once *patience* is at its end: levels of links that change by less than this share stay as they are."""
    patience: int = 5_000_000
    """Rates of flows that are found exactly."""


NONE = Repeats(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
USUAL = Precision()


@dataclass(frozen=True, eq=False)
class FluidTimes:
    """When every task began and ended, and at which level each flow was from when to when."""

    start_s: FloatArray
    end_s: FloatArray
    flow: IntArray
    from_s: FloatArray
    to_s: FloatArray
    level: FloatArray
    solved: int
    """How often rates were found anew."""
    looked_at: int
    """Flows that were looked at for that."""
    unfinished: int
    """Tasks that wait for themselves."""
    near_from_s: float
    """From when on small changes of rates were not followed; infinite: all were."""
    near: float
    """And how small they were, as a share."""

    @property
    def exact(self) -> bool:
        return self.near_from_s == np.inf


def run(
    tasks: Tasks,
    flows: Flows,
    repeats: Repeats = NONE,
    *,
    record: bool = True,
    compiled: bool | None = None,
    precision: Precision = USUAL,
) -> FluidTimes:
    """From the start until all *tasks* have ended.

    *compiled* asks for numba or forbids it; by default it is used when it is installed and worth its while.
    """
    if compiled is None and not _worth_compiling(tasks, flows):
        compiled = False
    kernel = kernel_of(compiled)
    work, state = _work(tasks, flows, repeats, precision), _state(tasks, flows, repeats)
    net, now, scratch = flows.net, now_of(flows.net, np.zeros(len(flows.amount))), scratch_of(flows.net)
    missing = np.bincount(tasks.next_task, minlength=len(tasks)).astype(np.int64)
    state.missing[:] = missing
    roots: Any = np.flatnonzero(missing == 0)
    log = _log(max(1024, 4 * len(flows.amount)) if record else 0)
    parts: list[Log] = []
    if not kernel.compiled:
        net, now, scratch, work, state = (_lists(each) for each in (net, now, scratch, work, state))
        log, roots = _lists(log), roots.tolist()
    kernel.set_off(work, state, roots)
    while True:
        code = kernel.advance(net, now, scratch, work, state, log)
        parts.append(Log(*(np.array(part[: state.counts[codes.LOGGED]]) for part in log)))
        if code != codes.FULL:
            break
        state.counts[codes.LOGGED] = 0
        needed = state.counts[codes.ACTIVE] + 1
        if len(log.flow) < 2 * needed:
            log = _log(4 * needed) if kernel.compiled else _lists(_log(4 * needed))
    if code == codes.CLASH:
        raise FlowError("flows would begin again before they have ended")
    flow, from_s, to_s, level = (np.concatenate(part) for part in zip(*parts, strict=True))
    return FluidTimes(
        start_s=np.array(state.start_s[: len(tasks)]),
        end_s=np.array(state.end_s[: len(tasks)]),
        flow=flow.astype(np.int64),
        from_s=from_s,
        to_s=to_s,
        level=level,
        solved=int(state.counts[codes.SOLVED]),
        looked_at=int(state.counts[codes.LOOKED_AT]),
        unfinished=int(state.counts[codes.LEFT]),
        near_from_s=float(state.near_from_s[0]),
        near=precision.near,
    )


def _worth_compiling(tasks: Tasks, flows: Flows) -> bool:
    """The first time that takes half a minute, and later a second, in which Python does a few steps."""
    kinds = tasks.kind[tasks.kind >= 0]
    begun = int(np.diff(flows.set_first)[flows.kind_set[kinds]].sum())
    return begun * len(flows.amount) ** 0.5 > COSTLY_FLOWS or len(tasks) > COSTLY_TASKS


def _log(size: int) -> Log:
    return Log(np.zeros(size, np.int64), np.zeros(size), np.zeros(size), np.zeros(size))


def _lists(tables: Any) -> Any:
    """The same tables as plain lists, which Python indexes faster than arrays."""
    return type(tables)(*(part.tolist() if isinstance(part, np.ndarray) else part for part in tables))


def _work(tasks: Tasks, flows: Flows, repeats: Repeats, precision: Precision) -> FluidWork:
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


def _state(tasks: Tasks, flows: Flows, repeats: Repeats) -> State:
    count, sets = len(flows.amount), len(flows.set_first) - 1
    starts = int((tasks.kind >= 0).sum()) + len(repeats.kind) + 1
    blocks = -(-count // codes.BLOCK)
    counts = np.zeros(9, np.int64)
    counts[codes.LEFT] = len(tasks)
    return State(
        counts=counts,
        missing=np.zeros(len(tasks), np.int64),
        start_s=np.concatenate([tasks.earliest_s, repeats.start_s]),
        end_s=np.zeros(len(tasks)),
        begin_s=np.zeros(starts),
        begin_task=np.zeros(starts, np.int64),
        stack=np.zeros(len(tasks) + 1, np.int64),
        set_task=np.zeros(sets, np.int64),
        set_left=np.zeros(sets, np.int64),
        set_end_s=np.zeros(sets),
        pace=np.zeros(count * codes.PER_PACE),
        flow_end_s=np.full(count, np.inf),
        block_end_s=np.full(blocks, np.inf),
        block_mark=np.zeros(blocks, np.int64),
        near_from_s=np.full(1, np.inf),
    )


def one_by_one(sets: Sequence[int]) -> IntArray:
    """The bounds of sets of so many flows."""
    return np.concatenate([[0], np.cumsum(sets)]).astype(np.int64)


# Flows by themselves, each from its own start: when each ends.

MANY = 10_000
"""Flows that a processor no longer holds all near it."""


def transfers(
    links: Links,
    flows: FlowSet,
    start_s: FloatArray | None = None,
    alone_s: FloatArray | None = None,
    *,
    record: bool = False,
    compiled: bool | None = None,
    precision: Precision = USUAL,
) -> FluidTimes:
    """When each of *flows* begins and ends; none takes less than *alone_s*, or than its links allow."""
    count = len(flows)
    alone_s = flows.longest_s(links) if alone_s is None else alone_s
    start_s = np.zeros(count) if start_s is None else start_s
    if count < MANY:
        return _run(links, flows, start_s, alone_s, record, compiled, precision)
    order = _by_crowd(flows, len(links))
    found = _run(links, flows.at(order), start_s[order], alone_s[order], record, compiled, precision)
    place = np.argsort(order)
    return replace(found, start_s=found.start_s[place], end_s=found.end_s[place], flow=order[found.flow])


def _by_crowd(flows: FlowSet, links: int) -> IntArray:
    """Flows in the order of the link on which each meets most others: what changes together lies together."""
    crowd = np.bincount(flows.link, minlength=links)[flows.link]
    fullest = np.lexsort((-crowd, flows.flow))[flows.first[:-1][np.diff(flows.first) > 0]]
    meets = np.full(len(flows), -1, np.int64)
    meets[flows.flow[fullest]] = flows.link[fullest]
    return np.argsort(meets, kind="stable")


def _run(
    links: Links,
    flows: FlowSet,
    start_s: FloatArray,
    alone_s: FloatArray,
    record: bool,
    compiled: bool | None,
    precision: Precision,
) -> FluidTimes:
    count = len(flows)
    moving = np.arange(count)
    kind = np.where((alone_s > 0) & (flows.longest_s(links) > 0), moving, -1)
    amount = busiest_bytes(flows) / flows.weight
    waits = np.zeros(count + 1, np.int64)
    tasks = Tasks(waits, np.zeros(0, np.int64), start_s, np.where(kind < 0, alone_s, 0.0), kind)
    sets = Flows(net_of(links, flows), amount, np.arange(count + 1), moving, alone_s, np.ones(count))
    return run(tasks, sets, record=record, compiled=compiled, precision=precision)
