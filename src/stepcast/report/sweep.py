"""A sweep as text: how far it is, and its rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepcast.units import DAY, format_bytes, format_duration, format_money, format_percent, format_seconds
from stepcast.views.text import facts, table

Shown = tuple[str, Callable[[Any], str]]
"""What a fact is called, and how a person reads its value."""


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# Fact -> how a person reads it; what stands in no line here is a word of the point, shown as it is.
SHOWN: dict[str, Shown] = {
    "step_s": ("step", format_seconds),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", _whole),
    "mfu": ("MFU", format_percent),
    "bubble": ("bubble", format_percent),
    "exposed": ("exposed", format_percent),
    "memory_bytes": ("memory", format_bytes),
    "fits": ("fits", lambda value: "yes" if value else "no"),
    "days": ("days", lambda value: f"{value:,.1f}"),
    "cost": ("cost", _whole),  # with the currency of its row
    "goodput": ("goodput", format_percent),
    "state": ("state", str),
    "error": ("error", str),
}
COUNTED: dict[str, Shown] = {
    "folder": ("folder", str),
    "of": ("combinations", _whole),
    "points": ("points", _whole),
    "answered": ("answered", _whole),
    "left": ("left", _whole),
    "errors": ("errors", _whole),
    "out_of_time": ("out of time", _whole),
    "new": ("new", _whole),
    "seconds": ("took", format_seconds),
    "points_per_s": ("rate", lambda value: f"{value:,.1f} points a second"),
    "fit": ("fit", _whole),
    "least_step_s": ("shortest step", format_seconds),
    "most_step_s": ("longest step", format_seconds),
    "best_mfu": ("best MFU", format_percent),
    "best_tokens_per_s_per_gpu": ("most tokens/s/GPU", _whole),
    "least_days": ("shortest run", lambda days: format_duration(days * DAY)),
    "written": ("written", str),
    "rows": ("rows", _whole),
}
HIDDEN = ("position", "low_s", "high_s", "gpu_hours", "found", "currency")


def counted_text(found: Mapping[str, Any], width: int) -> str:
    """Counts and rates, a line each."""
    pairs: list[tuple[str, object]] = [
        (words, shown(found[name])) for name, (words, shown) in COUNTED.items() if found.get(name) is not None
    ]
    if found.get("least_cost") is not None:
        pairs.append(("lowest cost", format_money(found["least_cost"], found["currency"])))
    pairs += [(f"error of {each['points']:,}", each["error"]) for each in found.get("common_errors", ())]
    return facts(pairs, width)


def rows_text(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int], width: int) -> str:
    """The rows that were asked for; what is the same in all of them stands above, once."""
    told = f"{len(rows):,} of {counts['answered']:,} answered points"
    if not rows:
        return f"{told}: none is so"
    names = [name for name in rows[0] if name not in HIDDEN and any(row[name] is not None for row in rows)]
    same = [name for name in names if len(rows) > 1 and name not in SHOWN and len({row[name] for row in rows}) == 1]
    columns = [name for name in names if name not in same]
    heads = [SHOWN[name][0] if name in SHOWN else name.replace("_", "-") for name in columns]
    cells = [[_cell(name, row) for name in columns] for row in rows]
    common = facts([("rows", told), *((name.replace("_", "-"), rows[0][name]) for name in same)], width)
    return f"{common}\n\n{table(heads, cells, width)}"


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if value is None:
        return "-"
    if name == "cost":
        return format_money(value, row.get("currency"))
    return SHOWN[name][1](value) if name in SHOWN else str(value)
