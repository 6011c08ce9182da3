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
    EXACT,
    LEVEL,
    NEVER,
    PER_FLOW,
    Column,
    Live,
    Net,
    Scratch,
    collect,
    drop,
    enter,
    leave,
    push,
    solve,
)

TICK_S = 2.0**-46
BLOCK = 32
"""Flows whose first end is stored together."""
MOMENT_S = 1e-12
"""Events within a picosecond are one: equal ones would else be separated by rounding."""
DONE, FULL, STUCK, CLASH = 0, 1, 2, 3
# Indices of ``State.counts``.
STARTS, LOGGED, ACTIVE, LEFT, COMING, SOLUTION, SOLVED, VISITED, FRESH = range(9)
# Of each flow: how long it would still take alone, since when, and at which speed it goes.
LEFT_S, SINCE_S, SPEED = range(3)
PER_PACE = 4


class FluidWork(NamedTuple):
    """Tasks, then repeating traffic; what waits for what; and which flows a task has."""

    next_first: Column
    next_task: Column
    own_s: Column  # seconds of a task without flows; of others what follows once they have ended
    kind: Column  # of each task the kind of its flows; -1 for none
    kind_set: Column  # of each kind the set of flows: they begin together, and again only after all have ended
    kind_alone_s: Column
    kind_scale: Column  # bytes, as a multiple of those of the set
    set_first: Column
    set_of: Column  # of each flow
    amount: Column  # of each flow the level at which it would take a second
    tasks: int
    period_s: Column  # of repeating traffic
    patience: int  # flows whose rates are solved exactly; then changes of levels below *near* are not passed on
    near: float


class State(NamedTuple):
    """The state of all tasks and flows."""

    counts: Column
    missing: Column  # of each task how many that it waits for have not ended
    start_s: Column
    end_s: Column
    begin_s: Column
    begin_task: Column  # tasks of flows that will begin: a heap
    stack: Column
    set_task: Column  # of each set the task that it is active for
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


def end_task(work: FluidWork, state: State, task: int) -> None:
    """Find the ends of all that follows from the end of *task*, or when their flows will begin."""
    counts, stack = state.counts, state.stack
    stack[0] = task
    height = 1
    while height > 0:
        height -= 1
        task = stack[height]
        counts[LEFT] -= 1
        end_s = state.end_s[task]
        for index in range(work.next_first[task], work.next_first[task + 1]):
            following = work.next_task[index]
            if end_s > state.start_s[following]:
                state.start_s[following] = end_s
            state.missing[following] -= 1
            if state.missing[following] == 0:
                if work.kind[following] >= 0:
                    push(state.begin_s, state.begin_task, counts[STARTS], state.start_s[following], following)
                    counts[STARTS] += 1
                    counts[COMING] += 1
                else:
                    state.end_s[following] = state.start_s[following] + work.own_s[following]
                    stack[height] = following
                    height += 1


def start_roots(work: FluidWork, state: State, roots: Column) -> None:
    """Start *roots*, the tasks that wait for none, and repeating traffic."""
    counts = state.counts
    for index in range(len(roots)):
        task = roots[index]
        if work.kind[task] < 0:
            state.end_s[task] = state.start_s[task] + work.own_s[task]
            end_task(work, state, task)
        else:
            push(state.begin_s, state.begin_task, counts[STARTS], state.start_s[task], task)
            counts[STARTS] += 1
            counts[COMING] += 1
    for index in range(len(work.period_s)):
        task = work.tasks + index
        push(state.begin_s, state.begin_task, counts[STARTS], state.start_s[task], task)
        counts[STARTS] += 1


