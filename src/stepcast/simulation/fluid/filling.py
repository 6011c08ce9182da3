"""Max-min fair rates, found anew only where they change.

All flows rise together, each by its weight, until one comes to its bound or a link of it is full: such flows
stay, the others go on (Bertsekas and Gallager, Data Networks, 6.5.2). So every flow that is not at its bound
has a link that holds it: one that is full, and where no other is higher. What a link holds is at one level.

Where flows come or go, only links that now have too much or too little for what they hold are looked at, the
lowest first. One that can give more lets go of all it held, and these rise until a link holds them; one that
can give less lowers what it holds, and lets go of what is held elsewhere and has more. What lies below does
not change, for what a link gives depends on lower levels alone. So changes spread upwards from link to link,
the further the smaller, and end where a link's level changes by less than the share *near*.

Indexing only, so that it runs compiled over arrays and in Python over lists.
"""

from typing import Any

import numpy as np

# Heaps over flat tables. Indexing only: it runs compiled over arrays and in Python over lists.

NEVER = np.inf


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
        if right < last and (keys[right] < keys[child] or (keys[right] == keys[child] and items[right] < items[child])):
            child = right
        if key < keys[child] or (key == keys[child] and item <= items[child]):
            break
        keys[at] = keys[child]
        items[at] = items[child]
        at = child
    keys[at] = key
    items[at] = item


def advance_link(scratch: Any, size: int, link: int, key: float) -> int:
    """*link* into the heap of links, or forward in it to a lower *key*; how many are in it now."""
    heap, place, keys = scratch.heap, scratch.heap_place, scratch.key
    at = place[link]
    if at < 0:
        at = size
        size += 1
    keys[link] = key
    while at > 0:
        up = (at - 1) >> 1
        other = heap[up]
        if keys[other] < key or (keys[other] == key and other <= link):
            break
        heap[at] = other
        place[other] = at
        at = up
    heap[at] = link
    place[link] = at
    return size


def drop_link(scratch: Any, size: int) -> int:
    """Take the first out of the heap of links; how many are left."""
    heap, place, keys = scratch.heap, scratch.heap_place, scratch.key
    place[heap[0]] = -1
    keys[heap[0]] = NEVER
    size -= 1
    link = heap[size]
    key = keys[link]
    at = 0
    while True:
        child = 2 * at + 1
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
        heap[at] = other
        place[other] = at
        at = child
    if size > 0:
        heap[at] = link
        place[link] = at
    return size


SAME = 1e-9
"""Levels nearer to each other than this share are one: a flow that fits exactly is not slowed by rounding."""
EXACT = 1e-11
"""Levels that change by less than this share are not told to others."""
MOST_LOOKS = 50
"""How often a link is looked at for one change at most: few are looked at more than twice."""
# What is needed together lies together: eight numbers of each link in a row, and four of each flow. Of links
# capacity, what all take of it, how many flows it holds, what these take for each unit of their level, and
# that level; of how many that rise there are entries here, and what these take; and whether it is short.
CAPACITY, USED, HELD, HELD_USE, AT, RISING, RISING_USE, SHORT = range(8)
PER_LINK = 8
# Of flows level, bound, the link that holds it, and the solution that changed it last.
LEVEL, BOUND, HOLDER, MARK = range(4)
PER_FLOW = 4
RISES, FREE = -2, -1
"""In place of the link that holds a flow: it rises; it has what it can take."""


def enter(net: Any, now: Any, scratch: Any, flow: int, fresh: int) -> None:
    """*flow* is under way from here on; *fresh* others came since rates were found."""
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


def leave(net: Any, now: Any, flow: int) -> None:
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
        if now.members[link] == 0:  # what rounding left of many that came and went
            now.wanted[link] = 0.0
            links[row + USED] = 0.0
        else:
            now.wanted[link] -= use * bound
            links[row + USED] -= use * level
        if link == holder:
            links[row + HELD_USE] = links[row + HELD_USE] - use if links[row + HELD] > 0 else 0.0


def collect(net: Any, scratch: Any, flow: int, mark: int, count: int) -> int:
    """Add the links of *flow* to the *count* that are touched."""
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        if scratch.touch_mark[link] != mark:
            scratch.touch_mark[link] = mark
            scratch.touched[count] = link
            count += 1
    return count


