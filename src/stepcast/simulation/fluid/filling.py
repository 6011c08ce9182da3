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

from stepcast.simulation.fluid.heap import NEVER, advance_link, drop_link

SAME = 1e-9
"""Levels nearer to each other than this share are one: a flow that fits exactly is not slowed by rounding."""
EXACT = 1e-11
"""Levels that change by less than this share are not told to others."""
MOST_LOOKS = 50
"""How often a link is looked at for one change at most: few are looked at more than twice."""
OPEN, BOUND = -2, -1
"""In place of the link that holds a flow: it rises; it has what it can take."""


def enter(net: Any, now: Any, scratch: Any, flow: int, fresh: int) -> None:
    """*flow* is under way from here on; *fresh* others came since rates were found."""
    now.level[flow] = 0.0
    now.holder[flow] = OPEN
    scratch.fresh[fresh] = flow
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        slot = now.slot_first[link] + now.members[link]
        now.slot_flow[slot] = flow
        now.slot_entry[slot] = entry
        now.slot[entry] = slot
        now.members[link] += 1
        now.wanted[link] += net.use[entry] * now.bound[flow]
        now.open[link] += 1
        now.open_use[link] += net.use[entry]


def leave(net: Any, now: Any, flow: int) -> None:
    holder = now.holder[flow]
    if holder >= 0:
        now.held[holder] -= 1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        now.members[link] -= 1
        slot, last = now.slot[entry], now.slot_first[link] + now.members[link]
        moved = now.slot_entry[last]
        now.slot_entry[slot] = moved
        now.slot_flow[slot] = now.slot_flow[last]
        now.slot[moved] = slot
        if now.members[link] == 0:  # what rounding left of many that came and went
            now.wanted[link] = 0.0
            now.used[link] = 0.0
        else:
            now.wanted[link] -= net.use[entry] * now.bound[flow]
            now.used[link] -= net.use[entry] * now.level[flow]
        if link == holder:
            now.held_use[link] = now.held_use[link] - net.use[entry] if now.held[link] > 0 else 0.0


def collect(net: Any, scratch: Any, flow: int, mark: int, count: int) -> int:
    """Add the links of *flow* to the *count* that are touched."""
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        if scratch.touch_mark[link] != mark:
            scratch.touch_mark[link] = mark
            scratch.touched[count] = link
            count += 1
    return count


def noted(scratch: Any, flow: int, mark: int, changed: int) -> int:
    """Add *flow* to those *changed*."""
    if scratch.flow_mark[flow] != mark:
        scratch.flow_mark[flow] = mark
        scratch.flows[changed] = flow
        changed += 1
    return changed


def fair_level(net: Any, now: Any, link: int) -> Any:
    """To where *link* can let rise what it holds and what is open on it."""
    held_use = now.held_use[link]
    others = now.used[link] - held_use * now.link_level[link]
    return max(net.capacity[link] - others, 0.0) / (held_use + now.open_use[link])


def key_of(net: Any, now: Any, link: int, near: float) -> Any:
    """At which level *link* has to be looked at; NEVER where all is well."""
    if not now.short[link] or now.held[link] + now.open[link] == 0:
        return NEVER
    fair = fair_level(net, now, link)
    if now.held[link] == 0:
        return fair
    level = now.link_level[link]
    if now.open[link] == 0 and level * (1 - near) <= fair <= level * (1 + near):
        return NEVER
    return min(fair, level)


def look_at(
    net: Any, now: Any, scratch: Any, flow: int, but: int, below: float, near: float, size: int
) -> int:
    """The links of *flow*, all *but* one, into the heap or forward in it, if they come *below* a level."""
    for entry in range(net.first[flow], net.first[flow + 1]):
        link = net.link[entry]
        if link != but:
            key = key_of(net, now, link, near)
            if key < below and key < scratch.key[link]:
                size = advance_link(scratch, size, link, key)
    return size


def let_go(net: Any, now: Any, flow: int) -> None:
    """*flow* rises again."""
    level, holder = now.level[flow], now.holder[flow]
    now.holder[flow] = OPEN
    if holder >= 0:
        now.held[holder] -= 1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link, use = net.link[entry], net.use[entry]
        now.used[link] -= use * level
        now.open[link] += 1
        now.open_use[link] += use
        if link == holder:
            now.held_use[link] = now.held_use[link] - use if now.held[link] > 0 else 0.0


def hold(net: Any, now: Any, flow: int, level: float, holder: int) -> None:
    """*flow*, which is open, stays at *level*."""
    now.level[flow] = level
    now.holder[flow] = holder
    if holder >= 0:
        now.held[holder] += 1
    for entry in range(net.first[flow], net.first[flow + 1]):
        link, use = net.link[entry], net.use[entry]
        now.used[link] += use * level
        now.open[link] -= 1
        now.open_use[link] = now.open_use[link] - use if now.open[link] > 0 else 0.0
        if link == holder:
            now.held_use[link] += use


