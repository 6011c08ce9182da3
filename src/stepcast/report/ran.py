"""A workload that was run, as text."""

from collections.abc import Mapping
from typing import Any

from stepcast.report.cells import cells
from stepcast.report.text import facts, table
from stepcast.units import format_percent, format_seconds


def ran_text(found: Mapping[str, Any], width: int) -> str:
    ranks = found["ranks"]
    pairs = [
        ("ran on", found["device"]),
        ("ranks", f"{len(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]} alone" if ranks else "none"),
        ("ops", f"{found['ops']:,}"),
        ("step", format_seconds(found["step_s"])),
        ("predicted step", format_seconds(found["predicted_step_s"])),
    ]
    if found["priced_collectives_s"]:
        pairs.append(("messages, priced", format_seconds(found["priced_collectives_s"])))
    error = found["mean_abs_error"]
    if error is not None:
        pairs.append(("mean error by kind", format_percent(error)))
    rows = cells(
        found["kinds"],
        "kind ops measured_s predicted_s",
        lambda row: "" if row["error"] is None else f"{row['error']:+.1%}",
    )
    heads = ("kind of op", "ops", "measured", "predicted", "error")
    return "\n\n".join((facts(pairs, width), table(heads, rows, width)))
