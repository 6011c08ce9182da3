"""Output of verbs that simulate a step: report, page, trace and JSON."""

import argparse
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from stepcast.cli.output import show_view, terminal_width, write_trace
from stepcast.ir.facts import FactDict
from stepcast.version import __version__
from stepcast.views.text import visible

if TYPE_CHECKING:
    from stepcast.forecast.prediction import Prediction
    from stepcast.ir.facts import ChangeFacts


def show_prediction(
    prediction: "Prediction",
    args: argparse.Namespace,
    asked: FactDict,
    changes: "Callable[[], list[ChangeFacts]]" = list,
    **extra_facts: object,
) -> None:
    """Print the report, and write or draw what was asked for; *extra_facts* are the verb's own.

    *changes* are predictions with one choice changed.
    """
    from stepcast.views.step import step_view

    found = {**asked, "command": args.command, "version": __version__, **prediction.report.facts()}
    found |= {name: value for name, value in extra_facts.items() if value is not None}
    if args.jitter is not None:
        found["jitter"] = _jitter(prediction, args)
    if args.critical_path:
        found["critical_path"] = [
            {"name": name, "count": count, "seconds": seconds} for name, count, seconds in _path_rows(prediction)
        ]
    if args.trace:
        found["trace"] = args.trace
        write_trace(prediction.timeline, args.trace)
    explained, drawn = getattr(args, "explain_memory", False), []
    if args.html:  # its page also has the timeline, the roofline and the changes to try
        from stepcast.forecast.prediction import roofline

        view = step_view(found, prediction.drawn, roofline(prediction), changes(), explained)
    else:
        view = step_view(found, explain_memory=explained)
    if args.gantt and not args.json:
        from stepcast.views.gantt import gantt

        drawn.append(gantt(prediction.timeline, terminal_width()))
    if args.trace:
        drawn.append(f"wrote {visible(args.trace)}: open it at ui.perfetto.dev")
    show_view(args, view, below=drawn)


def _path_rows(prediction: "Prediction") -> list[tuple[str, int, float]]:
    """Return the critical path summed by name, longest first."""
    path, program = prediction.critical_path, prediction.step.program.written_out
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for call, op, seconds in zip(path.call.tolist(), path.op.tolist(), path.duration_s.tolist(), strict=True):
        entry = totals[program.segments[program.segment[call]].names[op]]
        entry[0] += 1
        entry[1] += seconds
    rows = [(name, int(count), seconds) for name, (count, seconds) in totals.items() if seconds > 0]
    return sorted(rows, key=lambda row: -row[2])[:20]


def _jitter(prediction: "Prediction", args: argparse.Namespace) -> FactDict:
    from stepcast.simulation.unfolded import simulate_jitter

    spread = simulate_jitter(prediction.step, args.jitter, args.runs, args.seed)
    return {
        "deviation": args.jitter,
        "runs": spread.runs,
        "seed": args.seed,
        "mean_s": spread.mean_s,
        "deviation_s": spread.deviation_s,
        "percentiles_s": {f"p{rank}": seconds for rank, seconds in spread.percentiles_s.items()},
    }
