"""A comparison as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.report.text import facts, table
from stepcast.units import format_seconds

Facts = Mapping[str, Any]
HEADERS = ("predicted", "measured", "difference", "error")
SMALLEST_SHARE = 5e-4


def compare_text(found: Facts, width: int) -> str:
    """The step first, then its parts, stages and operations."""
    error = found["error"]
    head = facts(
        [
            ("predicted step", format_seconds(found["step_s"])),
            ("measured step", format_seconds(found["measured_step_s"])),
            ("error", "-" if error is None else _percent(error)),
        ],
        width,
    )
    step_s = max(found["step_s"], found["measured_step_s"])
    blocks = [head]
    if found["parts"]:
        blocks.append(_table("part of the step", found["parts"], step_s, width))
    if found["stages"]:
        rows = [
            {**row, "name": f"stage {stage['stage']}: {row['name']}"}
            for stage in found["stages"]
            for row in stage["parts"]
        ]
        blocks.append(_table("stage", rows, step_s, width))
    if found["operations"]:
        blocks.append(_table("operation", found["operations"], step_s, width))
    return "\n\n".join(blocks)


def _table(name: str, rows: Sequence[Facts], step_s: float, width: int) -> str:
    """Rows that matter to the step; all of them are in the JSON."""
    shown = [row for row in rows if max(row["predicted_s"], row["measured_s"]) >= SMALLEST_SHARE * step_s]
    cells = [
        (
            row["name"],
            format_seconds(row["predicted_s"]),
            format_seconds(row["measured_s"]),
            ("+" if row["difference_s"] >= 0 else "-") + format_seconds(abs(row["difference_s"])),
            "-" if row["error"] is None else _percent(row["error"]),
        )
        for row in shown
    ]
    return table((name, *HEADERS), cells, width)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:+.1f} %"
