"""Explained OptimusPrime runs and their calibration as text."""

import math
from typing import Any

from stepcast.report.cells import cells
from stepcast.report.text import bottleneck, facts, table
from stepcast.units import format_percent, format_seconds

# Parts that are work rather than overhead.
WORK = ("compute", "unhooked", "accumulation", "optimizer")
# In the order in which a reader asks.
PART_TITLES = {
    "compute": "compute of timed modules, forward and backward",
    "unhooked": "operators that are not timed",
    "host": "GPU idle while the host launches",
    "accumulation": "gradient accumulation",
    "tensor": "tensor-parallel collectives",
    "data": "data-parallel collectives",
    "messages": "messages between stages",
    "optimizer": "optimizer",
    "fixed": "fixed step overhead",
    "bubble": "waiting for other stages (bubble)",
    "unexplained": "not explained by the model",
}


def optimus_text(found: dict[str, Any], width: int) -> str:
    """Return the facts of an OptimusAnalysis: the verdict, then the breakdown and the stages."""
    step_s, layout, messages = found["step_s"], found["layout"], found["messages"]
    hops = messages["forward_per_hop"]
    named = {title: found["breakdown_s"].get(part, 0.0) for part, title in PART_TITLES.items()}
    head: list[tuple[str, object]] = [
        ("step", f"{format_seconds(step_s)} measured (median)"),
        *bottleneck(named, step_s, [PART_TITLES[part] for part in WORK]),
        *_stragglers(found),
        ("run", f"{found['model']}, tp {layout['tp']} x dp {layout['dp']} x pp {layout['pp']}"),
        ("batch", f"{found['micro_batches']} micro-batches of {found['micro_batch']}"),
        ("sequence", f"{found['sequence']:g} tokens (median of the steps)"),
        ("predicted step", f"{format_seconds(found['predicted_step_s'])} ({_signed(found['error'])})"),
    ]
    if hops:
        head.append(
            (
                "messages",
                f"{max(hops)} forward and {messages['backward_per_hop']} backward per hop and micro-batch",
            )
        )
    parts = [
        (
            title,
            format_seconds(found["breakdown_s"][part]),
            format_percent(found["breakdown_s"][part] / step_s),
        )
        for part, title in PART_TITLES.items()
        if found["breakdown_s"].get(part)
    ]
    total = sum(found["breakdown_s"].values())
    parts.append(("step", format_seconds(total), format_percent(total / step_s)))
    stages = cells(
        found["stages"], "stage ends_with", lambda row: f"{row['layers']:g}", "forward_s busy_s bubble_s"
    )
    blocks = [
        facts(head, width),
        table(
            (f"time breakdown of stage {found['breakdown_stage']}, the busiest", "time", "share"),
            parts,
            width,
        ),
        table(("stage", "ends with", "layers", "timed forward", "busy", "bubble"), stages, width),
    ]
    return "\n\n".join(blocks)


def _stragglers(found: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the slow stages, and how much longer their forward passes take in a step."""
    forward_s = {row["stage"]: row["forward_s"] for row in found["stages"]}
    lines: list[tuple[str, object]] = []
    for one in found["stragglers"]:
        words = f"stage {one['stage']}: its timed modules take {one['factor']:.2f}x the median of the stages"
        if own_s := forward_s.get(one["stage"]):
            extra_s = own_s * (1 - 1 / one["factor"]) * found["micro_batches"]
            words += f"; {format_seconds(extra_s)} more per step in its forward passes"
        lines.append(("straggler", words))
    return lines or [("straggler", "none" if len(found["stages"]) > 2 else "not known from so few stages")]


def calibration_text(found: dict[str, Any], width: int) -> str:
    """Fitted constants with how well they are known, and the runs they were fitted to."""
    rows = []
    for name, value in found["constants"].items():
        spread = found["spread"].get(name)
        shown = format_seconds(value) if name.endswith("_s") else f"{value:.3f}"
        known = (
            "read off the timed forward" if spread is None else f"within a factor of {math.exp(spread):.2f}"
        )
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
