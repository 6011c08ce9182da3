"""Operators against what the GPU could do: how much each computes for a byte, and how fast it does."""

from stepcast.ir.facts import OperatorFacts, RooflineFacts
from stepcast.pages.blocks import table
from stepcast.pages.charts import Frame, legend
from stepcast.pages.document import Section
from stepcast.pages.markup import Markup, tag
from stepcast.units import TFLOPS, format_percent, format_seconds

KINDS = {
    "matmul": ("compute", "matrix product"),
    "groupedmatmul": ("ep", "expert products"),
    "attention": ("dp", "attention"),
    "scan": ("pp", "scan"),
    "elementwise": ("tp", "memory-bound"),
}
MOST_ROWS = 12
MOST_DOTS = 80


def roofline_section(found: RooflineFacts) -> Section:
    """A dot for each operator, as large as the time it takes, below the roof of its GPU."""
    operators = found["operators"][:MOST_DOTS]
    total_s = sum(each["seconds"] for each in found["operators"])
    peak, rate = found["peak_flops"], found["bytes_per_s"]
    ridge = peak / rate
    across = [each["flops"] / each["bytes"] for each in operators]
    reached = [each["flops"] / each["seconds"] for each in operators]
    frame = Frame(
        min([0.1, *across]) / 2,
        max([ridge * 4, *across]) * 2,
        min([peak / 1e3, *reached]) / 2,
        peak * 2,
        lambda value: f"{value:g}",
        lambda value: f"{value / TFLOPS:g}",
        "FLOP for each byte moved",
        "TFLOP/s reached",
        log=True,
    )
    roof = frame.line(((frame.x_low, frame.x_low * rate), (ridge, peak), (frame.x_high, peak)), "roof")
    dots = [
        frame.dot(
            x,
            y,
            KINDS.get(each["kind"], ("other", ""))[0],
            _tip(each, total_s),
            _radius(each, total_s),
            tabindex=None,
        )
        for x, y, each in zip(across, reached, operators, strict=True)
    ]
    used = dict.fromkeys(each["kind"] for each in operators)
    entries = [KINDS[kind] for kind in used if kind in KINDS]
    chart = frame.draw(roof, dots, label=f"Roofline of {len(operators)} operators on {found['gpu']}")
    lead = (
        f"{found['gpu']}: {peak / TFLOPS:,.0f} TFLOP/s in {found['dtype']} and {rate / 1e12:.2f} TB/s. "
        "Larger dots take more of the step; left of the ridge: memory-bound; right: compute-bound."
    )
    body = tag("div", tag("div", legend(entries), chart), _table(found, total_s), class_="halves")
    return Section("Operators", body, lead, wide=True)


def _radius(each: OperatorFacts, total_s: float) -> float:
    return float(3 + 15 * (each["seconds"] / total_s) ** 0.5)


def _tip(each: OperatorFacts, total_s: float) -> str:
    share = format_percent(each["seconds"] / total_s)
    return (
        f"{each['name']}: {format_seconds(each['seconds'])}, {share} of computing; "
        f"{each['flops'] / each['seconds'] / TFLOPS:,.1f} TFLOP/s, bound by {each['bound']}"
    )


def _table(found: RooflineFacts, total_s: float) -> Markup:
    shown = found["operators"][:MOST_ROWS]
    rows = [
        (
            each["name"],
            format_seconds(each["seconds"]),
            format_percent(each["seconds"] / total_s),
            f"{each['count']:,.0f}",
            f"{each['flops'] / each['seconds'] / TFLOPS:,.1f}",
            each["bound"],
        )
        for each in shown
    ]
    keys = [
        (
            each["name"],
            each["seconds"],
            each["seconds"],
            each["count"],
            each["flops"] / each["seconds"],
            each["bound"],
        )
        for each in shown
    ]
    caption = f"The {len(shown)} operators that take longest, of {len(found['operators'])}; on an average GPU"
    heads = ("operator", "time", "share", "count", "TFLOP/s", "bound by")
    return table(heads, rows, caption, keys, sortable=True)
