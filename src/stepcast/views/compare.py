"""Views that compare: two accounts of a step, a run with its baseline, predictions with measurements."""

from collections.abc import Mapping, Sequence

from stepcast.ir.timeline import Timeline
from stepcast.ir.types import FactDict, Facts, PointFacts, group_by_key
from stepcast.units import format_bytes, format_change, format_count, format_percent, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_figures, build_view
from stepcast.views.measured import OPTIMUS_PARTS, PART_NAMES
from stepcast.views.view import NAMES

MOST_PAIRS = 40
GOOD_ERROR = 0.1
FIGURES = ui.columns_by_key(
    "MFU=mfu tokens/s=tokens_per_s, memory=memory_bytes days=days:,.1f GPU-hours=gpu_hours, cost=cost, "
    "energy_(MWh)=energy_mwh:,.1f goodput"
)
MOODS = {"regression": ui.Mood.BAD, "suspected": ui.Mood.NEUTRAL, "accepted": ui.Mood.NEUTRAL}
KINDS = {"regression": "tp", "suspected": "optimizer", "improved": "dp"}
MOST_DOTS = 1200
MOST_REASONS = 10
NEAR = 0.1
SUMMARY_COLUMNS = ui.columns(
    "rows=rows, mean=mean_abs_error median=median_abs_error p90=p90_abs_error worst=worst_abs_error "
    "signed=mean_error:+% weighted=time_weighted_error:%"
)