def begin_first(net: Net, now: Live, scratch: Scratch, work: FluidWork, state: State, touched: int) -> int:
    """Begin the flows of the task that begins first; return how many links are touched."""
    counts = state.counts
    start_s, task = state.begin_s[0], state.begin_task[0]
    drop(state.begin_s, state.begin_task, counts[STARTS])
    counts[STARTS] -= 1
    kind = work.kind[task]
    flows, alone_s, scale = work.kind_set[kind], work.kind_alone_s[kind], work.kind_scale[kind]
    state.set_task[flows] = task
    state.set_left[flows] = work.set_first[flows + 1] - work.set_first[flows]
    state.set_end_s[flows] = start_s
    for flow in range(work.set_first[flows], work.set_first[flows + 1]):
        now.flows[flow * PER_FLOW + BOUND] = work.amount[flow] * scale / alone_s
        state.pace[flow * PER_PACE + LEFT_S] = alone_s
        state.pace[flow * PER_PACE + SINCE_S] = start_s
        state.pace[flow * PER_PACE + SPEED] = 1.0
        state.flow_end_s[flow] = start_s + alone_s
        block = flow // BLOCK
        if state.flow_end_s[flow] < state.block_end_s[block]:
            state.block_end_s[block] = state.flow_end_s[flow]
        enter(net, now, scratch, flow, counts[FRESH])
        counts[FRESH] += 1
        touched = collect(net, scratch, flow, counts[SOLUTION], touched)
        counts[ACTIVE] += 1
    return touched


def log_rate(now: Live, state: State, log: Log, flow: int, to_s: float) -> None:
    if len(log.flow) > 0:
        index = state.counts[LOGGED]
        log.flow[index] = flow
        log.from_s[index] = state.pace[flow * PER_PACE + SINCE_S]
        log.to_s[index] = to_s
        log.level[index] = state.pace[flow * PER_PACE + SPEED] * now.flows[flow * PER_FLOW + BOUND]
        state.counts[LOGGED] += 1


def retire(
    net: Net, now: Live, scratch: Scratch, work: FluidWork, state: State, log: Log, flow: int, touched: int
) -> int:
    """End *flow*, and with the last of its set its task; return how many links are touched."""
    counts = state.counts
    end_s = state.flow_end_s[flow]
    log_rate(now, state, log, flow, end_s)
    state.flow_end_s[flow] = NEVER
    leave(net, now, flow)
    touched = collect(net, scratch, flow, counts[SOLUTION], touched)
    counts[ACTIVE] -= 1
    flows = work.set_of[flow]
    if end_s > state.set_end_s[flows]:
        state.set_end_s[flows] = end_s
    state.set_left[flows] -= 1
    if state.set_left[flows] == 0:
        task = state.set_task[flows]
        if task < work.tasks:
            counts[COMING] -= 1
            state.end_s[task] = state.set_end_s[flows] + work.own_s[task]
            end_task(work, state, task)
        else:
            period_s = work.period_s[task - work.tasks]
            state.start_s[task] = max(state.start_s[task] + period_s, state.set_end_s[flows])
            push(state.begin_s, state.begin_task, counts[STARTS], state.start_s[task], task)
            counts[STARTS] += 1
    return touched


def retire_flows(
    net: Net, now: Live, scratch: Scratch, work: FluidWork, state: State, log: Log, limit_s: float, touched: int
) -> int:
    for block in range(len(state.block_end_s)):
        if state.block_end_s[block] <= limit_s:
            first_s = NEVER
            for flow in range(block * BLOCK, min((block + 1) * BLOCK, len(state.flow_end_s))):
                if state.flow_end_s[flow] <= limit_s:
                    touched = retire(net, now, scratch, work, state, log, flow, touched)
                elif state.flow_end_s[flow] < first_s:
                    first_s = state.flow_end_s[flow]
            state.block_end_s[block] = first_s
    return touched


