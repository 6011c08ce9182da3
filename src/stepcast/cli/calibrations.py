"""The facts of calibrations, for ``show``."""

import re
from typing import TYPE_CHECKING, Any

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
