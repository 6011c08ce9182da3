"""The events between which rates hold: the kernel of the fluid engine, with ``filling``.

A task with a time of its own needs no event, because the ends of all that waits for it follow at once. A task of flows
ends when the last of them does; flows begin and end in the order of time.

Functions only index, so that they run compiled over arrays and in Python over lists.
"""

from types import FunctionType
from typing import NamedTuple, cast

import numpy as np

from stepcast.simulation.fluid import filling
from stepcast.simulation.fluid.filling import (
    BOUND,
    CHANGED,
    EXACT,
    LEVEL,
    NEVER,
    PER_FLOW,
    SOLUTION,
    TOUCHED,
    Column,
    FlowTables,
    collect,
    drop_first,
    enter,
    leave,
    put_item,
    solve,
)

TICK_S = 2.0**-46
BLOCK = 32
"""Flows whose first end is stored together."""
MOMENT_S = 1e-12
"""Events within a picosecond are one: equal ones would else be separated by rounding."""
DONE, FULL, STUCK, CLASH = 0, 1, 2, 3
# Indices of ``FluidWork.counts``.
STARTS, LOGGED, ACTIVE, LEFT, COMING, SOLVED, VISITED = range(7)
# Of each flow: how long it would still take alone, since when, and at which speed it goes.
LEFT_S, SINCE_S, SPEED = range(3)
PER_PACE = 4


class FluidWork(NamedTuple):
    """Tasks, then repeating traffic: what waits for what, which flows a task has, and the state of all."""

    next_first: Column
    next_task: Column
    own_s: Column  # seconds of a task without flows; of others what follows once they have ended
    flows_of: Column  # of each task the set of its flows, which begin together; -1 for none
    period_s: Column  # of repeating traffic
    set_first: Column  # of each set the first flow
    set_of: Column  # of each flow
    alone_s: Column  # of each set
    amount: Column  # of each flow the level at which it would take a second
    patience: int  # flows whose rates are solved exactly; then changes of levels below *near* are not passed on
    near: float
    counts: Column
    missing: Column  # of each task how many that it waits for have not ended
    start_s: Column
    end_s: Column
    begin_task: Column  # tasks of flows that will begin: a heap by their starts
    begin_place: Column
    stack: Column
    set_task: Column  # of each set the task that it is active for: it begins again only after all have ended
    set_left: Column
    set_end_s: Column
    pace: Column  # rows of numbers of each flow, as named above
    flow_end_s: Column
    block_end_s: Column
    block_mark: Column
    near_from_s: Column


class Log(NamedTuple):
    """The level of each flow from when to when."""

    flow: Column
    from_s: Column
    to_s: Column
    level: Column


def queue_start(work: FluidWork, task: int) -> None:
    """Let the flows of *task* begin at its start."""
    counts, start_s = work.counts, work.start_s
    counts[STARTS] = put_item(work.begin_task, work.begin_place, start_s, counts[STARTS], task, start_s[task])
    if task < len(work.own_s):
        counts[COMING] += 1


def end_task(work: FluidWork, task: int) -> None:
    """Find the ends of all that follows from the end of *task*, or when their flows will begin."""
    counts, stack = work.counts, work.stack
    stack[0] = task
    height = 1
    while height > 0:
        height -= 1
        task = stack[height]
        counts[LEFT] -= 1
        end_s = work.end_s[task]
        for index in range(work.next_first[task], work.next_first[task + 1]):
            following = work.next_task[index]
            if end_s > work.start_s[following]:
                work.start_s[following] = end_s
            work.missing[following] -= 1
            if work.missing[following] == 0:
                if work.flows_of[following] >= 0:
                    queue_start(work, following)
                else:
                    work.end_s[following] = work.start_s[following] + work.own_s[following]
                    stack[height] = following
                    height += 1


def start_roots(work: FluidWork, roots: Column) -> None:
    """Start *roots*: the tasks that wait for none, and repeating traffic."""
    for index in range(len(roots)):
        task = roots[index]
        if work.flows_of[task] < 0:
            work.end_s[task] = work.start_s[task] + work.own_s[task]
            end_task(work, task)
        else:
            queue_start(work, task)


def begin_first(tables: FlowTables, work: FluidWork) -> None:
    """Begin the flows of the task that begins first."""
    counts = work.counts
    task = work.begin_task[0]
    counts[STARTS] = drop_first(work.begin_task, work.begin_place, work.start_s, counts[STARTS])
    start_s, flows = work.start_s[task], work.flows_of[task]
    alone_s = work.alone_s[flows]
    work.set_task[flows] = task
    work.set_left[flows] = work.set_first[flows + 1] - work.set_first[flows]
    work.set_end_s[flows] = start_s
    for flow in range(work.set_first[flows], work.set_first[flows + 1]):
        tables.flows[flow * PER_FLOW + BOUND] = work.amount[flow] / alone_s
        work.pace[flow * PER_PACE + LEFT_S] = alone_s
        work.pace[flow * PER_PACE + SINCE_S] = start_s
        work.pace[flow * PER_PACE + SPEED] = 1.0
        work.flow_end_s[flow] = start_s + alone_s
        block = flow // BLOCK
        if work.flow_end_s[flow] < work.block_end_s[block]:
            work.block_end_s[block] = work.flow_end_s[flow]
        enter(tables, flow)
        collect(tables, flow)
        counts[ACTIVE] += 1


def log_rate(tables: FlowTables, work: FluidWork, log: Log, flow: int, to_s: float) -> None:
    if len(log.flow) > 0:
        index = work.counts[LOGGED]
        log.flow[index] = flow
        log.from_s[index] = work.pace[flow * PER_PACE + SINCE_S]
        log.to_s[index] = to_s
        log.level[index] = work.pace[flow * PER_PACE + SPEED] * tables.flows[flow * PER_FLOW + BOUND]
        work.counts[LOGGED] += 1


