"""A recorded run's wall clock and logs as text."""

from typing import Any

from stepcast.report.text import facts, table
from stepcast.units import format_bytes, format_rate, format_seconds

MOST_ROWS = 10


def recorded_text(found: dict[str, Any], width: int) -> str:
    head = [
        (
            "wall clock",
            f"{_time(found['wall_step_s'])} a step in the window, {_time(found['plain_step_s'])} outside",
        ),
        ("clocks", f"{format_seconds(found['clock_spread_s'])} apart at most"),
    ]
    blocks = [facts(head, width)]
    for log in found["logs"]:
        rows = [
            (
                row["kind"],
                format_bytes(row["size_bytes"]),
                row["logged"],
                _time(row["logged_s"]),
                "" if row["busbw_bytes_per_s"] is None else format_rate(row["busbw_bytes_per_s"]),
                row["traced"],
                _time(row["traced_s"]),
            )
            for row in log["collectives"][:MOST_ROWS]
        ]
        heads = (log["program"], "size", "calls", "median", "bus bandwidth", "in the window", "mean")
        blocks.append(table(heads, rows, width))
    return "\n\n".join(blocks)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
