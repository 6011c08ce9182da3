"""The kernel of the fluid engine: max-min fair rates, and the events between which they hold.

Rates: all flows rise together, each by its weight, until one comes to its bound or a link of it is full:
such flows stay, the others go on (Bertsekas and Gallager, Data Networks, 6.5.2). Where flows came or went,
only those are looked at again that are connected to them by links that are short.

Events: a task with a time of its own needs none, for all that waits for it can be told at once. A task that
is flows ends when the last of them does; flows begin and end in the order of time.

Indexing only, so that it runs compiled over arrays and in Python over lists. One file, for numba keeps what
it compiled by the file that it stands in.
"""

from types import FunctionType
from typing import Any, cast

import numpy as np

TICK_S = 2.0**-46
SAME = 1e-9
"""Levels nearer to each other than this share are one: a flow that fits exactly is not slowed by rounding."""
NEAR = 1e-11
"""Levels nearer than this share are not worth a further look."""
NEVER = np.inf
BLOCK = 32
"""Flows whose first end is remembered together."""
MOMENT_S = 1e-12
"""Events within a picosecond are one: what is alike would else be told apart by its rounding."""
DONE, FULL, STUCK, CLASH = 0, 1, 2, 3
# Places of what changes while it runs.
STARTS, LOGGED, ACTIVE, LEFT, COMING, MARK, SOLVED, LOOKED_AT, FRESH = range(9)


