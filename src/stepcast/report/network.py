"""The links of a step as text: use of each tier over time, the busiest links, and what was slowed down."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from stepcast.report.asked import asked_pairs
from stepcast.report.cells import cells
from stepcast.report.text import GAP, bullet, facts, table
from stepcast.units import format_percent, format_seconds

Facts = Mapping[str, Any]
MOST_LINKS = 10
# From idle to the capacity of a link, in ten steps that any terminal shows.
SHADES = " .:-=+*#%@"


def network_text(found: Facts, width: int) -> str:
    asked = asked_pairs(found)
    parts = [facts(asked, width)] if asked else []
    parts.append(facts(_headline(found), width))
    if used := used_tiers(found):
        parts += [_tiers(used, width), _over_time(used, found["step_s"], width)]
        parts += [_busiest(found["hottest"], found["step_s"], width)]
    if kinds := kinds_of(found["operations"]):
        parts.append(_operations(kinds, width))
    if found["assumptions"]:
        parts.append("\n".join(bullet(note, "assumed: ", width) for note in found["assumptions"]))
    return "\n\n".join(parts)


def slower(found: Facts) -> float:
    """By what share links that are shared lengthen the step."""
    return float(found["step_s"] / found["alone_step_s"] - 1) if found["alone_step_s"] else 0.0


def used_tiers(found: Facts) -> list[Facts]:
    return [each for each in found["tiers"] if each["bytes"] > 0]


class Kind(NamedTuple):
    """Operations of one kind and group, of all stages."""

    what: str
    group: str
    times: int
    alone_s: float
    took_s: float
    slowest: float

    @property
    def slowdown(self) -> float:
        return self.took_s / self.alone_s if self.alone_s > 0 else 1.0


def kinds_of(operations: Sequence[Facts]) -> list[Kind]:
    """What was slowed most in all comes first."""
    found: dict[tuple[str, str], Kind] = {}
    for each in operations:
        key = each["operation"], each["group"]
        known = found.get(key, Kind(*key, 0, 0.0, 0.0, 1.0))
        found[key] = Kind(
            *key,
            known.times + each["count"],
            known.alone_s + each["alone_s"],
            known.took_s + each["took_s"],
            max(known.slowest, each["slowest"]),
        )
    return sorted(found.values(), key=lambda kind: kind.alone_s - kind.took_s)


def busiest_link(found: Facts) -> str:
    """Return the link with the highest mean use, and how long it is at its capacity."""
    link, step_s = found["hottest"][0], found["step_s"]
    alike = f" ({link['alike']:,} alike)" if link["alike"] > 1 else ""
    return f"{link['link']}{alike}: {link_use(link, step_s)}"


def link_use(link: Facts, step_s: float) -> str:
    """Return the mean use of a link, and for how much of the step all of its capacity is used."""
    used = f"mean use {format_percent(link['share'])}"
    at_capacity = link["full_s"] / step_s if step_s else 0.0
    return f"{used}, at capacity {format_percent(at_capacity) if at_capacity else '0 %'} of the step"


def _headline(found: Facts) -> list[tuple[str, object]]:
    alone = format_seconds(found["alone_step_s"])
    links = f"{found['links']:,} links, {found['routing']}"
    busiest = [("busiest link", busiest_link(found))] if found["hottest"] else []
    return [
        ("step", f"{format_seconds(found['step_s'])} with shared links"),
        ("without sharing", f"{alone}: sharing links costs {slower(found) * 100:.1f} %"),
        *busiest,
        ("fast engine", f"{format_seconds(found['fast_step_s'])}: it times each collective by itself"),
        ("network", links if used_tiers(found) else f"{links}; none is used"),
    ]


# Its name, links, the rate of one, bytes, mean use, and the peak use of its busiest link.
TIER = "tier links, capacity_bytes_per_s bytes share busiest_share"


def _tiers(tiers: Sequence[Facts], width: int) -> str:
    return table(("tier", "links", "each", "carried", "mean use", "peak use"), cells(tiers, TIER), width)


def _over_time(tiers: Sequence[Facts], step_s: float, width: int) -> str:
    """A line for each tier: how much of its busiest link is used, from the start of the step to its end."""
    label = max(len(each["tier"]) for each in tiers)
    room = max(10, width - label - len(GAP) - 2)
    lines = [f"{each['tier'].ljust(label)}{GAP}|{shaded(each['busiest_over_time'], room)}|" for each in tiers]
    long = len(shaded(tiers[0]["busiest_over_time"], room))
    axis = " " * (label + len(GAP) + 1) + "0" + format_seconds(step_s).rjust(long - 1)
    key = f"use of the busiest link of each tier over time, from 0 to 100 %: {SHADES.strip()}"
    return "\n".join([key, *lines, axis])


def shaded(shares: Sequence[float], room: int) -> str:
    """*shares* of one in as many characters; the most of those that fall into one."""
    room = min(room, len(shares))
    bounds = [at * len(shares) // room for at in range(room + 1)] if room else [0]
    most = [max(shares[start:stop]) for start, stop in pairwise(bounds)]
    return "".join(SHADES[shade(share, len(SHADES))] for share in most)


def shade(share: float, steps: int) -> int:
    """Return which of *steps* shades: the first for no use at all, the last for more than 94 %."""
    return 0 if share <= 0 else max(1, min(steps - 1, int(share * (steps - 1) + 0.5)))


def _busiest(links: Sequence[Facts], step_s: float, width: int) -> str:
    rows = cells(
        links[:MOST_LINKS],
        "link alike, share",
        lambda each: format_percent(each["full_s"] / step_s) if step_s else "-",
        lambda each: carried(each["users"]),
    )
    return table(("busiest links", "alike", "mean use", "at capacity", "used by"), rows, width)


def carried(users: Mapping[str, float]) -> str:
    """Return the groups whose bytes a link carries, most first: ``dp 80 %, pp 20 %``."""
    total = sum(users.values()) or 1.0
    shares = {name: size / total for name, size in users.items()}
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in shares.items() if share >= 0.005)


def kind_cells(kind: Kind, times: str = "x") -> list[str]:
    """Return its name, group, count, time alone, time with shared links, slowdown and worst slowdown."""
    return [
        kind.what,
        kind.group,
        f"{kind.times:,}",
        format_seconds(kind.alone_s / kind.times),
        format_seconds(kind.took_s / kind.times),
        f"{kind.slowdown:.2f} {times}",
        f"{kind.slowest:.2f} {times}",
    ]


def _operations(kinds: Sequence[Kind], width: int) -> str:
    heads = ("communication", "group", "times", "alone", "shared", "slowdown", "worst")
    return table(heads, map(kind_cells, kinds), width)
