"""Views of single costs and of measurements of them: operators, collectives, fitted constants, executed workloads."""

import math

from stepcast.ir.types import Fact, Facts
from stepcast.units import TFLOPS, format_percent, format_rate, format_seconds, format_short_count
from stepcast.views import view as ui
from stepcast.views.declared import build_view


def operator_view(facts: Facts) -> ui.View:
    """Return the view of the estimated time of an operator, or of a sweep over its first size."""
    operator = facts["operator"] + (" backward" if facts["backward"] else "")
    if "rows" not in facts:
        sizes = ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in facts["size"].items())
        return build_view("operator", facts, operator=operator, sizes=sizes, rate=_rate(facts))
    first = next(iter(facts["rows"][0]["size"]))
    columns: dict[str, ui.Source] = {first: lambda row: f"{next(iter(row['size'].values())):,}"}
    columns |= ui.columns(
        "time=time_s bound efficiency=efficiency:% rate 90_%_interval=~{uncertainty.low_s}_to_{uncertainty.high_s} "
        "source",
        rate=_rate,
    )
    table = ui.table_of("Sizes", facts["rows"], columns, sortable=True, wide=True)
    return build_view("operator sizes", facts, operator=operator, table=table, curve=_curve(facts, first))


def _rate(row: Facts) -> str:
    """Return FLOP/s where computation limits an operator, else bytes per second."""
    if row["bound"] == "compute" and row["flops"]:
        return f"{row['flops_per_s'] / TFLOPS:.1f} TFLOP/s"
    return format_rate(row["bytes_per_s"])


def _curve(facts: Facts, size: str) -> ui.Scatter:
    """Return the curve of time over *size*."""
    rows = facts["rows"]
    points = [(float(row.get("size_bytes") or next(iter(row["size"].values()))), row["time_s"]) for row in rows]
    sizes, times = zip(*points, strict=True)
    is_bytes = "size_bytes" in rows[0]
    show = (lambda size: f"{format_short_count(size).replace('B', 'G')}B") if is_bytes else format_short_count
    x = ui.Axis(min(sizes) / 1.5, max(sizes) * 1.5, show, size)
    y = ui.Axis(min(times) / 2, max(times) * 2, format_seconds, "time")
    dots = [ui.Dot(*point, "first", format_seconds(point[1])) for point in points]
    line = ui.Line(points, "first")
    return ui.Scatter("Time by size", x, y, [line, *dots], "Time by size", log=True, shown=ui.Shown.PAGE)


def collective_view(facts: Facts) -> ui.View:
    """Return the view of the estimated time of a collective: one size, a sweep, or flows on shared links."""
    if "rows" in facts:
        return build_view("collective sizes", facts, curve=_curve(facts, "size"))
    links = [(row["link"], f"busy {format_percent(row['busy'], 0)} of the time") for row in facts.get("links", ())]
    return build_view("collective", facts, is_alone="alone_s" not in facts, busiest=links)


def _fit_view(section: str, facts: Facts, **more: Fact) -> ui.View:
    """Return the view of a fit; what it assumes is among its figures."""
    view = build_view(section, facts, place=facts.get("cluster") or facts["gpu"], **more)
    return ui.replace(view, assumptions=())


def calibration_view(facts: Facts) -> ui.View:
    """Return the view of constants fitted to measured operators or Megatron runs."""
    return _fit_view(
        "calibration",
        facts,
        assumed=[ui.text_line("assumed", text) for text in facts.get("assumptions", ())],
        fitted=list((facts.get("constants") or {}).values()),
        by_class=[] if facts.get("constants") else [{"name": name, **row} for name, row in facts["classes"].items()],
        factor=lambda row: f"{row['factor']:.3f}" if row["used"] else "not used",
        slope=lambda row: "-" if "slope" in row["unidentified"] else f"{row['slope']:+.3f}",
        least=lambda row: "-" if "least_s" in row["unidentified"] else format_seconds(row["least_s"]),
    )


def collective_calibration_view(facts: Facts) -> ui.View:
    """Return the view of constants fitted to sweeps of collectives."""

    def show_error(row: Facts) -> str:
        error = row["standard_error"]
        return format_seconds(error) if row["text"].endswith(" us") else f"{error:.2g}"

    rows = [{**row, "name": name} for name, row in facts["constants"].items()]
    return _fit_view("collective calibration", facts, fitted=rows, standard_error=show_error)


def optimus_calibration_view(facts: Facts) -> ui.View:
    """Return the view of the constants of OptimusPrime, how well they are known, and the runs they were fitted to."""
    rows = []
    for name, value in facts["constants"].items():
        spread = facts["spread"].get(name)
        shown = format_seconds(value) if name.endswith("_s") else f"{value:.3f}"
        known = "read off the timed forward" if spread is None else f"within a factor of {math.exp(spread):.2f}"
        rows.append({"title": facts["titles"][name], "value": shown, "known": known})
    return _fit_view("optimus calibration", facts, fitted=rows, fit=[facts])


def fit_view(facts: Facts) -> ui.View:
    """Return the view of fitted constants, by the source of the runs they were fitted to."""
    views = {"nccl-tests": collective_calibration_view, "optimus": optimus_calibration_view}
    return views.get(facts.get("source", ""), calibration_view)(facts)


def run_view(facts: Facts) -> ui.View:
    """Return the view of a workload that was executed: its measured and its predicted step."""
    ranks = facts["ranks"]
    ran = f"{len(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]} alone" if ranks else "none"
    return build_view("run", facts, ran=ran, estimated_s=facts["priced_collectives_s"] or None)