def noted(now: Any, scratch: Any, flow: int, mark: int, changed: int) -> int:
    """Add *flow* to those *changed*."""
    if now.flows[flow * PER_FLOW + MARK] != mark:
        now.flows[flow * PER_FLOW + MARK] = mark
        scratch.flows[changed] = flow
        changed += 1
    return changed


def fair_level(now: Any, link: int) -> Any:
    """To where *link* can let rise what it holds and what rises on it."""
    links, row = now.links, link * PER_LINK
    others = links[row + USED] - links[row + HELD_USE] * links[row + AT]
    return max(links[row + CAPACITY] - others, 0.0) / (links[row + HELD_USE] + links[row + RISING_USE])


def key_of(now: Any, link: int, near: float) -> Any:
    """At which level *link* has to be looked at; NEVER where all is well."""
    links, row = now.links, link * PER_LINK
    if links[row + SHORT] == 0 or links[row + HELD] + links[row + RISING] == 0:
        return NEVER
    fair = fair_level(now, link)
    if links[row + HELD] == 0:
        return fair
    level = links[row + AT]
    if links[row + RISING] > 0:
        return min(fair, level)
    return NEVER if level * (1 - near) <= fair <= level * (1 + near) else fair


def look_at(net: Any, now: Any, scratch: Any, flow: int, but: int, below: float, near: float, size: int) -> int:
    """The links of *flow*, all *but* one, into the heap or forward in it, if they come *below* a level."""
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        if link != but:
            key = key_of(now, link, near)
            if key < below and key < scratch.key[link]:
                size = advance_link(scratch, size, link, key)
    return size


def let_go(net: Any, now: Any, flow: int) -> None:
    """*flow* rises again."""
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


def hold(net: Any, now: Any, flow: int, level: float, holder: int) -> None:
    """*flow*, which rises, stays at *level*."""
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


def move(net: Any, now: Any, flow: int, level: float) -> None:
    """*flow*, which is held, is at *level* from here on."""
    more = level - now.flows[flow * PER_FLOW + LEVEL]
    now.flows[flow * PER_FLOW + LEVEL] = level
    for entry in range(net.first[flow], net.first[flow + 1]):
        now.links[net.link[entry] * PER_LINK + USED] += net.use[entry] * more


