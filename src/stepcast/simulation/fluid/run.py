"""Tasks and flows put to the kernel, and what it found."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowError, FlowSet, Links
from stepcast.simulation.fluid import kernel as codes
from stepcast.simulation.fluid.maxmin import (
    FluidWork,
    Log,
    Net,
    State,
    busiest_bytes,
    kernel_of,
    net_of,
    now_of,
    scratch_of,
)

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
