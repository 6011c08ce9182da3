"""Fitted constants as text, with how good the fit is."""

from typing import Any

from stepcast.report.text import facts, table
from stepcast.units import format_percent, format_seconds

Facts = dict[str, Any]


def calibration_text(found: Facts, width: int) -> str:
    blocks = []
    if found.get("constants"):
        blocks.append(_constants(found["constants"], width))
    elif found["classes"]:
        blocks.append(_classes(found["classes"], width))
    pairs = [("gpu", found["gpu"]), ("points", found["points"])]
    pairs += [("assumed", text) for text in found.get("assumptions", ())]
    if found["before"] is not None:
        pairs.append(("mean error", _errors(found)))
    return "\n\n".join([facts(pairs, width), *blocks])


def _errors(found: Facts) -> str:
    text = f"{format_percent(found['before'])} before, {format_percent(found['after'])} after"
    if found["left_out"] is None:
        return text
    return f"{text}, {format_percent(found['left_out'])} on points left out"


def _classes(classes: dict[str, Facts], width: int) -> str:
    rows = [
        (
            name,
            one["points"],
            format_percent(one["before"]),
            format_percent(one["after"]),
            "-" if one["left_out"] is None else format_percent(one["left_out"]),
            f"{one['factor']:.3f}" if one["used"] else "not used",
            "-" if "slope" in one["unidentified"] else f"{one['slope']:+.3f}",
            "-" if "least_s" in one["unidentified"] else format_seconds(one["least_s"]),
        )
        for name, one in classes.items()
    ]
    heads = ("class", "points", "error before", "after", "left out", "factor", "slope", "least")
    return table(heads, rows, width)


def _constants(constants: dict[str, Facts], width: int) -> str:
    rows = [(one["title"], one["text"], one["points"], one["known"]) for one in constants.values()]
    return table(("constant", "value", "points", "known"), rows, width)