def has_room(net: Any, now: Any, flow: int, level: float) -> Any:
    """Whether all links but its own let *flow* rise to *level*: where they hold others, these are as high and
    give way; else there is room.
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
                if links[row + AT] < level:
                    return False
            elif links[row + USED] + net.use[entry] * more > links[row + CAPACITY]:
                return False
    return True


def let_go_all(net: Any, now: Any, scratch: Any, link: int, mark: int, changed: int) -> int:
    """Whatever *link* holds rises again; how many flows changed now."""
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        if now.flows[flow * PER_FLOW + HOLDER] == link:
            let_go(net, now, flow)
            changed = noted(now, scratch, flow, mark, changed)
    return changed


def raise_all(
    net: Any, now: Any, scratch: Any, link: int, level: float, mark: int, near: float, changed: int, size: int
) -> tuple[int, int]:
    """What *link* holds rises to *level*, but for those that other links may stop: these are let go."""
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        if now.flows[flow * PER_FLOW + HOLDER] == link:
            if has_room(net, now, flow, level):
                move(net, now, flow, level)
            else:
                let_go(net, now, flow)
            changed = noted(now, scratch, flow, mark, changed)
            size = look_at(net, now, scratch, flow, link, NEVER, near, size)
    now.links[link * PER_LINK + AT] = level
    return changed, size


def unready(
    net: Any,
    now: Any,
    scratch: Any,
    link: int,
    key: float,
    level: float,
    mark: int,
    near: float,
    changed: int,
    size: int,
) -> tuple[int, int, bool]:
    """Whether *link*, first in the heap by *key*, does not yet give *level*. Those of other links that have
    more rise again, links that stop rising flows before come first, and those for whom it is enough stay at
    their bounds.
    """
    again = bounded = False
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        holder = now.flows[flow * PER_FLOW + HOLDER]
        if holder == RISES:
            bounded = bounded or now.flows[flow * PER_FLOW + BOUND] <= level * (1 + SAME)
        elif holder != link and now.flows[flow * PER_FLOW + LEVEL] > level * (1 + near):
            let_go(net, now, flow)
            again = True
            changed = noted(now, scratch, flow, mark, changed)
        else:
            continue
        size = look_at(net, now, scratch, flow, link, key * (1 - EXACT), near, size)
    if size > 0 and scratch.key[scratch.heap[0]] < key * (1 - EXACT):
        return changed, size, True
    if bounded:
        for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
            flow = now.slot_flow[slot]
            bound = now.flows[flow * PER_FLOW + BOUND]
            if now.flows[flow * PER_FLOW + HOLDER] == RISES and bound <= level * (1 + SAME):
                hold(net, now, flow, bound, FREE)
                changed = noted(now, scratch, flow, mark, changed)
                size = look_at(net, now, scratch, flow, link, NEVER, near, size)
    return changed, size, again or bounded


def settle(
    net: Any, now: Any, scratch: Any, link: int, level: float, mark: int, near: float, changed: int, size: int
) -> tuple[int, int]:
    """All that rises on *link*, and all that it holds, is at *level*."""
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        holder = now.flows[flow * PER_FLOW + HOLDER]
        if holder == RISES:
            hold(net, now, flow, level, link)
        elif holder == link and now.flows[flow * PER_FLOW + LEVEL] != level:
            move(net, now, flow, level)
        else:
            continue
        changed = noted(now, scratch, flow, mark, changed)
        size = look_at(net, now, scratch, flow, link, NEVER, near, size)
    now.links[link * PER_LINK + AT] = level
    return changed, size


def solve(net: Any, now: Any, scratch: Any, mark: int, touched: int, fresh: int, near: float) -> int:
    """New levels, after *touched* links lost flows or got *fresh* ones; how many flows they are of.

    *mark* is higher than in every solution before.
    """
    links = now.links
    changed = size = 0
    for at in range(fresh):
        changed = noted(now, scratch, scratch.fresh[at], mark, changed)
    for at in range(touched):
        link = scratch.touched[at]
        row = link * PER_LINK
        links[row + SHORT] = 1 if now.wanted[link] > links[row + CAPACITY] * (1 + SAME) else 0
    for at in range(touched):
        link = scratch.touched[at]
        if links[link * PER_LINK + SHORT] == 0 and links[link * PER_LINK + HELD] > 0:
            before = changed
            changed = let_go_all(net, now, scratch, link, mark, changed)
            for each in range(before, changed):
                size = look_at(net, now, scratch, scratch.flows[each], link, NEVER, near, size)
        key = key_of(now, link, near)
        if key < scratch.key[link]:
            size = advance_link(scratch, size, link, key)
    while size > 0:
        link = scratch.heap[0]
        row = link * PER_LINK
        key = scratch.key[link]
        size = drop_link(scratch, size)
        found = key_of(now, link, near)
        if found > key * (1 + EXACT):  # others took less of it than it looked
            if found < NEVER:
                size = advance_link(scratch, size, link, found)
            continue
        if scratch.look_mark[link] != mark:
            scratch.look_mark[link] = mark
            scratch.looks[link] = 0
        scratch.looks[link] += 1
        level, held = links[row + AT], links[row + HELD] > 0
        fair, again = fair_level(now, link), True
        if scratch.looks[link] > MOST_LOOKS:
            again = False
            fair = level if held else fair
        elif held and fair > level * (1 + near):
            if links[row + RISING] == 0:
                changed, size = raise_all(net, now, scratch, link, fair, mark, near, changed, size)
            else:
                changed = let_go_all(net, now, scratch, link, mark, changed)
        else:
            if held and fair >= level * (1 - near):
                fair = level
            changed, size, again = unready(net, now, scratch, link, key, fair, mark, near, changed, size)
        if again:
            key = key_of(now, link, near)
            if key < scratch.key[link]:
                size = advance_link(scratch, size, link, key)
        else:
            changed, size = settle(net, now, scratch, link, fair, mark, near, changed, size)
    for at in range(changed):
        flow = scratch.flows[at]
        if now.flows[flow * PER_FLOW + HOLDER] == RISES:
            hold(net, now, flow, now.flows[flow * PER_FLOW + BOUND], FREE)
    return changed


def fill(net: Any, now: Any, scratch: Any) -> None:
    """The levels of all flows, all under way at once."""
    touched, flows = 0, len(net.first) - 1
    for flow in range(flows):
        enter(net, now, scratch, flow, flow)
        touched = collect(net, scratch, flow, 2, touched)
    solve(net, now, scratch, 2, touched, flows, EXACT)
