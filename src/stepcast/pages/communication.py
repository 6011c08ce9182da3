"""Communication by group: what the step waits for, and what computation hides."""

from collections.abc import Mapping
from typing import Any

from stepcast.pages.charts import Piece, Row, bars, legend
from stepcast.pages.document import Section
from stepcast.pages.markup import Markup, tag
from stepcast.units import format_percent, format_seconds


def exposed_section(
    groups: Mapping[str, Any], names: Mapping[str, str] | None = None, lead: str = ""
) -> Section | None:
    """Of seconds in all and exposed of each group, the costliest first."""
    listed = sorted(groups.items(), key=lambda each: -each[1]["exposed"])
    listed = [each for each in listed if each[1]["total"] > 0]
    if not listed:
        return None
    rows = []
    for group, each in listed:
        name = (names or {}).get(group, group)
        hidden = max(0.0, each["total"] - each["exposed"])
        pieces = (
            Piece("exposed", 0, each["exposed"], f"{name}, exposed: {format_seconds(each['exposed'])}"),
            Piece("hidden", each["exposed"], hidden, f"{name}, hidden: {format_seconds(hidden)}"),
        )
        note = f"{format_percent(hidden / each['total'])} hidden"
        rows.append(Row(name, pieces, (format_seconds(each["exposed"]), tag("small", note))))
    key = legend((("exposed", "exposed: the step waits for it"), ("hidden", "hidden behind computation")))
    most = max(each["total"] for _, each in listed)
    return Section("Communication", Markup(key + bars(rows, most, format_seconds)), lead)