def push(keys: Any, items: Any, size: int, key: float, item: int) -> None:
    """Add to a heap of *size*; of equal keys the lower item comes first."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if keys[up] < key or (keys[up] == key and items[up] <= item):
            break
        keys[at] = keys[up]
        items[at] = items[up]
        at = up
    keys[at] = key
    items[at] = item


def drop(keys: Any, items: Any, size: int) -> None:
    """Take the first out of a heap of *size*."""
    last = size - 1
    key, item = keys[last], items[last]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (
            keys[right] < keys[child] or (keys[right] == keys[child] and items[right] < items[child])
        ):
            child = right
        if key < keys[child] or (key == keys[child] and item <= items[child]):
            break
        keys[at] = keys[child]
        items[at] = items[child]
        at = child
    keys[at] = key
    items[at] = item


def enter(net: Any, now: Any, scratch: Any, flow: int, fresh: int) -> None:
    """*flow* is under way from here on; *fresh* others came since rates were found."""
    now.level[flow] = 0.0
    now.holder[flow] = -1
    scratch.fresh[fresh] = flow
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        head = now.head[link]
        now.after[entry] = head
        now.before[entry] = -1
        if head >= 0:
            now.before[head] = entry
        now.head[link] = entry
        now.members[link] += 1
        now.wanted[link] += net.use[entry] * now.bound[flow]


def leave(net: Any, now: Any, flow: int) -> None:
    holder = now.holder[flow]
    if holder >= 0:
        now.held[holder] -= 1
        now.holder[flow] = -1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        before, after = now.before[entry], now.after[entry]
        if before >= 0:
            now.after[before] = after
        else:
            now.head[link] = after
        if after >= 0:
            now.before[after] = before
        now.members[link] -= 1
        if now.members[link] == 0:  # what rounding left of many that came and went
            now.wanted[link] = 0.0
            now.used[link] = 0.0
        else:
            now.wanted[link] -= net.use[entry] * now.bound[flow]
            now.used[link] -= net.use[entry] * now.level[flow]


def collect(net: Any, scratch: Any, flow: int, mark: int, count: int) -> int:
    """Add the links of *flow* to the *count* that are touched."""
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        if scratch.touch_mark[link] != mark:
            scratch.touch_mark[link] = mark
            scratch.touched[count] = link
            count += 1
    return count


def free_held(net: Any, now: Any, scratch: Any, link: int, mark: int, waiting: int) -> int:
    """Add the flows that *link* holds back to those *waiting* to be freed."""
    if now.held[link] > 0:
        entry = now.head[link]
        while entry >= 0:
            flow = net.owner[entry]
            if now.holder[flow] == link and scratch.flow_mark[flow] < mark:
                scratch.flow_mark[flow] = mark
                scratch.waiting[waiting] = flow
                waiting += 1
            entry = now.after[entry]
    return waiting


def free(
    net: Any, now: Any, scratch: Any, mark: int, waiting: int, flows: int, links: int
) -> tuple[int, int]:
    """Let go of the flows *waiting*, and of all whom their links hold back: their levels are open. How many
    flows and links are concerned now.
    """
    while waiting > 0:
        waiting -= 1
        flow = scratch.waiting[waiting]
        scratch.flows[flows] = flow
        flows += 1
        holder, level = now.holder[flow], now.level[flow]
        if holder >= 0:
            now.held[holder] -= 1
            now.holder[flow] = -1
        for entry in range(net.first[flow], net.first[flow + 1]):
            link = net.link[entry]
            now.used[link] -= net.use[entry] * level
            if now.short[link]:
                if scratch.link_mark[link] != mark:
                    scratch.link_mark[link] = mark
                    scratch.links[links] = link
                    links += 1
                    scratch.open_use[link] = 0.0
                    scratch.open[link] = 0
                    scratch.key[link] = NEVER
                    waiting = free_held(net, now, scratch, link, mark, waiting)
                scratch.open_use[link] += net.use[entry]
                scratch.open[link] += 1
    return flows, links


def freeze(net: Any, now: Any, scratch: Any, flow: int, level: float, holder: int, mark: int) -> None:
    now.level[flow] = level
    now.holder[flow] = holder
    if holder >= 0:
        now.held[holder] += 1
    scratch.flow_mark[flow] = mark + 1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        now.used[link] += net.use[entry] * level
        if scratch.link_mark[link] == mark:
            scratch.open_use[link] -= net.use[entry]
            scratch.open[link] -= 1


def level_of(net: Any, now: Any, scratch: Any, link: int) -> Any:
    """To where the open flows of *link* can rise."""
    return max(net.capacity[link] - now.used[link], 0.0) / scratch.open_use[link]


def queue(net: Any, now: Any, scratch: Any, flows_from: int, flows: int, mark: int, size: int) -> int:
    """Put the links of the flows that were freed last into the heap, where they last less long now."""
    for at in range(flows_from, flows):
        flow = scratch.flows[at]
        for entry in range(net.first[flow], net.first[flow + 1]):
            link = net.link[entry]
            if scratch.link_mark[link] == mark and scratch.open[link] > 0:
                level = level_of(net, now, scratch, link)
                if level < scratch.key[link]:
                    scratch.key[link] = level
                    push(scratch.keys, scratch.items, size, level, link)
                    size += 1
    return size


def solve(net: Any, now: Any, scratch: Any, mark: int, touched: int, fresh: int) -> int:
    """New levels, after *touched* links lost flows or got *fresh* ones; how many flows were looked at.

    *mark* is even, and higher than in every solution before. Flows bear it while they are open, and one more
    once they are not.
    """
    waiting = flows = links = 0
    for at in range(fresh):
        flow = scratch.fresh[at]
        scratch.flow_mark[flow] = mark
        scratch.waiting[waiting] = flow
        waiting += 1
    for at in range(touched):
        link = scratch.touched[at]
        now.short[link] = now.wanted[link] > net.capacity[link] * (1 + SAME)
        waiting = free_held(net, now, scratch, link, mark, waiting)
    flows, links = free(net, now, scratch, mark, waiting, 0, 0)
    keys, items = scratch.keys, scratch.items
    size = 0
    for at in range(links):
        link = scratch.links[at]
        scratch.key[link] = level_of(net, now, scratch, link)
        push(keys, items, size, scratch.key[link], link)
        size += 1
    left = flows
    while size > 0 and left > 0:
        link, key = items[0], keys[0]
        drop(keys, items, size)
        size -= 1
        if key != scratch.key[link] or scratch.open[link] == 0:
            continue  # it stands elsewhere in the heap, or all its flows are done
        level = level_of(net, now, scratch, link)
        if level > key * (1 + NEAR):  # others of it stayed below: it lasts longer than it looked
            scratch.key[link] = level
            push(keys, items, size, level, link)
            size += 1
            continue
        scratch.key[link] = NEVER
        waiting, bounded = 0, False
        entry = now.head[link]
        while entry >= 0:
            flow = net.owner[entry]
            if scratch.flow_mark[flow] == mark:
                if now.bound[flow] <= level * (1 + SAME):
                    freeze(net, now, scratch, flow, now.bound[flow], -1, mark)
                    left -= 1
                    bounded = True
            elif now.level[flow] > level * (1 + NEAR) and scratch.flow_mark[flow] < mark:
                scratch.flow_mark[flow] = mark
                scratch.waiting[waiting] = flow
                waiting += 1
            entry = now.after[entry]
        if waiting > 0 or bounded:  # who has more than this link can give must share it, too
            before = flows
            flows, links = free(net, now, scratch, mark, waiting, flows, links)
            left += flows - before
            size = queue(net, now, scratch, before, flows, mark, size)
            if scratch.open[link] > 0:
                level = level_of(net, now, scratch, link)
                if level < scratch.key[link]:
                    scratch.key[link] = level
                    push(keys, items, size, level, link)
                    size += 1
            continue
        entry = now.head[link]
        while entry >= 0:
            flow = net.owner[entry]
            if scratch.flow_mark[flow] == mark:
                freeze(net, now, scratch, flow, level, link, mark)
                left -= 1
            entry = now.after[entry]
    for at in range(flows if left > 0 else 0):
        flow = scratch.flows[at]
        if scratch.flow_mark[flow] == mark:
            freeze(net, now, scratch, flow, now.bound[flow], -1, mark)
    return flows


def fill(net: Any, now: Any, scratch: Any) -> None:
    """The levels of all flows, all under way at once."""
    touched, flows = 0, len(net.first) - 1
    for flow in range(flows):
        enter(net, now, scratch, flow, flow)
        touched = collect(net, scratch, flow, 2, touched)
    solve(net, now, scratch, 2, touched, flows)


def ended(work: Any, state: Any, task: int) -> None:
    """*task* has an end: find those of all that follow from it, or when their flows will begin."""
    counts, stack = state.counts, state.stack
    stack[0] = task
    height = 1
    while height > 0:
        height -= 1
        task = stack[height]
        counts[LEFT] -= 1
        end_s = state.end_s[task]
        for at in range(work.next_first[task], work.next_first[task + 1]):
            following = work.next_task[at]
            if end_s > state.start_s[following]:
                state.start_s[following] = end_s
            state.missing[following] -= 1
            if state.missing[following] == 0:
                if work.kind[following] >= 0:
                    push(
                        state.begin_s,
                        state.begin_task,
                        counts[STARTS],
                        state.start_s[following],
                        following,
                    )
                    counts[STARTS] += 1
                    counts[COMING] += 1
                else:
                    state.end_s[following] = state.start_s[following] + work.own_s[following]
                    stack[height] = following
                    height += 1


def set_off(work: Any, state: Any, roots: Any) -> None:
    """Begin with *roots*, tasks that wait for none, and with repeating traffic."""
    counts = state.counts
    for at in range(len(roots)):
        task = roots[at]
        if work.kind[task] < 0:
            state.end_s[task] = state.start_s[task] + work.own_s[task]
            ended(work, state, task)
        else:
            push(state.begin_s, state.begin_task, counts[STARTS], state.start_s[task], task)
            counts[STARTS] += 1
            counts[COMING] += 1
    for at in range(len(work.period_s)):
        task = work.tasks + at
        push(state.begin_s, state.begin_task, counts[STARTS], state.start_s[task], task)
        counts[STARTS] += 1


def begin(net: Any, now: Any, scratch: Any, work: Any, state: Any, touched: int) -> int:
    """The flows of the task that begins first; how many links are touched now."""
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
        now.bound[flow] = work.amount[flow] * scale / alone_s
        state.alone_s[flow] = alone_s
        state.left_s[flow] = alone_s
        state.since_s[flow] = start_s
        state.speed[flow] = 1.0
        state.flow_end_s[flow] = start_s + alone_s
        block = flow // BLOCK
        if state.flow_end_s[flow] < state.block_end_s[block]:
            state.block_end_s[block] = state.flow_end_s[flow]
        enter(net, now, scratch, flow, counts[FRESH])
        counts[FRESH] += 1
        touched = collect(net, scratch, flow, counts[MARK], touched)
        counts[ACTIVE] += 1
    return touched


def note(now: Any, state: Any, log: Any, flow: int, to_s: float) -> None:
    if len(log.flow) > 0:
        at = state.counts[LOGGED]
        log.flow[at] = flow
        log.from_s[at] = state.since_s[flow]
        log.to_s[at] = to_s
        log.level[at] = state.speed[flow] * now.bound[flow]
        state.counts[LOGGED] += 1


def retire(net: Any, now: Any, scratch: Any, work: Any, state: Any, log: Any, flow: int, touched: int) -> int:
    """*flow* has ended, and with the last of its set its task; how many links are touched now."""
    counts = state.counts
    end_s = state.flow_end_s[flow]
    note(now, state, log, flow, end_s)
    state.flow_end_s[flow] = NEVER
    leave(net, now, flow)
    touched = collect(net, scratch, flow, counts[MARK], touched)
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
            ended(work, state, task)
        else:
            period_s = work.period_s[task - work.tasks]
            state.start_s[task] = max(state.start_s[task] + period_s, state.set_end_s[flows])
            push(state.begin_s, state.begin_task, counts[STARTS], state.start_s[task], task)
            counts[STARTS] += 1
    return touched


def retire_until(
    net: Any, now: Any, scratch: Any, work: Any, state: Any, log: Any, limit_s: float, touched: int
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


def pace(now: Any, scratch: Any, state: Any, log: Any, count: int, now_s: float) -> None:
    """What the new levels of *count* flows mean for their ends."""
    counts = state.counts
    for at in range(count):
        flow = scratch.flows[at]
        speed = 1.0
        if now.level[flow] != now.bound[flow]:
            speed = now.level[flow] / now.bound[flow]
        if speed != state.speed[flow]:
            passed_s = now_s - state.since_s[flow]
            if passed_s > 0:
                note(now, state, log, flow, now_s)
                state.left_s[flow] = max(state.left_s[flow] - passed_s * state.speed[flow], 0.0)
                state.since_s[flow] = now_s
            state.speed[flow] = speed
            end_s = np.rint((state.since_s[flow] + state.left_s[flow] / speed) / TICK_S) * TICK_S
            state.flow_end_s[flow] = end_s
            state.block_mark[flow // BLOCK] = counts[MARK]
    for block in range(len(state.block_end_s)):
        if state.block_mark[block] == counts[MARK]:
            first_s = NEVER
            for flow in range(block * BLOCK, min((block + 1) * BLOCK, len(state.flow_end_s))):
                if state.flow_end_s[flow] < first_s:
                    first_s = state.flow_end_s[flow]
            state.block_end_s[block] = first_s


def advance(net: Any, now: Any, scratch: Any, work: Any, state: Any, log: Any) -> int:
    """Go on until all tasks have ended, the log is full, or what is left waits for itself."""
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
        counts[MARK] += 2
        touched = retire_until(net, now, scratch, work, state, log, limit_s, 0)
        while counts[STARTS] > 0 and state.begin_s[0] <= limit_s:
            if state.set_left[work.kind_set[work.kind[state.begin_task[0]]]] > 0:
                return CLASH
            touched = begin(net, now, scratch, work, state, touched)
        if touched > 0:
            count = solve(net, now, scratch, counts[MARK], touched, counts[FRESH])
            counts[FRESH] = 0
            counts[SOLVED] += 1
            counts[LOOKED_AT] += count
            pace(now, scratch, state, log, count, next_s)
    return DONE


FUNCTIONS = cast(
    tuple[FunctionType, ...],
    (
        *(push, drop, enter, leave, collect, free_held, free, freeze, level_of, queue, solve, fill),
        *(ended, set_off, begin, note, retire, retire_until, pace, advance),
    ),
)
