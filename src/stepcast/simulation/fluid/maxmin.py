"""Weighted max-min fair rates of flows: the rate of each, by itself or bound by what it can take alone."""

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowSet, Links
from stepcast.simulation.fluid import kernel
from stepcast.simulation.fluid.filling import BOUND, CAPACITY, LEVEL, PER_FLOW, PER_LINK
from stepcast.simulation.pieces import ProgramError

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
