"""Views of single costs and of measurements of them: operators, collectives, fitted constants, executed workloads."""

import math
from collections.abc import Container, Mapping, Sequence

from stepcast.ir.types import Fact, Facts
from stepcast.units import TFLOPS, format_percent, format_rate, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_view


def _rate(row: Facts) -> str:
    """Return FLOP/s where computation limits an operator, else bytes per second."""
    if row["bound"] == "compute" and row["flops"]:
        return f"{row['flops_per_s'] / TFLOPS:.1f} TFLOP/s"
    return format_rate(row["bytes_per_s"])


OPERATOR_COLUMNS: Mapping[str, ui.Source] = {
    **ui.columns("time=time_s bound efficiency=efficiency:% rate", rate=_rate),
    "90 % interval": lambda row: " to ".join(format_seconds(row["uncertainty"][end]) for end in ("low_s", "high_s")),
    "source": "source",
}


def operator_view(facts: Facts) -> ui.View:
    """Return the view of the estimated time of an operator, or of a sweep over its first size."""
    operator = facts["operator"] + (" backward" if facts["backward"] else "")
    about = {"operator": operator, "gpu": facts["gpu"], "dtype": facts["dtype"]}
    if "rows" in facts:
        first = next(iter(facts["rows"][0]["size"]))
        columns: dict[str, ui.Source] = {first: lambda row: f"{next(iter(row['size'].values())):,}"}
        return _sweep_view(facts, about, {**columns, **OPERATOR_COLUMNS})
    sizes = ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in facts["size"].items())
    return _single_view(facts, about, {"size": sizes, **_texts(facts, OPERATOR_COLUMNS)})


def _texts(facts: Facts, columns: Mapping[str, ui.Source]) -> dict[str, str]:
    return {head: ui.cell_of(facts, source).text for head, source in columns.items()}


def _figures(values: Mapping[str, object], in_text: Container[str]) -> list[ui.Figure]:
    """Return a figure for each value; those *in_text* are no cards of a page."""
    shown = {name: ui.Shown.TEXT if name in in_text else ui.Shown.ALWAYS for name in values}
    return [ui.Figure(name, str(value), shown=shown[name]) for name, value in values.items()]


def _words(about: Mapping[str, object]) -> list[str]:
    """Return what was asked, numbers with their names: ``all-reduce``, ``16 ranks``."""
    return [f"{value} {name}" if isinstance(value, int) else str(value) for name, value in about.items()]


def _single_view(
    facts: Facts, about: Mapping[str, object], values: Mapping[str, str], parts: Sequence[ui.Part] = ()
) -> ui.View:
    """Return the view of one cost: every value is a figure; a page has the question and the time as its headline."""
    figures, words = _figures({**about, **values}, {*about, "time"}), _words(about)
    headline = ui.Headline.of_seconds(facts["time_s"], "", words)
    return ui.View(f"{format_seconds(facts['time_s'])}: {', '.join(words)}", headline, figures, parts, facts)


def _sweep_view(facts: Facts, about: Mapping[str, object], columns: Mapping[str, ui.Source]) -> ui.View:
    """Return the view of costs over sizes: a row for each size, and on the page a curve."""
    rows, words = facts["rows"], _words(about)
    sizes = [float(row.get("size_bytes") or next(iter(row["size"].values()))) for row in rows]
    times = [row["time_s"] for row in rows]
    points = list(zip(sizes, times, strict=True))
    x = ui.Axis(min(sizes) / 1.5, max(sizes) * 1.5, lambda size: f"{size:g}", next(iter(columns)))
    y = ui.Axis(min(times) / 2, max(times) * 2, format_seconds, "time")
    dots = [ui.Dot(size, time, "first", format_seconds(time)) for size, time in points]
    line = ui.Line(points, "first")
    curve = ui.Scatter("Time by size", x, y, [line, *dots], "Time by size", log=True, shown=ui.Shown.PAGE)
    table = ui.table_of("Sizes", rows, columns, sortable=True, wide=True)
    headline = ui.Headline(f"{len(rows)}", "sizes", words)
    title = f"{len(rows)} sizes: {', '.join(words)}"
    return ui.View(title, headline, _figures(about, about), [table, curve], facts)


COLLECTIVE_COLUMNS = ui.columns(
    "size=size_bytes time=time_s algorithm_bandwidth=algbw_bytes_per_s bus_bandwidth=busbw_bytes_per_s "
    "algorithm protocol"
)