def retire(tables: FlowTables, work: FluidWork, log: Log, flow: int) -> None:
    """End *flow*, and with the last of its set its task."""
    counts = work.counts
    end_s = work.flow_end_s[flow]
    log_rate(tables, work, log, flow, end_s)
    work.flow_end_s[flow] = NEVER
    leave(tables, flow)
    collect(tables, flow)
    counts[ACTIVE] -= 1
    flows = work.set_of[flow]
    if end_s > work.set_end_s[flows]:
        work.set_end_s[flows] = end_s
    work.set_left[flows] -= 1
    if work.set_left[flows] == 0:
        task, tasks = work.set_task[flows], len(work.own_s)
        if task < tasks:
            counts[COMING] -= 1
            work.end_s[task] = work.set_end_s[flows] + work.own_s[task]
            end_task(work, task)
        else:
            work.start_s[task] = max(work.start_s[task] + work.period_s[task - tasks], work.set_end_s[flows])
            queue_start(work, task)


def retire_flows(tables: FlowTables, work: FluidWork, log: Log, limit_s: float) -> None:
    for block in range(len(work.block_end_s)):
        if work.block_end_s[block] <= limit_s:
            first_s = NEVER
            for flow in range(block * BLOCK, min((block + 1) * BLOCK, len(work.flow_end_s))):
                if work.flow_end_s[flow] <= limit_s:
                    retire(tables, work, log, flow)
                elif work.flow_end_s[flow] < first_s:
                    first_s = work.flow_end_s[flow]
            work.block_end_s[block] = first_s


def update_ends(tables: FlowTables, work: FluidWork, log: Log, now_s: float) -> None:
    """Update the ends of the flows that changed from their new levels."""
    mark = tables.counts[SOLUTION]
    for index in range(tables.counts[CHANGED]):
        flow = tables.changed[index]
        row = flow * PER_PACE
        level, bound = tables.flows[flow * PER_FLOW + LEVEL], tables.flows[flow * PER_FLOW + BOUND]
        speed = 1.0
        if level != bound:
            speed = level / bound
        if speed != work.pace[row + SPEED]:
            passed_s = now_s - work.pace[row + SINCE_S]
            if passed_s > 0:
                log_rate(tables, work, log, flow, now_s)
                left_s = work.pace[row + LEFT_S] - passed_s * work.pace[row + SPEED]
                work.pace[row + LEFT_S] = max(left_s, 0.0)
                work.pace[row + SINCE_S] = now_s
            work.pace[row + SPEED] = speed
            end_s = work.pace[row + SINCE_S] + work.pace[row + LEFT_S] / speed
            end_s = np.rint(end_s / TICK_S) * TICK_S
            block = flow // BLOCK
            if end_s <= work.block_end_s[block]:
                work.block_end_s[block] = end_s
            elif work.flow_end_s[flow] <= work.block_end_s[block]:  # it was the first: another may be now
                work.block_mark[block] = mark
            work.flow_end_s[flow] = end_s
    for block in range(len(work.block_end_s)):
        if work.block_mark[block] == mark:
            first_s = NEVER
            for flow in range(block * BLOCK, min((block + 1) * BLOCK, len(work.flow_end_s))):
                if work.flow_end_s[flow] < first_s:
                    first_s = work.flow_end_s[flow]
            work.block_end_s[block] = first_s


def advance(tables: FlowTables, work: FluidWork, log: Log) -> int:
    """Run until all tasks have ended, the log is full, or what is left waits for itself."""
    counts = work.counts
    while counts[LEFT] > 0:
        if 0 < len(log.flow) < counts[LOGGED] + counts[ACTIVE] + 1:
            return FULL
        if counts[COMING] == 0:
            return STUCK
        next_s = NEVER
        for block in range(len(work.block_end_s)):
            if work.block_end_s[block] < next_s:
                next_s = work.block_end_s[block]
        if counts[STARTS] > 0:
            next_s = min(next_s, work.start_s[work.begin_task[0]])
        limit_s = next_s + MOMENT_S
        tables.counts[SOLUTION] += 1
        retire_flows(tables, work, log, limit_s)
        while counts[STARTS] > 0 and work.start_s[work.begin_task[0]] <= limit_s:
            if work.set_left[work.flows_of[work.begin_task[0]]] > 0:
                return CLASH
            begin_first(tables, work)
        if tables.counts[TOUCHED] > 0:
            near = EXACT
            if counts[VISITED] >= work.patience:
                near = work.near
                if work.near_from_s[0] == NEVER:
                    work.near_from_s[0] = next_s
            solve(tables, near)
            counts[SOLVED] += 1
            counts[VISITED] += tables.counts[CHANGED]
            update_ends(tables, work, log, next_s)
    return DONE


INLINED = cast(
    tuple[FunctionType, ...],
    (
        *(put_item, drop_first, filling.mark_changed, filling.fair_level, filling.link_key, filling.queue_link),
        *(filling.queue_links, filling.release, filling.hold, filling.set_level, filling.can_rise),
    ),
)
"""Small functions, compiled into those that call them: passing all tables costs more than they do."""
FUNCTIONS = INLINED + cast(
    tuple[FunctionType, ...],
    (
        *(enter, leave, collect, filling.release_all, filling.raise_all, filling.release_higher, filling.settle_link),
        *(solve, queue_start, end_task, start_roots, begin_first, log_rate, retire, retire_flows, update_ends, advance),
    ),
)
"""Each calls only those before it."""
