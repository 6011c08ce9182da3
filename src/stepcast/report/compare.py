"""A comparison as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.report.text import facts, table
from stepcast.units import format_seconds

Facts = Mapping[str, Any]
HEADERS = ("predicted", "measured", "difference", "error")
OTHER_RUNS = ("first", "second", "difference")
SMALLEST_SHARE = 5e-4


def compare_text(found: Facts, width: int) -> str:
    """The step first, then its parts, stages and operations; errors only where both are of the same run."""
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


def _sides(found: Facts) -> list[tuple[str, object]]:
    """What is compared with what."""
    names = ("predicted", "measured") if found["same_run"] else ("first", "second")
    sides = found.get("sides", ())
    return [(name, f"{side['file']} ({side['what']})") for name, side in zip(names, sides, strict=False)]


def _head(found: Facts) -> list[tuple[str, object]]:
    first, second = (format_seconds(found[name]) for name in ("step_s", "measured_step_s"))
    if not found["same_run"]:
        listed = [
            f"{one['name']} {one['predicted']} against {one['measured']}" for one in found["differences"]
        ]
        return [("first step", first), ("second step", second), ("not the same run", "; ".join(listed))]
    error = "-" if found["error"] is None else _percent(found["error"])
    return [("predicted step", first), ("measured step", second), ("error", error)]


def _table(name: str, rows: Sequence[Facts], found: Facts, width: int) -> str:
    """Rows that matter to the step; all of them are in the JSON."""
    step_s = max(found["step_s"], found["measured_step_s"])
    headers = HEADERS if found["same_run"] else OTHER_RUNS
    shown = [row for row in rows if max(row["predicted_s"], row["measured_s"]) >= SMALLEST_SHARE * step_s]
    cells = [
        (
            row["name"],
            format_seconds(row["predicted_s"]),
            format_seconds(row["measured_s"]),
            ("+" if row["difference_s"] >= 0 else "-") + format_seconds(abs(row["difference_s"])),
            "-" if row["error"] is None else _percent(row["error"]),
        )[: len(headers) + 1]
        for row in shown
    ]
    return table((name, *headers), cells, width)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:+.1f} %"
