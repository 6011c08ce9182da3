"""Calibrations as facts and text for ``show``."""

import re
from typing import TYPE_CHECKING, Any

from stepcast.units import format_percent, format_seconds
from stepcast.views.text import table

if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration

Facts = dict[str, Any]
CLASS = re.compile(r'^\[(?:class\."?[\w.-]+"?|constants)\]', re.MULTILINE)


def looks_like_calibration(head: str) -> bool:
    """Whether a file that begins so is a calibration that ``profile`` or ``calibrate`` wrote."""
    return CLASS.search(head) is not None


def calibration_facts(calibration: "Calibration") -> Facts:
    return {
        "kind": "calibration",
        "gpu": calibration.gpu,
        "classes": {
            name: {
                "factor": correction.factor,
                "slope": correction.slope,
                "least_s": correction.least_s,
                "spread": correction.spread,
            }
            for name, correction in calibration.corrections.items()
        },
        "constants": dict(calibration.constants),
    }


def calibration_text(found: Facts, width: int) -> str:
    rows = [
        (name, f"{one['factor']:.3f}", format_seconds(one["least_s"]), format_percent(one["spread"]))
        for name, one in found["classes"].items()
    ]
    blocks = []
    if rows:
        heads = ("class", "measured / predicted", "least time", "nine in ten within")
        blocks += [f"prices of {found['gpu']} corrected by measurements", table(heads, rows, width)]
    if found["constants"]:
        constants = [(name, f"{value:.6g}") for name, value in found["constants"].items()]
        blocks += [f"constants of runs on {found['gpu']}", table(("constant", "value"), constants, width)]
    return "\n\n".join(blocks)
