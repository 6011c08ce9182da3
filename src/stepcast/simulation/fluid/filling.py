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
RISES, FREE = -2, -1
"""In place of the link that holds a flow: it rises; it has what it can take."""


class Net(NamedTuple):
    """Flows and links as flat tables; for entry e of a flow each unit of its level takes ``use[e]`` of a link."""

    first: Column
    link: Column
    owner: Column  # the flow of each entry
    use: Column
    capacity: Column


class Live(NamedTuple):
    """The flows that are active, by link, and what they get."""

    slot_first: Column  # the first slot of the entries of each link; active entries have the first slots
    slot_entry: Column
    slot_flow: Column
    slot: Column  # of each active entry
    members: Column  # the number of active entries of each link
    wanted: Column  # what the flows of each link would take at their bounds
    links: Column  # rows of numbers of each link, as named above
    flows: Column  # rows of numbers of each flow


class Scratch(NamedTuple):
    """Memory for one solution; marks are those of the solution that set them."""

    fresh: Column
    touched: Column
    touch_mark: Column
    flows: Column  # those that changed
    visit_mark: Column
    visits: Column  # of each link
    key: Column  # the level at which each link is in the heap
    heap: Column
    heap_place: Column


def push(keys: Column, items: Column, size: int, key: float, item: int) -> None:
    """Add to a heap of *size*; of equal keys the lower item comes first."""
    index = size
    while index > 0:
        up = (index - 1) >> 1
        if keys[up] < key or (keys[up] == key and items[up] <= item):
            break
        keys[index] = keys[up]
        items[index] = items[up]
        index = up
    keys[index] = key
    items[index] = item


def drop(keys: Column, items: Column, size: int) -> None:
    """Remove the first item of a heap of *size*."""
    last = size - 1
    key, item = keys[last], items[last]
    index = 0
    while True:
        child = 2 * index + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (keys[right] < keys[child] or (keys[right] == keys[child] and items[right] < items[child])):
            child = right
        if key < keys[child] or (key == keys[child] and item <= items[child]):
            break
        keys[index] = keys[child]
        items[index] = items[child]
        index = child
    keys[index] = key
    items[index] = item


def advance_link(scratch: Scratch, size: int, link: int, key: float) -> int:
    """Put *link* into the heap of links, or forward in it to a lower *key*; return the size of the heap."""
    heap, place, keys = scratch.heap, scratch.heap_place, scratch.key
    index = place[link]
    if index < 0:
        index = size
        size += 1
    keys[link] = key
    while index > 0:
        up = (index - 1) >> 1
        other = heap[up]
        if keys[other] < key or (keys[other] == key and other <= link):
            break
        heap[index] = other
        place[other] = index
        index = up
    heap[index] = link
    place[link] = index
    return size


def drop_link(scratch: Scratch, size: int) -> int:
    """Remove the first of the heap of links; return the size of the heap."""
    heap, place, keys = scratch.heap, scratch.heap_place, scratch.key
    place[heap[0]] = -1
    keys[heap[0]] = NEVER
    size -= 1
    link = heap[size]
    key = keys[link]
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
        if key < keys[other] or (key == keys[other] and link <= other):
            break
        heap[index] = other
        place[other] = index
        index = child
    if size > 0:
        heap[index] = link
        place[link] = index
    return size


def enter(net: Net, now: Live, scratch: Scratch, flow: int, fresh: int) -> None:
    """Make *flow* active; *fresh* others came since rates were solved."""
    links = now.links
    now.flows[flow * PER_FLOW + LEVEL] = 0.0
    now.flows[flow * PER_FLOW + HOLDER] = RISES
    scratch.fresh[fresh] = flow
    for entry in range(net.first[flow], net.first[flow + 1]):
        link, use = net.link[entry], net.use[entry]
        slot = now.slot_first[link] + now.members[link]
        now.slot_flow[slot] = flow
        now.slot_entry[slot] = entry
        now.slot[entry] = slot
        now.members[link] += 1
        now.wanted[link] += use * now.flows[flow * PER_FLOW + BOUND]
        links[link * PER_LINK + RISING] += 1
        links[link * PER_LINK + RISING_USE] += use


