"""What the links of a step did, as text: tiers over time, the hottest links, and who was slowed down."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.report.asked import asked_pairs
from stepcast.report.text import GAP, bullet, facts, table
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds

Facts = Mapping[str, Any]
MOST_LINKS = 10
MOST_OPS = 12
# From idle to full, in ten steps that any terminal shows.
SHADES = " .:-=+*#%@"


def network_text(found: Facts, width: int) -> str:
    asked = asked_pairs(found)
    parts = [facts(asked, width)] if asked else []
    parts.append(facts(_headline(found), width))
    if not found["tiers"]:
        return "\n\n".join([*parts, "no link is crossed: the job stays within one GPU"])
    parts.append(_tiers(found["tiers"], width))
    if found["step_s"] > 0:
        parts.append(_over_time(found, width))
    if found["hottest"]:
        parts.append(_hottest(found["hottest"], width))
    if found["operations"]:
        parts.append(_operations(found["operations"], width))
    if found["assumptions"]:
        parts.append("\n".join(bullet(note, "assumed: ", width) for note in found["assumptions"]))
    return "\n\n".join(parts)


def slower(found: Facts) -> float:
    """By what share links that are shared lengthen the step."""
    return found["step_s"] / found["alone_step_s"] - 1 if found["alone_step_s"] else 0.0


def _headline(found: Facts) -> list[tuple[str, object]]:
    return [
        ("step", f"{format_seconds(found['step_s'])}, links shared as they come"),
        (
            "alone",
            f"{format_seconds(found['alone_step_s'])} if no link were shared: {slower(found) * 100:+.1f} %",
        ),
        ("fast engine", f"{format_seconds(found['fast_step_s'])}, which prices each collective by itself"),
        ("routing", found["routing"]),
    ]


def _tiers(tiers: Sequence[Facts], width: int) -> str:
    rows = [
        (
            each["tier"],
            f"{each['links']:,}",
            format_rate(each["capacity_bytes_per_s"]),
            format_bytes(each["bytes"]),
            format_percent(each["utilisation"]),
            format_percent(each["busiest"]),
            format_percent(each["full"]),
        )
        for each in tiers
    ]
    heads = ("tier", "links", "each", "carried", "used", "busiest", "a link full")
    return table(heads, rows, width)


def _over_time(found: Facts, width: int) -> str:
    """A line for each tier: how much of its busiest link is used, from the start of the step to its end."""
    names = [each["tier"] for each in found["tiers"]]
    label = max(map(len, names))
    room = max(10, width - label - len(GAP))
    lines = [f"{each['tier'].ljust(label)}{GAP}{shaded(each['over_time'], room)}" for each in found["tiers"]]
    end = format_seconds(found["step_s"])
    axis = " " * label + GAP + "0" + end.rjust(room - 1)
    key = f"the busiest link of each tier over time, from idle to full: {SHADES.strip()}"
    return "\n".join([key, *(line.rstrip() for line in lines), axis])


def shaded(shares: Sequence[float], room: int) -> str:
    """*shares* of one in as many characters; the most of those that fall into one."""
    room = min(room, len(shares))
    if not room:
        return ""
    bounds = [at * len(shares) // room for at in range(room + 1)]
    most = [max(shares[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return "".join(SHADES[shade(share, len(SHADES))] for share in most)


def shade(share: float, steps: int) -> int:
    """Which of *steps* shades: the first for nothing at all, the last for full."""
    return 0 if share <= 0 else max(1, min(steps - 1, int(share * (steps - 1) + 0.5)))


def _hottest(links: Sequence[Facts], width: int) -> str:
    rows = [
        (
            each["link"],
            format_percent(each["utilisation"]),
            format_percent(each["full"]),
            format_bytes(each["bytes"]),
            carried(each["groups"]),
        )
        for each in links[:MOST_LINKS]
    ]
    return table(("hottest links", "used", "full", "carried", "by"), rows, width)


def carried(groups: Mapping[str, float]) -> str:
    """Whose bytes a link carries, most first: ``dp 80 %, pp 20 %``."""
    listed = sorted(groups.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {format_percent(share)}" for name, share in listed if share > 0)


def _operations(operations: Sequence[Facts], width: int) -> str:
    rows = [
        (
            each["what"],
            each["group"],
            f"{each['count']:,}",
            format_seconds(each["alone_s"]),
            format_seconds(each["mean_s"]),
            f"{each['slowdown']:.2f} x",
            f"{each['worst_slowdown']:.2f} x",
        )
        for each in operations[:MOST_OPS]
    ]
    text = table(("communication", "group", "times", "alone", "here", "slower", "worst"), rows, width)
    left = len(operations) - MOST_OPS
    return text + (f"\n{left:,} more with --json" if left > 0 else "")
