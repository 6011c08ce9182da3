"""The page of the scoreboard: predicted against measured, set by set."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.facts import PointFacts
from stepcast.units import format_bytes, format_percent, format_seconds
from stepcast.views.blocks import about_line, answer, card, signed_percent, sortable_table, table
from stepcast.views.cells import cells
from stepcast.views.charts import ChartFrame, legend
from stepcast.views.document import About, Page, Section
from stepcast.views.markup import Child, Markup, join, tag

Facts = Mapping[str, Any]
MOST_DOTS = 1200
NEAR = 0.1


def validate_page(
    sets: Facts, points: Mapping[str, Sequence[PointFacts]], units: Mapping[str, str], about: About
) -> Page:
    """Of the facts of each set; *points* are its rows, or as many as can be told apart."""
    rows = sum(each["rows"] for each in sets.values())
    sections = [_set(name, each, points.get(name, ()), units.get(name, "s")) for name, each in sets.items()]
    return Page(
        f"{rows:,} measurements against their predictions",
        _headline(sets, rows),
        sections,
        about,
        {"sets": dict(sets)},
        warnings=[],
    )


def _headline(sets: Facts, rows: int) -> Markup:
    errors = [each for each in sets.values() if each["rows"]]
    cards = [
        card(
            name,
            format_percent(each["mean_abs_error"]),
            f"mean of {each['rows']:,}; median {format_percent(each['median_abs_error'])}",
        )
        for name, each in sets.items()
        if each["rows"]
    ]
    about = about_line("How far off predictions are", "mean absolute error, as a share of what was measured")
    if len(errors) == 1:
        number, unit = format_percent(errors[0]["mean_abs_error"]).split(" ")
        return answer(number, f"{unit} mean error over {rows:,} rows", about, cards=cards)
    return answer(f"{rows:,}", f"measurements in {len(errors)} sets", about, cards=cards)


def _set(name: str, found: Facts, points: Sequence[PointFacts], unit: str) -> Section:
    body: list[Child] = []
    if found["rows"]:
        left: list[Child] = [_chart(points, found, unit)] if points else []
        body.append(tag("div", tag("div", left, _worst(found, unit)), _table(found), class_="halves"))
    if found["skip_reasons"]:
        listed = [tag("li", f"{count:,}: {reason}") for reason, count in found["skip_reasons"].items()]
        body.append(tag("details", tag("summary", f"{found['skipped']:,} rows are left out"), tag("ul", listed)))
    return Section(name, body, " ".join(found["notes"]), wide=True)


def _chart(points: Sequence[PointFacts], found: Facts, unit: str) -> Markup:
    words = format_bytes if unit == "bytes" else format_seconds
    values = [value for each in points for value in (each["measured"], each["predicted"]) if value > 0]
    low, high = min(values) / 1.3, max(values) * 1.3
    frame = ChartFrame(low, high, low, high, words, words, "measured", "predicted", log=True)
    near = frame.area(
        ((low, low * (1 - NEAR)), (high, high * (1 - NEAR)), (high, high * (1 + NEAR)), (low, low * (1 + NEAR))), "near"
    )
    dots = [
        frame.dot(
            each["measured"],
            each["predicted"],
            "compute" if abs(each["predicted"] / each["measured"] - 1) <= NEAR else "tp",
            f"{each['name']}: measured {words(each['measured'])}, predicted {words(each['predicted'])} "
            f"({signed_percent(each['predicted'] / each['measured'] - 1)})",
            3.5,
        )
        for each in points
        if each["predicted"] > 0
    ]
    key = legend((("compute", "within 10 %"), ("tp", "further off")))
    same = frame.line(((low, low), (high, high)), "same")
    chart = frame.draw(near, same, dots, label=f"Predicted against measured, {len(points):,} rows")
    left = found["rows"] - len(points)
    note = tag("p", f"{left:,} rows are not drawn, evenly picked; the worst are.", class_="lead") if left > 0 else None
    return join((key, tag("div", chart, class_="square"), note))


def _table(found: Facts) -> Markup:
    heads = ("rows", "count", "mean", "median", "p90", "worst", "signed")
    lines = [("all", found), *found["selections"].items()]
    for group, each in found["groups"].items():
        lines += [(f"{group}: {name}", one) for name, one in each.items()]
    columns = (
        "name rows, mean_abs_error median_abs_error p90_abs_error worst_abs_error",
        ("mean_error", lambda one: signed_percent(one["mean_error"])),
    )
    rows = [{**one, "name": name} for name, one in lines]
    caption = "Absolute errors; signed is above zero where predictions are too slow"
    return sortable_table(heads, rows, columns, caption)


def _worst(found: Facts, unit: str) -> Markup | None:
    if not found["worst"]:
        return None
    columns = f"name measured_{unit} predicted_{unit}", lambda each: signed_percent(each["error"])
    rows = cells(found["worst"], *columns)
    return tag(
        "details",
        tag("summary", f"The {len(rows)} worst"),
        table(("row", "measured", "predicted", "error"), rows, "Furthest off"),
    )