def leave(net: Net, now: Live, flow: int) -> None:
    links = now.links
    level, bound = now.flows[flow * PER_FLOW + LEVEL], now.flows[flow * PER_FLOW + BOUND]
    holder = int(now.flows[flow * PER_FLOW + HOLDER])
    if holder >= 0:
        links[holder * PER_LINK + HELD] -= 1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link, use = net.link[entry], net.use[entry]
        row = link * PER_LINK
        now.members[link] -= 1
        slot, last = now.slot[entry], now.slot_first[link] + now.members[link]
        moved = now.slot_entry[last]
        now.slot_entry[slot] = moved
        now.slot_flow[slot] = now.slot_flow[last]
        now.slot[moved] = slot
        if now.members[link] == 0:  # rounding of many that came and went
            now.wanted[link] = 0.0
            links[row + USED] = 0.0
        else:
            now.wanted[link] -= use * bound
            links[row + USED] -= use * level
        if link == holder:
            links[row + HELD_USE] = links[row + HELD_USE] - use if links[row + HELD] > 0 else 0.0


def collect(net: Net, scratch: Scratch, flow: int, mark: int, count: int) -> int:
    """Add the links of *flow* to the touched ones; return their *count*."""
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        if scratch.touch_mark[link] != mark:
            scratch.touch_mark[link] = mark
            scratch.touched[count] = link
            count += 1
    return count


def mark_changed(now: Live, scratch: Scratch, flow: int, mark: int, changed: int) -> int:
    """Add *flow* to those *changed*; return their number."""
    if now.flows[flow * PER_FLOW + MARK] != mark:
        now.flows[flow * PER_FLOW + MARK] = mark
        scratch.flows[changed] = flow
        changed += 1
    return changed


def fair_level(now: Live, link: int) -> float:
    """Return the level to which *link* can let rise what it holds and what rises on it."""
    links, row = now.links, link * PER_LINK
    others = links[row + USED] - links[row + HELD_USE] * links[row + HELD_LEVEL]
    level: float = max(links[row + CAPACITY] - others, 0.0) / (links[row + HELD_USE] + links[row + RISING_USE])
    return level


def link_key(now: Live, link: int, near: float) -> float:
    """Return the level at which *link* must be visited; NEVER where nothing is to change."""
    links, row = now.links, link * PER_LINK
    if links[row + SHORT] == 0 or links[row + HELD] + links[row + RISING] == 0:
        return NEVER
    fair = fair_level(now, link)
    if links[row + HELD] == 0:
        return fair
    level: float = links[row + HELD_LEVEL]
    if links[row + RISING] > 0:
        return min(fair, level)
    return NEVER if level * (1 - near) <= fair <= level * (1 + near) else fair


def queue_links(
    net: Net, now: Live, scratch: Scratch, flow: int, but: int, below: float, near: float, size: int
) -> int:
    """Queue the links of *flow*, all *but* one, if their key is *below* a level; return the size of the heap."""
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        if link != but:
            key = link_key(now, link, near)
            if key < below and key < scratch.key[link]:
                size = advance_link(scratch, size, link, key)
    return size


def release(net: Net, now: Live, flow: int) -> None:
    """Let *flow* rise again."""
    links = now.links
    level, holder = now.flows[flow * PER_FLOW + LEVEL], int(now.flows[flow * PER_FLOW + HOLDER])
    now.flows[flow * PER_FLOW + HOLDER] = RISES
    if holder >= 0:
        links[holder * PER_LINK + HELD] -= 1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link, use = net.link[entry], net.use[entry]
        row = link * PER_LINK
        links[row + USED] -= use * level
        links[row + RISING] += 1
        links[row + RISING_USE] += use
        if link == holder:
            links[row + HELD_USE] = links[row + HELD_USE] - use if links[row + HELD] > 0 else 0.0


