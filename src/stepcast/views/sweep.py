"""The view of a sweep: its progress, how models scale, which settings are fast, and its rows."""

from collections.abc import Sequence
from itertools import groupby

from stepcast.ir.types import Fact, Facts
from stepcast.units import GIB, format_bytes, format_count, format_money, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_view

Rows = Sequence[Facts]
# Colours that differ enough; more lines than these hide each other.
KINDS = ("compute", "tp", "dp", "ep", "pp", "optimizer", "cp", "host")
MOST_MAPS = 6


# Columns of results; all other columns are words of the point, shown as they are.
RESULTS = ui.columns_by_key(
    "step=step_s tokens/s/GPU=tokens_per_s_per_gpu, MFU=mfu bubble=bubble:% exposed=exposed:% memory=memory_bytes "
    "fits=fits:yes days=days:,.1f GPU-hours=gpu_hours, cost=cost:money goodput state error"
)
HIDDEN_IN_TEXT = ("position", "low_s", "high_s", "gpu_hours", "found", "currency")
# What a narrow terminal leaves out first: it follows from the rest, or matters less.
LEFT_OUT_FIRST = ("tokens_per_s_per_gpu", "price", "mfu", "days", "memory_bytes")
HIDDEN_ON_PAGE = ("bubble", "exposed", "fits", "error")


def counts_view(facts: Facts) -> ui.View:
    """Return the view of the counts and rates of a sweep: a figure each."""
    errors = [ui.text_line(f"error of {row['points']:,}", row["error"]) for row in facts.get("common_errors", ())]
    return build_view("sweep counts", facts, count=facts.get("points", facts.get("rows", 0)), common=errors)


def rows_view(facts: Facts) -> ui.View:
    """Return the view of rows that were asked for; values that all of them share come first, once."""
    rows = facts["rows"]
    counted = f"{len(rows):,} of {facts['answered']:,} answered points"
    headline = ui.Headline(format_count(len(rows)), "rows", (str(facts["folder"]),))
    if not rows:
        return ui.View(counted, headline, [ui.Figure("rows", f"{counted}: no row meets the condition")], (), facts)
    names = [name for name in rows[0] if name not in HIDDEN_IN_TEXT and any(row[name] is not None for row in rows)]
    same = [name for name in names if len({row[name] for row in rows}) == 1]
    shared = [ui.Figure(head, ui.cell_of(rows[0], source).text) for head, source in map(_column, same)]
    other = [name for name in names if name not in same]
    figures = [ui.Figure("rows", counted), *shared]
    return ui.View(counted, headline, figures, [_shown_rows(rows, other) if other else None], facts)


def _shown_rows(rows: Rows, names: Sequence[str], left_out: tuple[str, ...] = ()) -> ui.Table:
    """Return the rows with these columns, and without some of them for terminals that all of them are too wide for."""
    first = next((name for name in LEFT_OUT_FIRST if name in names), None)
    narrow = first and _shown_rows(rows, [name for name in names if name != first], (*left_out, _column(first)[0]))
    note = f"left out for width: {', '.join(left_out)} (--json)" if left_out else ""
    uncut = [index for index, name in enumerate(names) if name not in RESULTS]
    return _table("Rows", rows, names, uncut=uncut, note=note, narrow=narrow or None)


def _table(title: str, rows: Rows, names: Sequence[str], **options: Fact) -> ui.Table:
    return ui.table_of(title, rows, dict(map(_column, names)), sortable=True, wide=True, **options)


def _column(name: str) -> tuple[str, ui.Source]:
    """Return the head and the source of a column."""
    if name in RESULTS:
        return RESULTS[name]
    return _words([name]), (name, lambda row: "-" if row.get(name) is None else str(row[name]))


def _words(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in names) or "nothing"


def sweep_view(facts: Facts) -> ui.View:
    """Return the view of all answers of a sweep, for its page."""
    rows, kinds, cost = facts["rows"], facts["kinds"], facts["least_cost"]
    errors = [(f"{row['points']:,} points", row["error"]) for row in facts["common_errors"]]
    view = build_view(
        "sweep",
        facts,
        best=_best(facts),
        varied=_words(facts["words"]),
        left=facts["left"] or None,
        fit="not checked" if facts["fit"] is None and rows else f"{facts['fit'] or 0:,}",
        mood=ui.Mood.BAD if facts["errors"] else ui.Mood.NEUTRAL,
        cost=None if cost is None else format_money(cost, facts["currency"], short=True),
        maps=_maps(facts["heat"], kinds) if facts["heat"] else None,
        trade_off=_trade_off(rows, facts["words"], kinds),
        ranked=_ranked(rows, facts["words"]) if rows else None,
        failed=ui.FactList("Errors", errors, wide=True) if errors else None,
    )
    return ui.replace(view, parts=[*_scaling(facts["scaling"], kinds), *view.parts])


def _best(facts: Facts) -> str:
    """Return the best result, or why there is none."""
    if best := facts["best_tokens_per_s_per_gpu"]:
        return f"{best:,.0f} tokens per second and GPU at best"
    if facts["least_days"] is not None:
        return f"{ui.FORMS['days'](facts['least_days'])} at best"
    if facts["rows"]:
        return f"{format_seconds(facts['least_step_s'])} per step at best"
    if facts["out_of_time"]:
        return "Nothing found before the time was over"
    return "Nothing fits" if facts["fit"] is not None else "Nothing could be answered"


