"""Fitted constants as text, with how good the fit is."""

import math
from typing import Any

from stepcast.units import format_percent, format_seconds
from stepcast.views.cells import cells
from stepcast.views.text import facts, table

Facts = dict[str, Any]


def calibration_text(found: Facts, width: int) -> str:
    """Return the constants fitted to measured operators."""
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


def collective_calibration_text(found: Facts, width: int) -> str:
    """Return the constants fitted to sweeps of collectives."""
    pairs = [
        ("cluster", found["cluster"]),
        ("points", f"{found['points']} sizes of {len(found['logs'])} logs"),
        (
            "mean error",
            f"{format_percent(found['before'])} before, {format_percent(found['after'])} after, "
            f"{format_percent(found['left_out'])} on sizes left out",
        ),
    ]
    rows = [(key, one["text"], _give_or_take(key, one), one["means"]) for key, one in found["constants"].items()]
    return "\n\n".join(
        [facts(pairs, width), table(("constant", "value", "give or take", "what it is"), rows, width, whole=(0,))]
    )


def _give_or_take(key: str, one: Facts) -> str:
    error = one["standard_error"]
    return format_seconds(error) if one["text"].endswith(" us") else f"{error:.2g}"


def optimus_calibration_text(found: Facts, width: int) -> str:
    """Return the constants of OptimusPrime, how well they are known, and the runs they were fitted to."""
    rows = []
    for name, value in found["constants"].items():
        spread = found["spread"].get(name)
        shown = format_seconds(value) if name.endswith("_s") else f"{value:.3f}"
        known = "read off the timed forward" if spread is None else f"within a factor of {math.exp(spread):.2f}"
        rows.append((found["titles"][name], shown, known))
    runs = cells(found["runs"], "file measured_s predicted_s", lambda one: _signed(one["error"]))
    return "\n\n".join(
        [
            table(("constant", "value", "known"), rows, width),
            table(("run", "measured", "fitted", "error"), runs, width),
            f"mean absolute error of the fit {format_percent(found['mean_abs_error'])} over {len(runs)} runs",
        ]
    )


def _signed(error: float) -> str:
    return ("+" if error >= 0 else "") + format_percent(error)