def hold(net: Net, now: Live, flow: int, level: float, holder: int) -> None:
    """Hold *flow*, which rises, at *level*."""
    links = now.links
    now.flows[flow * PER_FLOW + LEVEL] = level
    now.flows[flow * PER_FLOW + HOLDER] = holder
    if holder >= 0:
        links[holder * PER_LINK + HELD] += 1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link, use = net.link[entry], net.use[entry]
        row = link * PER_LINK
        links[row + USED] += use * level
        links[row + RISING] -= 1
        links[row + RISING_USE] = links[row + RISING_USE] - use if links[row + RISING] > 0 else 0.0
        if link == holder:
            links[row + HELD_USE] += use


def set_level(net: Net, now: Live, flow: int, level: float) -> None:
    """Set the level of *flow*, which is held."""
    more = level - now.flows[flow * PER_FLOW + LEVEL]
    now.flows[flow * PER_FLOW + LEVEL] = level
    for entry in range(net.first[flow], net.first[flow + 1]):
        now.links[net.link[entry] * PER_LINK + USED] += net.use[entry] * more


def can_rise(net: Net, now: Live, flow: int, level: float) -> bool:
    """Return whether all links but its own let *flow* rise to *level*: those that hold others hold them as high and
    give way, and the others have capacity left.
    """
    links, place = now.links, flow * PER_FLOW
    if now.flows[place + BOUND] <= level * (1 + SAME):
        return False
    holder, more = int(now.flows[place + HOLDER]), level - now.flows[place + LEVEL]
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        row = link * PER_LINK
        if links[row + SHORT] != 0 and link != holder:
            if links[row + RISING] > 0:
                return False
            if links[row + HELD] > 0:
                if links[row + HELD_LEVEL] < level:
                    return False
            elif links[row + USED] + net.use[entry] * more > links[row + CAPACITY]:
                return False
    return True


def release_all(net: Net, now: Live, scratch: Scratch, link: int, mark: int, changed: int) -> int:
    """Let all that *link* holds rise again; return how many flows changed."""
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        if now.flows[flow * PER_FLOW + HOLDER] == link:
            release(net, now, flow)
            changed = mark_changed(now, scratch, flow, mark, changed)
    return changed


def raise_all(
    net: Net, now: Live, scratch: Scratch, link: int, level: float, mark: int, near: float, changed: int, size: int
) -> tuple[int, int]:
    """Raise what *link* holds to *level*; release the flows that other links may stop."""
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        if now.flows[flow * PER_FLOW + HOLDER] == link:
            if can_rise(net, now, flow, level):
                set_level(net, now, flow, level)
            else:
                release(net, now, flow)
            changed = mark_changed(now, scratch, flow, mark, changed)
            size = queue_links(net, now, scratch, flow, link, NEVER, near, size)
    now.links[link * PER_LINK + HELD_LEVEL] = level
    return changed, size


def release_higher(
    net: Net,
    now: Live,
    scratch: Scratch,
    link: int,
    key: float,
    level: float,
    mark: int,
    near: float,
    changed: int,
    size: int,
) -> tuple[int, int, bool]:
    """Prepare *link*, first in the heap by *key*, to give *level*: flows of other links that have more rise again,
    links that stop rising flows earlier come first, and flows for which it is enough stay at their bounds. Return
    whether it must be visited again.
    """
    again = bounded = False
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        holder = now.flows[flow * PER_FLOW + HOLDER]
        if holder == RISES:
            bounded = bounded or now.flows[flow * PER_FLOW + BOUND] <= level * (1 + SAME)
        elif holder != link and now.flows[flow * PER_FLOW + LEVEL] > level * (1 + near):
            release(net, now, flow)
            again = True
            changed = mark_changed(now, scratch, flow, mark, changed)
        else:
            continue
        size = queue_links(net, now, scratch, flow, link, key * (1 - EXACT), near, size)
    if size > 0 and scratch.key[scratch.heap[0]] < key * (1 - EXACT):
        return changed, size, True
    if bounded:
        for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
            flow = now.slot_flow[slot]
            bound = now.flows[flow * PER_FLOW + BOUND]
            if now.flows[flow * PER_FLOW + HOLDER] == RISES and bound <= level * (1 + SAME):
                hold(net, now, flow, bound, FREE)
                changed = mark_changed(now, scratch, flow, mark, changed)
                size = queue_links(net, now, scratch, flow, link, NEVER, near, size)
    return changed, size, again or bounded