def collective_view(facts: Facts) -> ui.View:
    """Return the view of the estimated time of a collective: one size, a sweep, or flows on shared links."""
    about = {name: facts[name] for name in ("collective", "cluster", "ranks", "nodes", "engine") if name in facts}
    if "rows" in facts:
        return _sweep_view(facts, about, COLLECTIVE_COLUMNS)
    values = _texts(facts, COLLECTIVE_COLUMNS)
    if "alone_s" not in facts:
        return _single_view(facts, about, values)
    alone = f"{format_seconds(facts['alone_s'])}, so {facts['slowdown']:.2f} times as long"
    values = {"time": values["time"], "alone": alone, **{name: values[name] for name in ("bus bandwidth", "algorithm")}}
    if facts["rates_within"]:
        values["rates"] = f"within {format_percent(facts['rates_within'])}: too many flows to follow every change"
    links = [(link["link"], f"busy {format_percent(link['busy'], 0)} of the time") for link in facts["links"]]
    return _single_view(facts, about, values, [ui.FactList("Busiest links", links)])


def _fit_view(section: str, facts: Facts, **more: Fact) -> ui.View:
    """Return the view of a fit; what it assumes is among its figures."""
    place = facts.get("cluster") or facts["gpu"]
    return ui.replace(build_view(section, facts, place=place, **more), assumptions=())


def calibration_view(facts: Facts) -> ui.View:
    """Return the view of constants fitted to measured operators or Megatron runs."""
    columns = ui.columns(
        "class=name points error_before=before:% after=after:% left_out=left_out:% factor slope least",
        factor=lambda row: f"{row['factor']:.3f}" if row["used"] else "not used",
        slope=lambda row: "-" if "slope" in row["unidentified"] else f"{row['slope']:+.3f}",
        least=lambda row: "-" if "least_s" in row["unidentified"] else format_seconds(row["least_s"]),
    )
    classes = [] if facts.get("constants") else [{"name": name, **row} for name, row in facts["classes"].items()]
    return _fit_view(
        "calibration",
        facts,
        assumed=[ui.text_line("assumed", text) for text in facts.get("assumptions", ())],
        fitted=list((facts.get("constants") or {}).values()),
        by_class=ui.table_of("Classes", classes, columns),
    )


def collective_calibration_view(facts: Facts) -> ui.View:
    """Return the view of constants fitted to sweeps of collectives."""
    rows = []
    for key, row in facts["constants"].items():
        error = row["standard_error"]
        spread = format_seconds(error) if row["text"].endswith(" us") else f"{error:.2g}"
        rows.append((key, row["text"], spread, row["means"]))
    heads = ("constant", "value", "standard error", "what it is")
    return _fit_view("collective calibration", facts, fitted=ui.plain_table("Constants", heads, rows, uncut=(0,)))


def optimus_calibration_view(facts: Facts) -> ui.View:
    """Return the view of the constants of OptimusPrime, how well they are known, and the runs they were fitted to."""
    rows = []
    for name, value in facts["constants"].items():
        spread = facts["spread"].get(name)
        shown = format_seconds(value) if name.endswith("_s") else f"{value:.3f}"
        known = "read off the timed forward" if spread is None else f"within a factor of {math.exp(spread):.2f}"
        rows.append((facts["titles"][name], shown, known))
    words = str(ui.say("mean absolute error of the fit {mean_abs_error} over {#runs} runs", facts))
    constants = ui.plain_table("Constants", ("constant", "value", "known"), rows)
    return _fit_view("optimus calibration", facts, fitted=constants, fit=ui.Remarks("Fit", [ui.Remark(words, "")]))


def fit_view(facts: Facts) -> ui.View:
    """Return the view of fitted constants, by the source of the runs they were fitted to."""
    views = {"nccl-tests": collective_calibration_view, "optimus": optimus_calibration_view}
    return views.get(facts.get("source", ""), calibration_view)(facts)


def run_view(facts: Facts) -> ui.View:
    """Return the view of a workload that was executed: its measured and its predicted step."""
    ranks = facts["ranks"]
    ran = f"{len(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]} alone" if ranks else "none"
    return build_view("run", facts, ran=ran, estimated_s=facts["priced_collectives_s"] or None)
