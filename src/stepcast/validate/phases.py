"""The phases of a predicted step on one GPU, as events on its own clock would tell them apart."""

from itertools import pairwise

import numpy as np

from stepcast.forecast.simulate import Prediction

PHASES = ("forward", "backward", "optimizer")


def phases_s(prediction: Prediction) -> dict[str, float]:
    """Seconds of forward, backward and update; each begins when the last kernel before it ends."""
    timeline = prediction.timeline
    computes = np.array([lane.name == "compute" for lane in timeline.lanes], dtype=bool)[timeline.lane_of]
    ends_s = timeline.start_s + timeline.duration_s
    ends = []
    for letter in ("F", "B"):
        slots = [slot.get("slot", "").startswith(letter) for slot in timeline.details]
        found = computes & np.array([*slots, False], dtype=bool)[timeline.detail_of]
        ends.append(float(np.max(ends_s[found], initial=0.0)))
    bounds = (0.0, *ends, prediction.step_s)
    spans = (after - before for before, after in pairwise(bounds))
    return dict(zip(PHASES, spans, strict=True))