def let_go_all(net: Any, now: Any, scratch: Any, link: int, mark: int, changed: int) -> int:
    """Whatever *link* holds rises again; how many flows changed now."""
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        if now.holder[flow] == link:
            let_go(net, now, flow)
            changed = noted(scratch, flow, mark, changed)
    return changed


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
    """Whether *link*, first in the heap by *key*, does not yet give *level*. Those for whom it is enough stay
    at their bounds, those of other links that have more rise again, and links that stop open flows before
    come first.
    """
    again = False
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        holder = now.holder[flow]
        if holder == OPEN:
            if now.bound[flow] <= level * (1 + SAME):
                hold(net, now, flow, now.bound[flow], BOUND)
                again = True
                changed = noted(scratch, flow, mark, changed)
                size = look_at(net, now, scratch, flow, link, NEVER, near, size)
                continue
        elif holder != link and now.level[flow] > level * (1 + near):
            let_go(net, now, flow)
            again = True
            changed = noted(scratch, flow, mark, changed)
        else:
            continue
        size = look_at(net, now, scratch, flow, link, key * (1 - EXACT), near, size)
    if size > 0 and scratch.key[scratch.heap[0]] < key * (1 - EXACT):
        again = True
    return changed, size, again


def settle(
    net: Any, now: Any, scratch: Any, link: int, level: float, mark: int, near: float, changed: int, size: int
) -> tuple[int, int]:
    """All that is open on *link*, and all that it holds, is at *level*."""
    before = now.link_level[link]
    now.link_level[link] = level
    for slot in range(now.slot_first[link], now.slot_first[link] + now.members[link]):
        flow = now.slot_flow[slot]
        holder = now.holder[flow]
        if holder == OPEN:
            hold(net, now, flow, level, link)
        elif holder == link and now.level[flow] != level:
            now.level[flow] = level
            for entry in range(net.first[flow], net.first[flow + 1]):
                now.used[net.link[entry]] += net.use[entry] * (level - before)
        else:
            continue
        changed = noted(scratch, flow, mark, changed)
        size = look_at(net, now, scratch, flow, link, NEVER, near, size)
    return changed, size


def solve(net: Any, now: Any, scratch: Any, mark: int, touched: int, fresh: int, near: float) -> int:
    """New levels, after *touched* links lost flows or got *fresh* ones; how many flows they are of.

    *mark* is higher than in every solution before.
    """
    changed = size = 0
    for at in range(fresh):
        changed = noted(scratch, scratch.fresh[at], mark, changed)
    for at in range(touched):
        link = scratch.touched[at]
        now.short[link] = now.wanted[link] > net.capacity[link] * (1 + SAME)
    for at in range(touched):
        link = scratch.touched[at]
        if not now.short[link] and now.held[link] > 0:
            before = changed
            changed = let_go_all(net, now, scratch, link, mark, changed)
            for each in range(before, changed):
                size = look_at(net, now, scratch, scratch.flows[each], link, NEVER, near, size)
        key = key_of(net, now, link, near)
        if key < scratch.key[link]:
            size = advance_link(scratch, size, link, key)
    while size > 0:
        link = scratch.heap[0]
        key = scratch.key[link]
        size = drop_link(scratch, size)
        found = key_of(net, now, link, near)
        if found > key * (1 + EXACT):  # others took less of it than it looked
            if found < NEVER:
                size = advance_link(scratch, size, link, found)
            continue
        if scratch.look_mark[link] != mark:
            scratch.look_mark[link] = mark
            scratch.looks[link] = 0
        scratch.looks[link] += 1
        level, held = now.link_level[link], now.held[link] > 0
        fair, again = fair_level(net, now, link), True
        if scratch.looks[link] > MOST_LOOKS:
            again = False
            fair = level if held else fair
        elif held and fair > level * (1 + near):
            changed = let_go_all(net, now, scratch, link, mark, changed)
        else:
            if held and fair >= level * (1 - near):
                fair = level
            changed, size, again = unready(net, now, scratch, link, key, fair, mark, near, changed, size)
        if again:
            key = key_of(net, now, link, near)
            if key < scratch.key[link]:
                size = advance_link(scratch, size, link, key)
        else:
            changed, size = settle(net, now, scratch, link, fair, mark, near, changed, size)
    for at in range(changed):
        flow = scratch.flows[at]
        if now.holder[flow] == OPEN:
            hold(net, now, flow, now.bound[flow], BOUND)
    return changed


def fill(net: Any, now: Any, scratch: Any) -> None:
    """The levels of all flows, all under way at once."""
    touched, flows = 0, len(net.first) - 1
    for flow in range(flows):
        enter(net, now, scratch, flow, flow)
        touched = collect(net, scratch, flow, 2, touched)
    solve(net, now, scratch, 2, touched, flows, EXACT)
