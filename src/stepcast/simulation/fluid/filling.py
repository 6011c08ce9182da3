"""Max-min fair rates of flows, updated only where they change: the tables and functions of the kernel.

All flows rise together, each by its weight, until one comes to its bound or a link of it is full: such flows stay, the
others go on (Bertsekas and Gallager, Data Networks, 6.5.2). So every flow that is not at its bound has a link that
holds it: one that is full, and where no other is higher. All flows that a link holds are at one level.

Where flows come or go, only links that now have too much or too little for what they hold are visited, the lowest
first. One that can give more releases all it held, and these rise until a link holds them; one that can give less
lowers what it holds, and releases what is held elsewhere and has more. Lower levels do not change, because what a link
gives depends on lower levels alone. So changes spread upwards from link to link, ever smaller, and end where a link's
level changes by less than the share *near*.

Functions only index, so that they run compiled over arrays and in Python over lists.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Column: TypeAlias = Any
"""An array where the kernel is compiled, a list where it runs in Python."""
NEVER = np.inf
SAME = 1e-9
"""Levels that differ by less than this share are equal: a flow that fits exactly is not slowed by rounding."""
EXACT = 1e-11
"""Changes of levels below this share are not passed on."""
MOST_VISITS = 50
"""How often a link is visited for one change at most: few are visited more than twice."""
# Values that are needed together are stored together: eight numbers of each link in a row, and four of each flow. Of
# links: capacity, the use of all flows, the number of flows it holds, their use for each unit of their level, and that
# level; the number of rising flows here, and their use; and whether it is short.
CAPACITY, USED, HELD, HELD_USE, HELD_LEVEL, RISING, RISING_USE, SHORT = range(8)
PER_LINK = 8
# Of flows: level, bound, the link that holds it, and the solution that changed it last.
LEVEL, BOUND, HOLDER, MARK = range(4)
PER_FLOW = 4
# Of ``FlowTables.counts``: the number of the solution, links that are touched since the last, flows that came since,
# flows that it changed, and links in its heap.
SOLUTION, TOUCHED, FRESH, CHANGED, QUEUED = range(5)
RISES, FREE = -2, -1
"""In place of the link that holds a flow: it rises; it has what it can take."""


class FlowTables(NamedTuple):
    """Flows and links as flat tables, the flows that are active, and memory for one solution.

    For entry e of a flow each unit of its level takes ``use[e]`` of a link. Marks are those of the solution that set
    them.
    """

    first: Column  # the first entry of each flow
    link: Column
    use: Column
    slot_first: Column  # the first slot of the entries of each link; active entries have the first slots
    slot_entry: Column
    slot_flow: Column
    slot: Column  # of each active entry
    members: Column  # the number of active entries of each link
    wanted: Column  # what the flows of each link would take at their bounds
    links: Column  # rows of numbers of each link, as named above
    flows: Column  # rows of numbers of each flow
    counts: Column
    near: Column  # a single number: changes of levels below this share are not passed on
    fresh: Column
    touched: Column
    touch_mark: Column
    changed: Column  # flows
    visit_mark: Column
    visits: Column  # of each link
    key: Column  # the level at which each link is in the heap
    heap: Column
    heap_place: Column


def put_item(heap: Column, place: Column, keys: Column, size: int, item: int, key: float) -> int:
    """Put *item* into a heap, or forward in it to a lower *key*; return the size of the heap.

    Of equal keys the lower item comes first.
    """
    keys[item] = key
    index = place[item]
    if index < 0:
        index = size
        size += 1
    while index > 0:
        up = (index - 1) >> 1
        other = heap[up]
        if keys[other] < key or (keys[other] == key and other <= item):
            break
        heap[index] = other
        place[other] = index
        index = up
    heap[index] = item
    place[item] = index
    return size


def drop_first(heap: Column, place: Column, keys: Column, size: int) -> int:
    """Remove the first item of a heap; return the size of the heap."""
    place[heap[0]] = -1
    size -= 1
    item = heap[size]
    key = keys[item]
    index = 0
    while True:
        child = 2 * index + 1
        if child >= size:
            break
        other = heap[child]
        if child + 1 < size:
            right = heap[child + 1]
            if keys[right] < keys[other] or (keys[right] == keys[other] and right < other):
                child += 1
                other = right
        if key < keys[other] or (key == keys[other] and item <= other):
            break
        heap[index] = other
        place[other] = index
        index = child
    if size > 0:
        heap[index] = item
        place[item] = index
    return size


def enter(tables: FlowTables, flow: int) -> None:
    """Make *flow* active."""
    links, counts = tables.links, tables.counts
    tables.flows[flow * PER_FLOW + LEVEL] = 0.0
    tables.flows[flow * PER_FLOW + HOLDER] = RISES
    tables.fresh[counts[FRESH]] = flow
    counts[FRESH] += 1
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        link, use = tables.link[entry], tables.use[entry]
        slot = tables.slot_first[link] + tables.members[link]
        tables.slot_flow[slot] = flow
        tables.slot_entry[slot] = entry
        tables.slot[entry] = slot
        tables.members[link] += 1
        tables.wanted[link] += use * tables.flows[flow * PER_FLOW + BOUND]
        links[link * PER_LINK + RISING] += 1
        links[link * PER_LINK + RISING_USE] += use


def leave(tables: FlowTables, flow: int) -> None:
    links = tables.links
    level, bound = tables.flows[flow * PER_FLOW + LEVEL], tables.flows[flow * PER_FLOW + BOUND]
    holder = int(tables.flows[flow * PER_FLOW + HOLDER])
    if holder >= 0:
        links[holder * PER_LINK + HELD] -= 1
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        link, use = tables.link[entry], tables.use[entry]
        row = link * PER_LINK
        tables.members[link] -= 1
        slot, last = tables.slot[entry], tables.slot_first[link] + tables.members[link]
        moved = tables.slot_entry[last]
        tables.slot_entry[slot] = moved
        tables.slot_flow[slot] = tables.slot_flow[last]
        tables.slot[moved] = slot
        if tables.members[link] == 0:  # rounding of many that came and went
            tables.wanted[link] = 0.0
            links[row + USED] = 0.0
        else:
            tables.wanted[link] -= use * bound
            links[row + USED] -= use * level
        if link == holder:
            links[row + HELD_USE] = links[row + HELD_USE] - use if links[row + HELD] > 0 else 0.0


def collect(tables: FlowTables, flow: int) -> None:
    """Add the links of *flow* to the touched ones."""
    counts = tables.counts
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        link = tables.link[entry]
        if tables.touch_mark[link] != counts[SOLUTION]:
            tables.touch_mark[link] = counts[SOLUTION]
            tables.touched[counts[TOUCHED]] = link
            counts[TOUCHED] += 1


def mark_changed(tables: FlowTables, flow: int) -> None:
    """Add *flow* to those that this solution changed."""
    counts = tables.counts
    if tables.flows[flow * PER_FLOW + MARK] != counts[SOLUTION]:
        tables.flows[flow * PER_FLOW + MARK] = counts[SOLUTION]
        tables.changed[counts[CHANGED]] = flow
        counts[CHANGED] += 1


def fair_level(tables: FlowTables, link: int) -> float:
    """Return the level to which *link* can let rise what it holds and what rises on it."""
    links, row = tables.links, link * PER_LINK
    others = links[row + USED] - links[row + HELD_USE] * links[row + HELD_LEVEL]
    level: float = max(links[row + CAPACITY] - others, 0.0) / (links[row + HELD_USE] + links[row + RISING_USE])
    return level


def link_key(tables: FlowTables, link: int) -> float:
    """Return the level at which *link* must be visited; NEVER where nothing is to change."""
    links, row, near = tables.links, link * PER_LINK, tables.near[0]
    if links[row + SHORT] == 0 or links[row + HELD] + links[row + RISING] == 0:
        return NEVER
    fair = fair_level(tables, link)
    if links[row + HELD] == 0:
        return fair
    level: float = links[row + HELD_LEVEL]
    if links[row + RISING] > 0:
        return min(fair, level)
    return NEVER if level * (1 - near) <= fair <= level * (1 + near) else fair


def queue_link(tables: FlowTables, link: int, key: float) -> None:
    """Queue *link* at *key*, unless it is in the heap for a lower one."""
    if key < tables.key[link]:
        counts = tables.counts
        counts[QUEUED] = put_item(tables.heap, tables.heap_place, tables.key, counts[QUEUED], link, key)


def queue_links(tables: FlowTables, flow: int, but: int, below: float) -> None:
    """Queue the links of *flow*, all *but* one, if their key is *below* a level."""
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        link = tables.link[entry]
        if link != but:
            key = link_key(tables, link)
            if key < below:
                queue_link(tables, link, key)


def release(tables: FlowTables, flow: int) -> None:
    """Let *flow* rise again."""
    links = tables.links
    level, holder = tables.flows[flow * PER_FLOW + LEVEL], int(tables.flows[flow * PER_FLOW + HOLDER])
    tables.flows[flow * PER_FLOW + HOLDER] = RISES
    if holder >= 0:
        links[holder * PER_LINK + HELD] -= 1
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        link, use = tables.link[entry], tables.use[entry]
        row = link * PER_LINK
        links[row + USED] -= use * level
        links[row + RISING] += 1
        links[row + RISING_USE] += use
        if link == holder:
            links[row + HELD_USE] = links[row + HELD_USE] - use if links[row + HELD] > 0 else 0.0


def hold(tables: FlowTables, flow: int, level: float, holder: int) -> None:
    """Hold *flow*, which rises, at *level*."""
    links = tables.links
    tables.flows[flow * PER_FLOW + LEVEL] = level
    tables.flows[flow * PER_FLOW + HOLDER] = holder
    if holder >= 0:
        links[holder * PER_LINK + HELD] += 1
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        link, use = tables.link[entry], tables.use[entry]
        row = link * PER_LINK
        links[row + USED] += use * level
        links[row + RISING] -= 1
        links[row + RISING_USE] = links[row + RISING_USE] - use if links[row + RISING] > 0 else 0.0
        if link == holder:
            links[row + HELD_USE] += use


def set_level(tables: FlowTables, flow: int, level: float) -> None:
    """Set the level of *flow*, which is held."""
    more = level - tables.flows[flow * PER_FLOW + LEVEL]
    tables.flows[flow * PER_FLOW + LEVEL] = level
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        tables.links[tables.link[entry] * PER_LINK + USED] += tables.use[entry] * more


def can_rise(tables: FlowTables, flow: int, level: float) -> bool:
    """Return whether all links but its own let *flow* rise to *level*: those that hold others hold them as high and
    give way, and the others have capacity left.
    """
    links, place = tables.links, flow * PER_FLOW
    if tables.flows[place + BOUND] <= level * (1 + SAME):
        return False
    holder, more = int(tables.flows[place + HOLDER]), level - tables.flows[place + LEVEL]
    for entry in range(tables.first[flow], tables.first[flow + 1]):
        link = tables.link[entry]
        row = link * PER_LINK
        if links[row + SHORT] != 0 and link != holder:
            if links[row + RISING] > 0:
                return False
            if links[row + HELD] > 0:
                if links[row + HELD_LEVEL] < level:
                    return False
            elif links[row + USED] + tables.use[entry] * more > links[row + CAPACITY]:
                return False
    return True


def release_all(tables: FlowTables, link: int) -> None:
    """Let all that *link* holds rise again."""
    for slot in range(tables.slot_first[link], tables.slot_first[link] + tables.members[link]):
        flow = tables.slot_flow[slot]
        if tables.flows[flow * PER_FLOW + HOLDER] == link:
            release(tables, flow)
            mark_changed(tables, flow)


def raise_all(tables: FlowTables, link: int, level: float) -> None:
    """Raise what *link* holds to *level*; release the flows that other links may stop."""
    for slot in range(tables.slot_first[link], tables.slot_first[link] + tables.members[link]):
        flow = tables.slot_flow[slot]
        if tables.flows[flow * PER_FLOW + HOLDER] == link:
            if can_rise(tables, flow, level):
                set_level(tables, flow, level)
            else:
                release(tables, flow)
            mark_changed(tables, flow)
            queue_links(tables, flow, link, NEVER)
    tables.links[link * PER_LINK + HELD_LEVEL] = level


def release_higher(tables: FlowTables, link: int, key: float, level: float) -> bool:
    """Prepare *link*, first in the heap by *key*, to give *level*: flows of other links that have more rise again,
    links that stop rising flows earlier come first, and flows for which it is enough stay at their bounds. Return
    whether it must be visited again.
    """
    again = bounded = False
    for slot in range(tables.slot_first[link], tables.slot_first[link] + tables.members[link]):
        flow = tables.slot_flow[slot]
        holder = tables.flows[flow * PER_FLOW + HOLDER]
        if holder == RISES:
            bounded = bounded or tables.flows[flow * PER_FLOW + BOUND] <= level * (1 + SAME)
        elif holder != link and tables.flows[flow * PER_FLOW + LEVEL] > level * (1 + tables.near[0]):
            release(tables, flow)
            again = True
            mark_changed(tables, flow)
        else:
            continue
        queue_links(tables, flow, link, key * (1 - EXACT))
    if tables.counts[QUEUED] > 0 and tables.key[tables.heap[0]] < key * (1 - EXACT):
        return True
    if bounded:
        for slot in range(tables.slot_first[link], tables.slot_first[link] + tables.members[link]):
            flow = tables.slot_flow[slot]
            bound = tables.flows[flow * PER_FLOW + BOUND]
            if tables.flows[flow * PER_FLOW + HOLDER] == RISES and bound <= level * (1 + SAME):
                hold(tables, flow, bound, FREE)
                mark_changed(tables, flow)
                queue_links(tables, flow, link, NEVER)
    return again or bounded


def settle_link(tables: FlowTables, link: int, level: float) -> None:
    """Set all that rises on *link*, and all that it holds, to *level*."""
    for slot in range(tables.slot_first[link], tables.slot_first[link] + tables.members[link]):
        flow = tables.slot_flow[slot]
        holder = tables.flows[flow * PER_FLOW + HOLDER]
        if holder == RISES:
            hold(tables, flow, level, link)
        elif holder == link and tables.flows[flow * PER_FLOW + LEVEL] != level:
            set_level(tables, flow, level)
        else:
            continue
        mark_changed(tables, flow)
        queue_links(tables, flow, link, NEVER)
    tables.links[link * PER_LINK + HELD_LEVEL] = level


def solve(tables: FlowTables, near: float) -> None:
    """Find new levels after the touched links lost flows or got fresh ones, and leave the flows that changed in
    ``changed``.
    """
    links, counts, mark = tables.links, tables.counts, tables.counts[SOLUTION]
    tables.near[0] = near
    counts[CHANGED] = 0
    for index in range(counts[FRESH]):
        mark_changed(tables, tables.fresh[index])
    for index in range(counts[TOUCHED]):
        link = tables.touched[index]
        row = link * PER_LINK
        links[row + SHORT] = 1 if tables.wanted[link] > links[row + CAPACITY] * (1 + SAME) else 0
    for index in range(counts[TOUCHED]):
        link = tables.touched[index]
        if links[link * PER_LINK + SHORT] == 0 and links[link * PER_LINK + HELD] > 0:
            before = counts[CHANGED]
            release_all(tables, link)
            for number in range(before, counts[CHANGED]):
                queue_links(tables, tables.changed[number], link, NEVER)
        queue_link(tables, link, link_key(tables, link))
    counts[TOUCHED] = counts[FRESH] = 0
    while counts[QUEUED] > 0:
        link = tables.heap[0]
        row = link * PER_LINK
        key = tables.key[link]
        tables.key[link] = NEVER
        counts[QUEUED] = drop_first(tables.heap, tables.heap_place, tables.key, counts[QUEUED])
        new_key = link_key(tables, link)
        if new_key > key * (1 + EXACT):  # others took less of it than expected
            queue_link(tables, link, new_key)
            continue
        if tables.visit_mark[link] != mark:
            tables.visit_mark[link] = mark
            tables.visits[link] = 0
        tables.visits[link] += 1
        level, held = links[row + HELD_LEVEL], links[row + HELD] > 0
        fair, again = fair_level(tables, link), True
        if tables.visits[link] > MOST_VISITS:
            again = False
            fair = level if held else fair
        elif held and fair > level * (1 + near):
            if links[row + RISING] == 0:
                raise_all(tables, link, fair)
            else:
                release_all(tables, link)
        else:
            if held and fair >= level * (1 - near):
                fair = level
            again = release_higher(tables, link, key, fair)
        if again:
            queue_link(tables, link, link_key(tables, link))
        else:
            settle_link(tables, link, fair)
    for index in range(counts[CHANGED]):
        flow = tables.changed[index]
        if tables.flows[flow * PER_FLOW + HOLDER] == RISES:
            hold(tables, flow, tables.flows[flow * PER_FLOW + BOUND], FREE)
