"""In which order the calls of a program are run, and where each finds the times it begins with.

A call is a matrix-vector product in (max, +). Calls at the same level of the dependency graph are done
together; who waits for whom follows from the calls alone. Registers that are written but that no call reads
take no part.
"""

from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from stepcast.simulation.arrays import Calls, Program
from stepcast.simulation.pieces import Floats, Ints, ProgramError


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The calls by level, and where each finds its entry times among what the calls before it left behind."""

    order: Ints
    levels: tuple[tuple[int, int, NDArray[np.intp]], ...]
    """Where each level begins and ends in *order*, and entries x calls x 1: the place of each entry time."""

    def sweep(self, maps: Floats, chain: Ints) -> Floats:
        """(1 + calls) x rows: what each call leaves behind, in this order, row 0 being the start of the step.

        *maps* are the matrices of all chains, columns x chains x rows, *chain* the number of each call's.
        """
        values = np.zeros((len(self.order) + 1, maps.shape[2]))
        done, chain = values[1:], chain[self.order]
        matrices, found, latest = maps.take, values.reshape(-1).take, np.maximum.reduce
        for start, stop, entries in self.levels:
            terms = matrices(chain[start:stop], 1)
            terms += found(entries)
            latest(terms, 0, out=done[start:stop])
        return values

    def entries(self, values: Floats) -> Floats:
        """calls x columns: the entry times of every call."""
        flat = values.reshape(-1)
        columns = self.levels[0][2].shape[0] if self.levels else 0
        found = np.empty((len(self.order), columns))
        for start, stop, entries in self.levels:
            found[self.order[start:stop]] = flat.take(entries[:, :, 0].T)
        return found


def plan_of(program: Program, lanes: int, outputs: int) -> CallPlan:
    """The plan for calls that leave behind the times of so many *lanes* and *outputs*."""
    plans = _PLANS.setdefault(program.made, {})
    if (lanes, outputs) not in plans:
        plans[lanes, outputs] = _plan(program, lanes, lanes + outputs)
    return plans[lanes, outputs]


_PLANS: WeakKeyDictionary[Calls, dict[tuple[int, int], CallPlan]] = WeakKeyDictionary()
"""Programs that differ only in their segments share their calls, and with them the plan."""


def _plan(program: Program, lanes: int, rows: int) -> CallPlan:
    order = order_of(program)
    entries = np.empty((lanes + program.inputs, program.calls), np.intp)
    entries[:lanes] = order.previous * rows + np.arange(lanes)[:, None]
    entries[lanes:] = np.where(order.sources > 0, order.sources * rows + lanes + order.ports, 0)
    bounds = pairwise(level_bounds(order.level))
    return CallPlan(order.calls, tuple((start, stop, entries[:, start:stop, None].copy()) for start, stop in bounds))


def level_bounds(level: Ints) -> list[int]:
    """Where each level of rising ones begins, and the end."""
    bounds: list[int] = np.flatnonzero(np.diff(level, prepend=-1, append=len(level) + 1)).tolist()
    return bounds


@dataclass(frozen=True, eq=False)
class Order:
    """The calls level by level. Places in it count from 1; 0 is the start of the step."""

    calls: Ints
    segment: Ints
    """The segment that each names."""
    level: Ints
    """Of each, rising."""
    previous: Ints
    """The place of the call before it on its rank."""
    sources: Ints
    """inputs x calls: the place of the call that gives the input."""
    ports: Ints
    """The same for the output that it is of that call."""


def order_of(program: Program) -> Order:
    found = _ORDERS.get(program.made)
    if found is None:
        found = _ORDERS[program.made] = _order(program)
    return found


_ORDERS: WeakKeyDictionary[Calls, Order] = WeakKeyDictionary()


def _order(program: Program) -> Order:
    made, level = program.made, levels(program)
    order = np.argsort(level, kind="stable")
    place = np.zeros(program.calls + 1, np.int64)
    place[order] = np.arange(1, program.calls + 1)
    previous = place[np.arange(-1, program.calls - 1)]
    previous[made.rank_start[:-1][np.diff(made.rank_start) > 0]] = 0
    sources = np.where(made.source_call >= 0, place[made.source_call], 0)
    return Order(order, made.segment[order], level[order], previous[order], sources[order].T, made.source_port[order].T)


def levels(program: Program) -> Ints:
    """For each call the number of calls on the longest chain that leads to it.

    ProgramError if calls wait for each other in a circle.
    """
    found = _LEVELS.get(program.made)
    if found is None:
        found = _LEVELS[program.made] = _levels(program)
    return found


_LEVELS: WeakKeyDictionary[Calls, Ints] = WeakKeyDictionary()


def _levels(program: Program) -> Ints:
    several = (program.source_call >= 0).sum(axis=1) > 1
    many = {int(call): program.source_call[call].tolist() for call in np.flatnonzero(several)}
    sources = np.where(several, _MANY, program.source_call.max(axis=1, initial=-1)).tolist()
    at, stop = program.rank_start[:-1].tolist(), program.rank_start[1:].tolist()
    level, height_of = [-1] * program.calls, [-1] * program.ranks
    waiting: dict[int, list[int]] = {}
    ready = list(range(program.ranks))
    while ready:
        rank = ready.pop()
        height = height_of[rank]
        for call in range(at[rank], stop[rank]):
            source = sources[call]
            if source == _MANY:
                source = _latest_source(level, many[call])
            if source >= 0:
                other = level[source]
                if other < 0:
                    waiting.setdefault(source, []).append(rank)
                    at[rank] = call
                    break
                if other > height:
                    height = other
            height += 1
            level[call] = height
            if call in waiting:
                ready += waiting.pop(call)
        else:
            at[rank] = stop[rank]
        height_of[rank] = height
    if waiting:
        raise ProgramError(_deadlock(program, at))
    return np.array(level, np.int64)


_MANY = -2
"""Stands for a call with more than one source; most have one, and the loop over them should be short."""


def _latest_source(level: list[int], sources: list[int]) -> int:
    """A source that has not run, or the one with the highest level."""
    bound = [source for source in sources if source >= 0]
    return min(bound, key=lambda source: (level[source] >= 0, -level[source]))


def _deadlock(program: Program, at: list[int]) -> str:
    """Which call waits for which, given the call that every rank stands at."""

    def named(call: int) -> str:
        rank = int(program.rank[call])
        segment = program.names[program.made.segment[call]]
        name = program.rank_names[rank] if program.rank_names else f"rank {rank}"
        return f"call {call - program.rank_start[rank]} of {name} ({segment})"

    call = next(call for call, stop in zip(at, program.rank_start[1:], strict=True) if call < stop)
    sources = program.source_call[call].tolist()
    blocker = next(source for source in sources if source >= 0 and source >= at[program.rank[source]])
    return f"deadlock: {named(call)} waits for {named(blocker)}"