def update_ends(now: Live, scratch: Scratch, state: State, log: Log, count: int, now_s: float) -> None:
    """Update the ends of *count* flows from their new levels."""
    counts = state.counts
    for index in range(count):
        flow = scratch.flows[index]
        row = flow * PER_PACE
        level, bound = now.flows[flow * PER_FLOW + LEVEL], now.flows[flow * PER_FLOW + BOUND]
        speed = 1.0
        if level != bound:
            speed = level / bound
        if speed != state.pace[row + SPEED]:
            passed_s = now_s - state.pace[row + SINCE_S]
            if passed_s > 0:
                log_rate(now, state, log, flow, now_s)
                left_s = state.pace[row + LEFT_S] - passed_s * state.pace[row + SPEED]
                state.pace[row + LEFT_S] = max(left_s, 0.0)
                state.pace[row + SINCE_S] = now_s
            state.pace[row + SPEED] = speed
            end_s = state.pace[row + SINCE_S] + state.pace[row + LEFT_S] / speed
            end_s = np.rint(end_s / TICK_S) * TICK_S
            block = flow // BLOCK
            if end_s <= state.block_end_s[block]:
                state.block_end_s[block] = end_s
            elif state.flow_end_s[flow] <= state.block_end_s[block]:  # it was the first: another may be now
                state.block_mark[block] = counts[SOLUTION]
            state.flow_end_s[flow] = end_s
    for block in range(len(state.block_end_s)):
        if state.block_mark[block] == counts[SOLUTION]:
            first_s = NEVER
            for flow in range(block * BLOCK, min((block + 1) * BLOCK, len(state.flow_end_s))):
                if state.flow_end_s[flow] < first_s:
                    first_s = state.flow_end_s[flow]
            state.block_end_s[block] = first_s


def advance(net: Net, now: Live, scratch: Scratch, work: FluidWork, state: State, log: Log) -> int:
    """Run until all tasks have ended, the log is full, or what is left waits for itself."""
    counts = state.counts
    while counts[LEFT] > 0:
        if 0 < len(log.flow) < counts[LOGGED] + counts[ACTIVE] + 1:
            return FULL
        if counts[COMING] == 0:
            return STUCK
        next_s = NEVER
        for block in range(len(state.block_end_s)):
            if state.block_end_s[block] < next_s:
                next_s = state.block_end_s[block]
        if counts[STARTS] > 0 and state.begin_s[0] < next_s:
            next_s = state.begin_s[0]
        limit_s = next_s + MOMENT_S
        counts[SOLUTION] += 1
        touched = retire_flows(net, now, scratch, work, state, log, limit_s, int(0))  # noqa: RUF046, UP018, see fill
        while counts[STARTS] > 0 and state.begin_s[0] <= limit_s:
            if state.set_left[work.kind_set[work.kind[state.begin_task[0]]]] > 0:
                return CLASH
            touched = begin_first(net, now, scratch, work, state, touched)
        if touched > 0:
            near = EXACT
            if counts[VISITED] >= work.patience:
                near = work.near
                if state.near_from_s[0] == NEVER:
                    state.near_from_s[0] = next_s
            count = solve(net, now, scratch, counts[SOLUTION], touched, counts[FRESH], near)
            counts[FRESH] = 0
            counts[SOLVED] += 1
            counts[VISITED] += count
            update_ends(now, scratch, state, log, count, next_s)
    return DONE


INLINED = cast(
    tuple[FunctionType, ...],
    (
        *(filling.advance_link, filling.drop_link, filling.mark_changed, filling.fair_level, filling.link_key),
        *(filling.queue_links, filling.release, filling.hold, filling.set_level, filling.can_rise),
    ),
)
"""Small functions, compiled into those that call them: passing all tables costs more than they do."""
FUNCTIONS = INLINED + cast(
    tuple[FunctionType, ...],
    (
        *(push, drop, enter, leave, collect, filling.release_all, filling.raise_all, filling.release_higher),
        *(filling.settle_link, solve, filling.fill, end_task, start_roots, begin_first, log_rate, retire),
        *(retire_flows, update_ends, advance),
    ),
)
"""Each calls only those before it."""
