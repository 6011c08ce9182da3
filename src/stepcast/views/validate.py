"""The view of the scoreboard: predictions against measurements, set by set."""

from collections.abc import Mapping, Sequence

from stepcast.ir.facts import Facts, PointFacts
from stepcast.units import format_bytes, format_change, format_count, format_percent, format_seconds
from stepcast.views import view as ui

MOST_DOTS = 1200
MOST_REASONS = 10
NEAR = 0.1
SUMMARY_COLUMNS = ui.columns(
    "rows=rows, mean=mean_abs_error median=median_abs_error p90=p90_abs_error worst=worst_abs_error "
    "signed=mean_error:+% weighted=time_weighted_error:%"
)
IN_INTERVAL = "in interval"


def validate_view(
    facts: Facts, points: Mapping[str, Sequence[PointFacts]], units: Mapping[str, str], absent: Sequence[str] = ()
) -> ui.View:
    """Return the view of the facts of each set.

    *points* are its rows, or as many as can be distinguished; *absent* are lines about sets that are not at hand.
    """
    sets = facts["sets"]
    compared = {name: board for name, board in sets.items() if board["rows"]}
    rows = sum(board["rows"] for board in compared.values())
    figures = [
        ui.Figure(
            name,
            format_percent(board["mean_abs_error"]),
            f"mean of {board['rows']:,}; median {format_percent(board['median_abs_error'])}",
            shown=ui.Shown.PAGE,
        )
        for name, board in compared.items()
    ]
    about = ("Errors of predictions", "mean absolute error, as a share of the measured value")
    headline = ui.Headline(f"{rows:,}", f"measurements in {len(compared)} sets", about)
    if len(compared) == 1:
        (board,) = compared.values()
        number, unit = format_percent(board["mean_abs_error"]).split(" ")
        headline = ui.Headline(number, f"{unit} mean error over {rows:,} rows", about)
    parts: list[ui.Part | None] = [
        _set(name, board, points.get(name, ()), units.get(name, "s")) for name, board in sets.items()
    ]
    parts.append(ui.Remarks("Not at hand", [ui.Remark(line, "") for line in absent], shown=ui.Shown.TEXT))
    return ui.View(f"{rows:,} measurements against their predictions", headline, figures, parts, facts)


def _set(name: str, board: Facts, points: Sequence[PointFacts], unit: str) -> ui.Columns:
    figures = [(key.replace("_", " "), format_percent(value)) for key, value in board["figures"].items()]
    return ui.Columns(
        name,
        [_summaries(board), ui.FactList("Figures", figures) if figures else None, _skipped(board)],
        [_chart(points, board, unit) if points else None, _worst(board["worst"], unit)],
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
        columns[IN_INTERVAL] = (
            "coverage",
            lambda row: "" if row["coverage"] is None else format_percent(row["coverage"]),
        )
    labelled: list[tuple[str, Facts | None]] = [("all", board), *board["selections"].items()]
    for tag, group in board["groups"].items():
        labelled += [(f"by {tag}", None), *((f"  {label}", summary) for label, summary in group.items())]
    blanks = [ui.Cell("")] * len(columns)
    cells = [
        [ui.Cell(label), *([ui.cell_of(row, source) for source in columns.values()] if row else blanks)]
        for label, row in labelled
    ]
    caption = "Absolute errors; signed is above zero where predictions are too slow"
    return ui.Table("Errors", ("errors", *columns), cells, caption=caption)


def _skipped(board: Facts) -> ui.Remarks:
    reasons = [f"{format_count(count)}: {reason}" for reason, count in board["skip_reasons"].items()]
    shown = reasons[:MOST_REASONS]
    if len(reasons) > MOST_REASONS:
        shown.append(f"and {len(reasons) - MOST_REASONS} more reasons; --json has them all")
    return ui.Remarks("Skipped", [ui.Remark(f"skipped {format_count(board['skipped'])}", "", shown)])


def _worst(rows: Sequence[Facts], unit: str) -> ui.Table | None:
    columns = ui.columns(f"worst_{len(rows)}=name measured=measured_{unit} predicted=predicted_{unit} error=error:+%")
    return ui.table_of("Worst rows", rows, columns, caption="Largest errors")


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
    left_out = board["rows"] - len(points)
    return ui.Scatter(
        "Predicted against measured",
        ui.Axis(low, high, show, "measured"),
        ui.Axis(low, high, show, "predicted"),
        [ui.Line(corners, "near", area=True), ui.Line(((low, low), (high, high)), "same"), *dots],
        f"Predicted against measured, {len(points):,} rows",
        legend=(("compute", "within 10 %"), ("tp", "more than 10 % off")),
        log=True,
        square=True,
        note=f"{left_out:,} evenly picked rows are not shown; the worst are." if left_out > 0 else "",
        shown=ui.Shown.PAGE,
    )