def _kind(row: Facts, kinds: Sequence[str]) -> str:
    return " on ".join(str(row[name]) for name in kinds) or "all points"


def _scaling(rows: Rows, kinds: Sequence[str]) -> list[ui.Scatter]:
    """Return tokens per second and GPU against GPUs: flat is ideal."""
    lines = [(name, list(group)) for name, group in groupby(rows, key=lambda row: _kind(row, kinds))]
    lines = sorted(lines, key=lambda line: -max(row["tokens_per_s_per_gpu"] for row in line[1]))
    charts, label = [], "Tokens per second and GPU against GPUs"
    lead = "The best that fits at each number of GPUs; flat would be ideal. Both axes are logarithmic."
    for first in range(0, len(lines), len(KINDS)):
        shown = lines[first : first + len(KINDS)]
        places = [[(row["gpus"], row["tokens_per_s_per_gpu"]) for row in group] for _, group in shown]
        counts, speeds = zip(*(place for line in places for place in line), strict=True)
        marks: list[ui.Dot | ui.Line] = []
        for kind, (name, _), line in zip(KINDS, shown, places, strict=False):
            marks.append(ui.Line(line, "ideal"))
            marks += [ui.Dot(x, y, kind, f"{name}, {x:,} GPUs: {y:,.0f} tokens/s/GPU", 5) for x, y in line]
        title = "Scaling" if not first else f"Scaling, {first // len(KINDS) + 1}"
        x = ui.Axis(min(counts) * 0.9, max(counts) * 1.1, format_count, "GPUs")
        y = ui.Axis(min(speeds) * 0.8, max(speeds) * 1.25, format_count, "tokens/s/GPU")
        legend = list(zip(KINDS, (name for name, _ in shown), strict=False))
        charts.append(ui.Scatter(title, x, y, marks, label, legend=legend, log=True, lead=lead, wide=True))
    return charts


def _maps(heat: Facts, kinds: Sequence[str]) -> ui.GridCharts:
    """Return two settings against each other, for each model and cluster."""
    across, down = heat["across"], heat["down"]
    speeds: dict[str, dict[tuple[object, object], float]] = {}
    for cell in heat["cells"]:
        speeds.setdefault(_kind(cell, kinds), {})[cell[across], cell[down]] = cell["tokens_per_s_per_gpu"]
    heads = ["-" if x is None else str(x) for x in heat["x"]]
    corner, grids = f"{_words([down])} \\ {_words([across])}", []
    for name, values in list(speeds.items())[:MOST_MAPS]:
        rows = [("-" if y is None else str(y), [values.get((x, y)) for x in heat["x"]]) for y in heat["y"]]
        grids.append(ui.ShadedGrid(name, corner, heads, rows))
    lead = f"The most tokens/s/GPU of what fits, {_words([across])} across and {_words([down])} down; "
    lead += "empty: nothing fits."
    if len(speeds) > MOST_MAPS:
        lead += f" The first {MOST_MAPS} of {len(speeds)}."
    return ui.GridCharts("Fast settings", grids, format_count, lead=lead, wide=True)


def _trade_off(rows: Rows, words: Sequence[str], kinds: Sequence[str]) -> ui.Scatter | None:
    """Return the speed of the fastest rows against their memory."""
    rows = [row for row in rows if row["memory_bytes"] and row["tokens_per_s_per_gpu"]]
    if len(rows) < 2:
        return None
    points = [(row["memory_bytes"] / GIB, row["tokens_per_s_per_gpu"]) for row in rows]
    names = list(dict.fromkeys(_kind(row, kinds) for row in rows))[: len(KINDS)]
    colours = dict(zip(names, KINDS, strict=False))
    dots = []
    for row, (size, speed) in zip(rows, points, strict=True):
        settings = ", ".join(f"{_words([name])} {row[name]}" for name in words if row.get(name) is not None)
        tip = f"{speed:,.0f} tokens/s/GPU, {format_bytes(row['memory_bytes'])}: {settings}"
        dots.append(ui.Dot(size, speed, colours.get(_kind(row, kinds), "hidden"), tip, 4, row["position"]))
    frontier: list[tuple[float, float]] = []
    for size, speed in sorted(points):
        if not frontier or speed > frontier[-1][1]:
            frontier.append((size, speed))
    title, label = "Pareto frontier: speed vs memory", "Tokens per second and GPU against memory"
    x = ui.Axis(0.0, max(size for size, _ in points) * 1.05, "{:g}".format, "GiB per GPU")
    y = ui.Axis(0.0, max(speed for _, speed in points) * 1.08, format_count, "tokens/s/GPU")
    legend = [(kind, name) for name, kind in colours.items()]
    lead = f"The {len(rows):,} fastest that fit. Upper left is better; the line is the Pareto frontier."
    line = ui.Line(frontier, "front")
    return ui.Scatter(title, x, y, [line, *dots], label, legend=legend, key="pareto", lead=lead, wide=True)


def _ranked(rows: Rows, words: Sequence[str]) -> ui.Table:
    known = [name for name in RESULTS if name not in HIDDEN_ON_PAGE and any(row.get(name) is not None for row in rows)]
    fit = "that fit" if any(row["fits"] for row in rows) else "rows"
    caption = "Fastest first; click a column header to sort"
    return _table(f"The fastest {fit}", rows, [*words, *known], caption=caption, ids=[row["position"] for row in rows])
