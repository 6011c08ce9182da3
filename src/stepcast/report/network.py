"""What the links of a step did, as text: tiers over time, the hottest links, and who was slowed down."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from stepcast.report.asked import asked_pairs
from stepcast.report.cells import cells
from stepcast.report.text import GAP, bullet, facts, table
from stepcast.units import format_percent, format_seconds

Facts = Mapping[str, Any]
MOST_LINKS = 10
# From idle to full, in ten steps that any terminal shows.
SHADES = " .:-=+*#%@"


def network_text(found: Facts, width: int) -> str:
    asked = asked_pairs(found)
    parts = [facts(asked, width)] if asked else []
    parts.append(facts(_headline(found), width))
    if used := used_tiers(found):
        parts += [_tiers(used, width), _over_time(used, found["step_s"], width)]
        parts += [_hottest(found["hottest"], found["step_s"], width)]
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


def _headline(found: Facts) -> list[tuple[str, object]]:
    alone = format_seconds(found["alone_step_s"])
    links = f"{found['links']:,} links, {found['routing']}"
    return [
        ("step", f"{format_seconds(found['step_s'])} with links shared"),
        ("alone", f"{alone} if no link were shared: sharing costs {slower(found) * 100:.1f} %"),
        ("fast engine", f"{format_seconds(found['fast_step_s'])}: it prices each collective by itself"),
        ("network", links if used_tiers(found) else f"{links}; none is used"),
    ]


# Its name, links, the rate of one, bytes, how much was used, and at most of one link.
TIER = "tier links, capacity_bytes_per_s bytes share busiest_share"


def _tiers(tiers: Sequence[Facts], width: int) -> str:
    return table(("tier", "links", "each", "carried", "used", "at most"), cells(tiers, TIER), width)


def _over_time(tiers: Sequence[Facts], step_s: float, width: int) -> str:
    """A line for each tier: how much of its busiest link is used, from the start of the step to its end."""
    label = max(len(each["tier"]) for each in tiers)
    room = max(10, width - label - len(GAP) - 2)
    lines = [f"{each['tier'].ljust(label)}{GAP}|{shaded(each['busiest_over_time'], room)}|" for each in tiers]
    long = len(shaded(tiers[0]["busiest_over_time"], room))
    axis = " " * (label + len(GAP) + 1) + "0" + format_seconds(step_s).rjust(long - 1)
    key = f"the busiest link of each tier over time, from idle to full: {SHADES.strip()}"
    return "\n".join([key, *lines, axis])


def shaded(shares: Sequence[float], room: int) -> str:
    """*shares* of one in as many characters; the most of those that fall into one."""
    room = min(room, len(shares))
    bounds = [at * len(shares) // room for at in range(room + 1)] if room else [0]
    most = [max(shares[start:stop]) for start, stop in pairwise(bounds)]
    return "".join(SHADES[shade(share, len(SHADES))] for share in most)


def shade(share: float, steps: int) -> int:
    """Which of *steps* shades: the first for nothing at all, the last for full."""
    return 0 if share <= 0 else max(1, min(steps - 1, int(share * (steps - 1) + 0.5)))


def _hottest(links: Sequence[Facts], step_s: float, width: int) -> str:
    rows = cells(
        links[:MOST_LINKS],
        "link alike, share",
        lambda each: format_percent(each["full_s"] / step_s) if step_s else "-",
        lambda each: carried(each["users"]),
    )
    return table(("hottest links", "alike", "used", "full", "by"), rows, width)


def carried(users: Mapping[str, float]) -> str:
    """Whose bytes a link carries, most first: ``dp 80 %, pp 20 %``."""
    total = sum(users.values()) or 1.0
    return ", ".join(f"{name} {size / total * 100:.0f} %" for name, size in users.items() if size > 0)


def kind_cells(kind: Kind, times: str = "x") -> list[str]:
    """What it is, its group, how often, one alone, one here, how many *times* as long, and at worst."""
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
    heads = ("communication", "group", "times", "alone", "here", "slower", "worst")
    return table(heads, map(kind_cells, kinds), width)