def compare_view(facts: FactDict, accounts: tuple[str, str] | None = None, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a comparison; *accounts* name its two sides, such as by their files."""
    sides = side_names(facts)
    names = accounts or sides
    part_names = {**OPTIMUS_PARTS, **PART_NAMES}
    if set(facts["kinds"]) == {"predicted"}:
        part_names |= NAMES["parts"]
    stages: list[FactDict] = [
        {**row, "name": f"stage {stage['stage']}: {part_names.get(row['name'], row['name'])}"}
        for stage in facts["stages"]
        for row in stage["parts"]
    ]
    parts: list[FactDict] = [{**row, "name": part_names.get(row["name"], row["name"])} for row in facts["parts"]]
    first_s, second_s, error = facts["step_s"], facts["measured_step_s"], facts["error"]
    is_one_kind, differences = len(set(facts["kinds"])) == 1, facts["differences"]
    off = None if is_one_kind else error
    largest = max(parts, key=lambda row: abs(row["difference_s"]), default={"difference_s": 0.0})
    settings = ui.plain_table(
        "Settings that differ",
        ("Setting", *sides),
        [(row["name"].replace("_", " "), row["predicted"], row["measured"]) for row in differences],
        caption="Settings that both accounts state",
        lead="The two are different runs, so the difference between them is no error of either.",
        shown=ui.Shown.PAGE,
    )
    return build_view(
        "compare",
        facts,
        accounts=list(names),
        side=list(sides),
        files=[
            ui.text_line(name, f"{side['file']} ({side['what']})")
            for name, side in zip(sides, facts.get("sides", ()), strict=False)
        ],
        difference_s=first_s - second_s,
        off=off,
        good=off is not None and abs(off) <= GOOD_ERROR,
        unjudged=off is None and not is_one_kind,
        same=off is None and not is_one_kind and facts["same_run"],
        one_kind=is_one_kind,
        relative=f" ({format_change(first_s / second_s - 1)})" if second_s else "",
        name_of_differing="settings that differ" if is_one_kind else "not the same run",
        differing="; ".join(f"{row['name']} {row['predicted']} vs {row['measured']}" for row in differences),
        largest=largest if largest["difference_s"] else None,
        key_figures=_key_figures(facts),
        part_pairs=_pairs("Parts of the step", "part of the step", parts, facts, names),
        stage_pairs=_pairs("Stages", "stage", stages, facts, names),
        operation_pairs=_pairs("Operations", "operation", facts["operations"], facts, names),
        changed=group_by_key((row["on"], row) for row in facts["kernels"] if row["change"] != "same"),
        name=("name", lambda row: row["name"].replace("void at::native::", "")[:48]),
        runs=("second_runs", lambda row: f"{row['first_runs']:.4g} -> {row['second_runs']:.4g}"),
        settings=settings,
        timeline=ui.timeline_chart(timeline, "both runs, aligned at their start"),
    )


def side_names(facts: FactDict) -> tuple[str, str]:
    """Return what to call the sides: predicted and measured, or first and second where both are one kind."""
    first, second = facts["kinds"]
    return (first, second) if first != second else ("first", "second")


def _key_figures(facts: FactDict) -> ui.Table | None:
    """Return the figures of both sides beyond the step."""
    if not facts["figures"]:
        return None
    rows = []
    for figure in facts["figures"]:
        name, source = FIGURES[figure["name"]]
        first, second = (ui.cell_of({figure["name"]: figure[side]}, source).text for side in ("predicted", "measured"))
        ratio = "-" if figure["ratio"] is None else format_change(figure["ratio"] - 1)
        rows.append((name, first, second, ratio))
    return ui.plain_table("Figures", ("figure", *side_names(facts), "first vs second"), rows)


def _pairs(title: str, head: str, rows: Sequence[FactDict], facts: FactDict, names: tuple[str, str]) -> ui.Bars:
    """Return the rows that matter to the step; all of them are in the JSON."""
    least_s = ui.SMALLEST_SHARE * max(facts["step_s"], facts["measured_step_s"])
    pairs = []
    for row in rows:
        first_s, second_s = row["predicted_s"], row["measured_s"]
        if max(first_s, second_s) >= least_s:
            error = "-" if row["error"] is None else format_change(row["error"])
            pairs.append(ui.ValuePair(row["name"], first_s, second_s, ui.signed_seconds(row["difference_s"]), error))
    # An error only where one can be stated.
    differences = ("first - second", "of the second") if len(set(facts["kinds"])) == 1 else ("difference", "error")
    heads = (head, *side_names(facts), *differences[: 2 if facts["same_run"] else 1])
    return ui.bars_of_pairs(title, pairs, names, heads, MOST_PAIRS)


# ---- a gate: the measures against their baseline, and the trend of the step ---------------------------------


def gate_view(facts: Facts) -> ui.View:
    """Return the view of a verdict."""
    rows = sorted(facts["measures"], key=lambda row: -abs(row["value"] - row["baseline"]))
    return build_view(
        "gate",
        facts,
        mood=ui.Mood.BAD if facts["failed"] else MOODS.get(facts["status"], ui.Mood.GOOD),
        number=facts["run"],
        called=facts["label"] or facts["name"],
        ordered=sorted(rows, key=lambda row: row["name"] != "step"),
        run=("value", lambda row: _show(row, "value")),
        baseline=("baseline", lambda row: _show(row, "baseline")),
        chart=_trend(facts) if len(facts["trend"]) > 1 else None,
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
    dots = []
    for run in runs:
        label = f" ({run['label']})" if run["label"] else ""
        tip = f"run {run['run']}{label}: {format_seconds(run['step_s'])}, {run['status']}"
        dots.append(ui.Dot(run["run"], run["step_s"], KINDS.get(run["status"], "compute"), tip, 4.0))
    margin_s = 0.1 * (max(times_s) - min(times_s)) or 0.05 * times_s[0]
    x = ui.Axis(0.0, len(runs) + 1.0, "{:.0f}".format, "run")
    y = ui.Axis(min(times_s) - margin_s, max(times_s) + margin_s, format_seconds, "step")
    marks: list[ui.Dot | ui.Line] = [ui.Line(level, "same"), ui.Line(points, "near"), *dots]
    legend = (("compute", "passed"), ("optimizer", "suspected"), ("tp", "regression"), ("dp", "improved"))
    return ui.Scatter("Trend", x, y, marks, f"Step of {len(runs)} runs", legend=legend, shown=ui.Shown.PAGE)


# ---- the scoreboard: predictions against measurements, set by set -------------------------------------------


def validate_view(
    facts: Facts, points: Mapping[str, Sequence[PointFacts]], units: Mapping[str, str], absent: Sequence[str] = ()
) -> ui.View:
    """Return the view of the facts of each set.

    *points* are its rows, or as many as can be distinguished; *absent* are lines about sets that are not at hand.
    """
    sets = facts["sets"]
    compared = {name: board for name, board in sets.items() if board["rows"]}
    rows = sum(board["rows"] for board in compared.values())
    figures = [row for name, board in compared.items() for row in build_figures("errors of a set", board, set=name)]
    about = ("Errors of predictions", "mean absolute error, as a share of the measured value")
    headline = ui.Headline(f"{rows:,}", f"measurements in {len(compared)} sets", about)
    if len(compared) == 1:
        (board,) = compared.values()
        number, unit = format_percent(board["mean_abs_error"]).split(" ")
        headline = ui.Headline(number, f"{unit} mean error over {rows:,} rows", about)
    missing = ui.Remarks("Not at hand", [ui.Remark(line, "") for line in absent], shown=ui.Shown.TEXT)
    boards = (_set(name, board, points.get(name, ()), units.get(name, "s")) for name, board in sets.items())
    parts: list[ui.Part | None] = [*boards, missing]
    return ui.View(f"{rows:,} measurements against their predictions", headline, figures, parts, facts)


def _set(name: str, board: Facts, points: Sequence[PointFacts], unit: str) -> ui.Columns:
    figures = [(key.replace("_", " "), format_percent(value)) for key, value in board["figures"].items()]
    spec = f"worst_{len(board['worst'])}=name measured=measured_{unit} predicted=predicted_{unit} error=error:+%"
    worst = ui.table_of("Worst rows", board["worst"], ui.columns(spec), caption="Largest errors")
    reasons = [f"{format_count(count)}: {reason}" for reason, count in board["skip_reasons"].items()]
    if len(reasons) > MOST_REASONS:
        reasons[MOST_REASONS:] = [f"and {len(reasons) - MOST_REASONS} more reasons; --json has them all"]
    skipped = ui.Remarks("Skipped", [ui.Remark(f"skipped {format_count(board['skipped'])}", "", reasons)])
    return ui.Columns(
        name,
        [_summaries(board), ui.FactList("Figures", figures) if figures else None, skipped],
        [_chart(points, board, unit) if points else None, worst],
        headed=True,
        lead="; ".join(board["notes"]),
        wide=True,
    )


def _summaries(board: Facts) -> ui.Table | None:
    """Return the errors of all rows, of selections, and of each group."""
    if not board["rows"]:
        return None
    columns: dict[str, ui.Source] = dict(SUMMARY_COLUMNS)
    if board["coverage"] is not None:
        columns["in interval"] = "coverage:%?"
    labelled: list[tuple[str, Facts | None]] = [("all", board), *board["selections"].items()]
    for tag, group in board["groups"].items():
        labelled += [(f"by {tag}", None), *((f"  {label}", summary) for label, summary in group.items())]
    blanks = [ui.Cell("")] * len(columns)
    cells = []
    for label, row in labelled:
        cells.append([ui.Cell(label), *([ui.cell_of(row, source) for source in columns.values()] if row else blanks)])
    caption = "Absolute errors; signed is above zero where predictions are too slow"
    return ui.Table("Errors", ("errors", *columns), cells, caption=caption)


def _chart(points: Sequence[PointFacts], board: Facts, unit: str) -> ui.Scatter:
    show = format_bytes if unit == "bytes" else format_seconds
    values = [value for point in points for value in (point["measured"], point["predicted"]) if value > 0]
    low, high = min(values) / 1.3, max(values) * 1.3
    corners = ((low, low * (1 - NEAR)), (high, high * (1 - NEAR)), (high, high * (1 + NEAR)), (low, low * (1 + NEAR)))
    dots = []
    for point in points:
        measured, predicted = point["measured"], point["predicted"]
        if predicted > 0:
            error = predicted / measured - 1
            tip = f"{point['name']}: measured {show(measured)}, predicted {show(predicted)} ({format_change(error)})"
            dots.append(ui.Dot(measured, predicted, "compute" if abs(error) <= NEAR else "tp", tip, 3.5))
    left_out, title = board["rows"] - len(points), "Predicted against measured"
    x, y = ui.Axis(low, high, show, "measured"), ui.Axis(low, high, show, "predicted")
    lines = [ui.Line(corners, "near", area=True), ui.Line(((low, low), (high, high)), "same")]
    note = f"{left_out:,} evenly picked rows are not shown; the worst are." if left_out > 0 else ""
    legend = (("compute", "within 10 %"), ("tp", "more than 10 % off"))
    on_page: Facts = {"log": True, "square": True, "note": note, "shown": ui.Shown.PAGE}
    return ui.Scatter(title, x, y, [*lines, *dots], f"{title}, {len(points):,} rows", legend=legend, **on_page)
