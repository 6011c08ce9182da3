"""The view of a gate: the verdict, the measures against their baseline, and the trend of the step."""

from stepcast.ir.facts import Facts
from stepcast.units import format_bytes, format_change, format_seconds
from stepcast.views import view as ui

MOST_LINES = 12
MOODS = {"regression": ui.Mood.BAD, "suspected": ui.Mood.NEUTRAL}
KINDS = {"regression": "tp", "suspected": "bubble", "improved": "dp"}


def gate_view(facts: Facts) -> ui.View:
    """Return the view of a verdict."""
    step_s, forecast, count = facts["step_s"], facts["forecast"], facts["baseline_runs"]
    mood = ui.Mood.BAD if facts["failed"] else MOODS.get(facts["status"], ui.Mood.GOOD)
    figures = [
        ui.Figure("verdict", facts["status"], line=f"{facts['status']}: {facts['verdict']}", mood=mood),
        ui.Figure("run", str(facts["run"]), facts["label"] or facts["name"]),
        ui.Figure("baseline", f"{count} run{'s'[: count != 1]}", f"from run {facts['baseline_from']}"),
    ]
    if forecast:
        figures.append(
            ui.Figure("forecast", format_seconds(forecast["step_s"]), f"{format_change(forecast['error'])} error")
        )
    rows = sorted(facts["measures"], key=lambda row: -abs(row["value"] - row["baseline"]))
    rows.sort(key=lambda row: row["name"] != "step")
    columns = ui.columns(
        "measure=name run baseline change=change:+% noise=noise:% status",
        run=("value", lambda row: _show(row, "value")),
        baseline=("baseline", lambda row: _show(row, "baseline")),
    )
    return ui.View(
        f"{facts['status']}: {facts['name']}",
        ui.Headline.of_seconds(step_s, "per step, measured", (facts["name"], facts["verdict"])),
        figures,
        [
            ui.table_of("Measures", rows, columns, most_lines=MOST_LINES, sortable=True),
            _trend(facts) if len(facts["trend"]) > 1 else None,
        ],
        facts,
    )


def _show(row: Facts, key: str) -> str:
    return (format_bytes if row["name"] == "peak memory" else format_seconds)(row[key])


def _trend(facts: Facts) -> ui.Scatter:
    """Return the steps of all runs, those of a regression marked."""
    runs = facts["trend"]
    times_s = [run["step_s"] for run in runs]
    step = next(row for row in facts["measures"] if row["name"] == "step")
    points = tuple((float(run["run"]), run["step_s"]) for run in runs)
    level = ((1.0, step["baseline"]), (float(len(runs)), step["baseline"]))
    dots = [ui.Dot(run["run"], run["step_s"], KINDS.get(run["status"], "compute"), _tip(run), 4.0) for run in runs]
    margin_s = 0.1 * (max(times_s) - min(times_s)) or 0.05 * times_s[0]
    return ui.Scatter(
        "Trend",
        ui.Axis(0.0, len(runs) + 1.0, lambda number: f"{number:.0f}", "run"),
        ui.Axis(min(times_s) - margin_s, max(times_s) + margin_s, format_seconds, "step"),
        [ui.Line(level, "same"), ui.Line(points, "near"), *dots],
        f"Step of {len(runs)} runs",
        legend=(("compute", "passed"), ("bubble", "suspected"), ("tp", "regression"), ("dp", "improved")),
        shown=ui.Shown.PAGE,
    )


def _tip(run: Facts) -> str:
    label = f" ({run['label']})" if run["label"] else ""
    return f"run {run['run']}{label}: {format_seconds(run['step_s'])}, {run['status']}"