def settle_link(
    net: Net, now: Live, scratch: Scratch, link: int, level: float, mark: int, near: float, changed: int, size: int
) -> tuple[int, int]:
    """Set all that rises on *link*, and all that it holds, to *level*."""
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        holder = now.flows[flow * PER_FLOW + HOLDER]
        if holder == RISES:
            hold(net, now, flow, level, link)
        elif holder == link and now.flows[flow * PER_FLOW + LEVEL] != level:
            set_level(net, now, flow, level)
        else:
            continue
        changed = mark_changed(now, scratch, flow, mark, changed)
        size = queue_links(net, now, scratch, flow, link, NEVER, near, size)
    now.links[link * PER_LINK + HELD_LEVEL] = level
    return changed, size


def solve(net: Net, now: Live, scratch: Scratch, mark: int, touched: int, fresh: int, near: float) -> int:
    """Find new levels after *touched* links lost flows or got *fresh* ones; return how many flows changed.

    *mark* is higher than in every solution before.
    """
    links = now.links
    changed = size = int(0)  # noqa: RUF046, UP018, see fill
    for index in range(fresh):
        changed = mark_changed(now, scratch, scratch.fresh[index], mark, changed)
    for index in range(touched):
        link = scratch.touched[index]
        row = link * PER_LINK
        links[row + SHORT] = 1 if now.wanted[link] > links[row + CAPACITY] * (1 + SAME) else 0
    for index in range(touched):
        link = scratch.touched[index]
        if links[link * PER_LINK + SHORT] == 0 and links[link * PER_LINK + HELD] > 0:
            before = changed
            changed = release_all(net, now, scratch, link, mark, changed)
            for number in range(before, changed):
                size = queue_links(net, now, scratch, scratch.flows[number], link, NEVER, near, size)
        key = link_key(now, link, near)
        if key < scratch.key[link]:
            size = advance_link(scratch, size, link, key)
    while size > 0:
        link = scratch.heap[0]
        row = link * PER_LINK
        key = scratch.key[link]
        size = drop_link(scratch, size)
        new_key = link_key(now, link, near)
        if new_key > key * (1 + EXACT):  # others took less of it than expected
            if new_key < NEVER:
                size = advance_link(scratch, size, link, new_key)
            continue
        if scratch.visit_mark[link] != mark:
            scratch.visit_mark[link] = mark
            scratch.visits[link] = 0
        scratch.visits[link] += 1
        level, held = links[row + HELD_LEVEL], links[row + HELD] > 0
        fair, again = fair_level(now, link), True
        if scratch.visits[link] > MOST_VISITS:
            again = False
            fair = level if held else fair
        elif held and fair > level * (1 + near):
            if links[row + RISING] == 0:
                changed, size = raise_all(net, now, scratch, link, fair, mark, near, changed, size)
            else:
                changed = release_all(net, now, scratch, link, mark, changed)
        else:
            if held and fair >= level * (1 - near):
                fair = level
            changed, size, again = release_higher(net, now, scratch, link, key, fair, mark, near, changed, size)
        if again:
            key = link_key(now, link, near)
            if key < scratch.key[link]:
                size = advance_link(scratch, size, link, key)
        else:
            changed, size = settle_link(net, now, scratch, link, fair, mark, near, changed, size)
    for index in range(changed):
        flow = scratch.flows[index]
        if now.flows[flow * PER_FLOW + HOLDER] == RISES:
            hold(net, now, flow, now.flows[flow * PER_FLOW + BOUND], FREE)
    return changed


def fill(net: Net, now: Live, scratch: Scratch) -> None:
    """Solve the levels of all flows, all active at once."""
    # ``int`` keeps numba from taking these for literals: it would compile the functions again for each literal.
    touched, mark, flows = int(0), int(2), len(net.first) - 1  # noqa: RUF046, UP018
    for flow in range(flows):
        enter(net, now, scratch, flow, flow)
        touched = collect(net, scratch, flow, mark, touched)
    solve(net, now, scratch, mark, touched, flows, EXACT)
