"""The view of a comparison: two accounts of a step, predicted or measured."""

from collections.abc import Callable, Sequence

from stepcast.ir.facts import FactDict
from stepcast.ir.timeline import Timeline
from stepcast.units import format_bytes, format_change, format_percent, format_seconds
from stepcast.views import view as ui
from stepcast.views.measured import PART_NAMES

SMALLEST_SHARE = 5e-4
MOST_BARS = 40
GOOD_ERROR = 0.1


def compare_view(facts: FactDict, accounts: tuple[str, str] | None = None, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a comparison; *accounts* name its two sides, such as by their files."""
    sides = side_names(facts)
    names = accounts or sides
    stages: list[FactDict] = [
        {**row, "name": f"stage {stage['stage']}: {row['name']}"} for stage in facts["stages"] for row in stage["parts"]
    ]
    differing = [(row["name"].replace("_", " "), row["predicted"], row["measured"]) for row in facts["differences"]]
    parts: list[FactDict] = [{**row, "name": PART_NAMES.get(row["name"], row["name"])} for row in facts["parts"]]
    return ui.View(
        f"{format_seconds(facts['step_s'])} vs {format_seconds(facts['measured_step_s'])}",
        _headline(facts, names),
        _figures(facts, names),
        [
            _key_figures(facts),
            _pairs("Parts of the step", "part of the step", parts, facts, names),
            _pairs("Stages", "stage", stages, facts, names),
            _pairs("Operations", "operation", facts["operations"], facts, names),
            _kernels("Kernels that differ", "gpu", facts),
            _kernels("Operators of the host that differ", "host", facts),
            ui.plain_table(
                "Settings that differ",
                ("Setting", *sides),
                differing,
                caption="Settings that both accounts state",
                lead="The two are different runs, so the difference between them is no error of either.",
                shown=ui.Shown.PAGE,
            ),
            ui.timeline_chart(timeline, "both runs, aligned at their start"),
        ],
        facts,
    )


def _kernels(title: str, on: str, facts: FactDict) -> ui.Table | None:
    """Return the kernels of two traces that were added, removed, or changed their time."""
    rows = [row for row in facts["kernels"] if row["on"] == on and row["change"] != "same"][:200]
    if not rows:
        return None
    columns: dict[str, ui.Source] = {
        "name": ("name", lambda row: row["name"].replace("void at::native::", "")[:48]),
        "change": "change",
        "runs": ("second_runs", lambda row: f"{row['first_runs']:.4g} -> {row['second_runs']:.4g}"),
        "first": "first_s",
        "second": "second_s",
        "second - first": "difference_s:+s",
    }
    shown = ui.Shown.ALWAYS if on == "gpu" else ui.Shown.PAGE
    return ui.table_of(title, rows, columns, most_lines=12, sortable=True, wide=True, shown=shown)


def side_names(facts: FactDict) -> tuple[str, str]:
    """Return what to call the sides: predicted and measured, or first and second where both are one kind."""
    first, second = facts["kinds"]
    return (first, second) if first != second else ("first", "second")


def _is_one_kind(facts: FactDict) -> bool:
    return len(set(facts["kinds"])) == 1


def _headline(facts: FactDict, names: tuple[str, str]) -> ui.Headline:
    first_s, second_s = facts["step_s"], facts["measured_step_s"]
    about = (names[0], "vs", names[1])
    difference = ui.signed_seconds(first_s - second_s)
    if not _is_one_kind(facts) and facts["error"] is not None:
        number, unit = format_change(facts["error"]).split(" ")
        return ui.Headline(number, f"{unit} off: {difference}", about)
    number, _, unit = difference.partition(" ")
    if not _is_one_kind(facts):
        return ui.Headline(number, f"{unit} between two different runs", about)
    share = f" ({format_change(first_s / second_s - 1)})" if second_s else ""
    return ui.Headline(number, f"{unit}{share}: first minus second", about)


def _figures(facts: FactDict, names: tuple[str, str]) -> list[ui.Figure]:
    sides, one_kind = side_names(facts), _is_one_kind(facts)
    first_s, second_s = facts["step_s"], facts["measured_step_s"]
    figures = [
        ui.text_line(name, f"{side['file']} ({side['what']})")
        for name, side in zip(sides, facts.get("sides", ()), strict=False)
    ]
    figures += [
        ui.Figure(f"{name} step", format_seconds(seconds), account, line=format_seconds(seconds))
        for name, seconds, account in zip(sides, (first_s, second_s), names, strict=True)
    ]
    if one_kind:
        share = f" ({format_change(first_s / second_s - 1)})" if second_s else ""
        figures.append(ui.text_line("first - second", ui.signed_seconds(first_s - second_s) + share))
    elif facts["error"] is not None:
        mood = ui.Mood.GOOD if abs(facts["error"]) <= GOOD_ERROR else ui.Mood.BAD
        error = format_change(facts["error"])
        figures.append(ui.Figure("error", error, "of the measured step", line=error, mood=mood))
    elif facts["same_run"]:
        figures.append(ui.text_line("error", "-"))
    if facts["differences"]:
        listed = [f"{row['name']} {row['predicted']} vs {row['measured']}" for row in facts["differences"]]
        figures.append(ui.text_line("settings that differ" if one_kind else "not the same run", "; ".join(listed)))
    if changed := [row for row in facts["parts"] if row["difference_s"]]:
        largest = max(changed, key=lambda row: abs(row["difference_s"]))
        part = PART_NAMES.get(largest["name"], largest["name"])
        difference = ui.signed_seconds(largest["difference_s"])
        figures.append(ui.Figure("largest difference", part, difference, shown=ui.Shown.PAGE))
    return figures


FIGURE_NAMES: dict[str, tuple[str, Callable[[float], str]]] = {
    "mfu": ("MFU", format_percent),
    "tokens_per_s": ("tokens/s", lambda value: f"{value:,.0f}"),
    "memory_bytes": ("memory", format_bytes),
    "days": ("days", lambda value: f"{value:,.1f}"),
    "gpu_hours": ("GPU-hours", lambda value: f"{value:,.0f}"),
    "cost": ("cost", lambda value: f"{value:,.0f}"),
    "energy_mwh": ("energy (MWh)", lambda value: f"{value:,.1f}"),
    "goodput": ("goodput", format_percent),
}


def _key_figures(facts: FactDict) -> ui.Table | None:
    """Return the figures of both sides beyond the step."""
    if not facts["figures"]:
        return None
    rows = []
    for figure in facts["figures"]:
        name, show = FIGURE_NAMES[figure["name"]]
        ratio = "-" if figure["ratio"] is None else format_change(figure["ratio"] - 1)
        rows.append((name, show(figure["predicted"]), show(figure["measured"]), ratio))
    return ui.plain_table("Figures", ("figure", *side_names(facts), "first vs second"), rows)


def _pairs(title: str, head: str, rows: Sequence[FactDict], facts: FactDict, names: tuple[str, str]) -> ui.PairTable:
    """Return the rows that matter to the step; all of them are in the JSON."""
    least_s = SMALLEST_SHARE * max(facts["step_s"], facts["measured_step_s"])
    pairs = [
        ui.ValuePair(
            row["name"],
            row["predicted_s"],
            row["measured_s"],
            ui.signed_seconds(row["difference_s"]),
            "-" if row["error"] is None else format_change(row["error"]),
        )
        for row in rows
        if max(row["predicted_s"], row["measured_s"]) >= least_s
    ]
    # An error only where one can be stated.
    differences = ("first - second", "of the second") if _is_one_kind(facts) else ("difference", "error")
    heads = (head, *side_names(facts), *differences[: 2 if facts["same_run"] else 1])
    return ui.PairTable(title, pairs, names, heads, most_bars=MOST_BARS)
