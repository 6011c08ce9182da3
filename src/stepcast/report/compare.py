"""A comparison as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.report.text import facts, table
from stepcast.units import format_seconds

Facts = Mapping[str, Any]
SMALLEST_SHARE = 5e-4


def compare_text(found: Facts, width: int) -> str:
    """Return the step first, then its parts, stages and operations."""
    blocks = [facts([*_sides(found), *_head(found)], width)]
    if found["parts"]:
        blocks.append(_table("part of the step", found["parts"], found, width))
    if found["stages"]:
        rows = [
            {**row, "name": f"stage {stage['stage']}: {row['name']}"}
            for stage in found["stages"]
            for row in stage["parts"]
        ]
        blocks.append(_table("stage", rows, found, width))
    if found["operations"]:
        blocks.append(_table("operation", found["operations"], found, width))
    return "\n\n".join(blocks)


def side_names(found: Facts) -> tuple[str, str]:
    """Return what to call the sides: predicted and measured, or first and second where both are one kind."""
    first, second = found["kinds"]
    return (first, second) if first != second else ("first", "second")


def difference_names(found: Facts) -> tuple[str, ...]:
    """Return the heads of the columns after the two sides: an error only where one can be stated."""
    if len(set(found["kinds"])) == 1:
        return ("first - second", "of the second") if found["same_run"] else ("first - second",)
    return ("difference", "error") if found["same_run"] else ("difference",)


def _sides(found: Facts) -> list[tuple[str, object]]:
    """What is compared with what."""
    sides = found.get("sides", ())
    return [
        (name, f"{side['file']} ({side['what']})")
        for name, side in zip(side_names(found), sides, strict=False)
    ]


def _head(found: Facts) -> list[tuple[str, object]]:
    names = side_names(found)
    pairs: list[tuple[str, object]] = [
        (f"{name} step", format_seconds(found[key]))
        for name, key in zip(names, ("step_s", "measured_step_s"), strict=True)
    ]
    alike = len(set(found["kinds"])) == 1
    if alike:
        pairs.append((difference_names(found)[0], _difference(found)))
    elif found["same_run"]:
        pairs.append(("error", "-" if found["error"] is None else _percent(found["error"])))
    if found["differences"]:
        listed = [f"{one['name']} {one['predicted']} vs {one['measured']}" for one in found["differences"]]
        pairs.append(("settings that differ" if alike else "not the same run", "; ".join(listed)))
    return pairs


def _difference(found: Facts) -> str:
    first_s, second_s = found["step_s"], found["measured_step_s"]
    share = f" ({_percent(first_s / second_s - 1)})" if second_s else ""
    return _signed(first_s - second_s) + share


def _table(name: str, rows: Sequence[Facts], found: Facts, width: int) -> str:
    """Rows that matter to the step; all of them are in the JSON."""
    step_s = max(found["step_s"], found["measured_step_s"])
    headers = (*side_names(found), *difference_names(found))
    shown = [row for row in rows if max(row["predicted_s"], row["measured_s"]) >= SMALLEST_SHARE * step_s]
    cells = [
        (
            row["name"],
            format_seconds(row["predicted_s"]),
            format_seconds(row["measured_s"]),
            _signed(row["difference_s"]),
            "-" if row["error"] is None else _percent(row["error"]),
        )[: len(headers) + 1]
        for row in shown
    ]
    return table((name, *headers), cells, width)


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


def _percent(fraction: float) -> str:
    return f"{fraction * 100:+.1f} %"
