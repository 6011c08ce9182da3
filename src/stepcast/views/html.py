"""A view as a self-contained page: each part becomes a section."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from stepcast.units import format_percent, format_seconds
from stepcast.version import __version__
from stepcast.views import blocks
from stepcast.views import view as ui
from stepcast.views.charts import BarPiece, BarRow, ChartFrame, axis_row, bars, legend
from stepcast.views.document import About, Page, Section, render
from stepcast.views.markup import Child, Markup, join, tag
from stepcast.views.terminal import shade
from stepcast.views.timeline import timeline_section

SMALLEST_SHARE = 5e-4
CELL_HEIGHT = 16
SHADES = 10
MOST_TIMES = 32
NOTEBOOK_HEIGHT = 720
NEGATIVE = re.compile(r"(?:(?<=^)|(?<=[ (]))-(?=\d)")


def page_of(view: ui.View, about: About) -> Page:
    """Return the page of an answer."""
    sections = [_section(part, about) for part in view.parts if part and part.shown is not ui.Shown.TEXT]
    return Page(view.title, _headline(view), sections, about, view.facts, view.assumptions, view.warnings)


def render_page(view: ui.View, about: About) -> bytes:
    """Return the file of a page."""
    return render(page_of(view, about))


def render_notebook(view: ui.View, verb: str) -> str:
    """Return the page in a frame of its own, apart from the style and programs around it.

    Its title comes first, for viewers that show no frames.
    """
    frame = tag(
        "iframe",
        srcdoc=None,
        sandbox="allow-scripts",
        width="100%",
        height=NOTEBOOK_HEIGHT,
        frameborder=0,
        title=view.title,
    )
    document = render_page(view, About(verb, version=__version__)).decode()
    document = document.replace("&", "&amp;").replace('"', "&quot;")
    return f"<p>{tag('strong', view.title)}</p>" + frame.replace("<iframe", f'<iframe srcdoc="{document}"', 1)


def _headline(view: ui.View) -> Markup:
    headline: ui.Headline = view.headline
    first, *others = headline.about or ("",)
    about = join((tag("strong", first), *(tag("span", each) for each in others)))
    band = headline.band
    drawn = blocks.band(band.low, band.value, band.high, (band.low_text, band.high_text), band.words) if band else None
    cards = [_card(each) for each in view.figures if each.shown is not ui.Shown.TEXT]
    return blocks.answer(_minus(headline.number), _minus(headline.unit), about, drawn, cards)


def _card(figure: ui.Figure) -> Markup:
    name = figure.name[:1].upper() + figure.name[1:]
    return blocks.card(name, _minus(figure.value or figure.line), _minus(figure.note), figure.mood.value)


def _minus(text: str) -> str:
    """Return *text* with minus signs where numbers begin with a hyphen."""
    return NEGATIVE.sub("−", text)


def _section(part: ui.Part, about: About) -> Section | None:
    if isinstance(part, ui.TimelineChart):
        return timeline_section(part.timeline, about.links, part.what)
    body = render_body(part)
    return Section(part.title, body, _minus(part.lead), part.wide) if body else None


def render_body(part: ui.Part | None) -> Child:
    """Return what a part shows below its title; nothing where it is empty."""
    return DRAWERS[type(part)](part) if part else None


def _table(part: ui.Table) -> Markup | None:
    if not part.cells:
        return None
    keys = [[cell.key for cell in row] for row in part.cells]
    lines = [[_options(cell.text) if cell.code else _minus(cell.text) for cell in row] for row in part.cells]
    return blocks.table(part.heads, lines, part.caption or part.title, keys, part.sortable, part.ids)


def _options(words: str) -> Markup:
    """Return options of a command line, each on one line with its value."""
    first, *others = words.split(" --")
    options = [first, *(f"--{other}" for other in others)]
    return tag("code", [(tag("span", option, class_="option"), " ") for option in options])


def _breakdown(part: ui.Breakdown) -> Markup:
    return blocks.waterfall(part.parts, part.total, part.whole, part.show, part.unit)


def _bars(part: ui.Bars) -> Markup | None:
    if not part.bars:
        return None
    rows, used = [], set()
    for bar in part.bars[: 64 if part.kinds else MOST_TIMES]:
        start, pieces = 0.0, []
        for kind, amount in bar.amounts.items():
            if amount > 0:
                used.add(kind)
                words = part.kinds.get(kind, bar.label)
                pieces.append(BarPiece(kind, start, amount, bar.tip or f"{words}: {part.show(amount)}"))
                start += amount
        value = (bar.value, tag("small", _minus(bar.note))) if bar.note else bar.value
        rows.append(BarRow(bar.label, pieces, value, part.marks, bar.strong))
    drawn = bars(rows, part.most, part.show, part.unit)
    known = [(kind, words) for kind, words in part.kinds.items() if kind in used]
    commands = [tag("li", tag("code", command)) for command in part.commands]
    below = tag("details", tag("summary", "Their commands"), tag("ol", commands)) if commands else None
    return join((legend(known) if known else None, drawn, below))


def _pairs(part: ui.PairTable) -> Markup | None:
    if not part.rows:
        return None
    shown = part.rows[: part.most_bars]
    drawn = blocks.paired(
        ((row.name, row.first, row.second, (_minus(row.difference), tag("small", _minus(row.note)))) for row in shown),
        part.sides,
    )
    if len(shown) == len(part.rows):
        return drawn
    left_out = len(part.rows) - len(shown)
    return join((drawn, tag("p", f"{left_out} more are in the JSON.", class_="lead")))


def _exposure(part: ui.ExposureBars) -> Markup | None:
    """Return the seconds of each group, the costliest first: exposed, then hidden behind computation."""
    listed = sorted(part.groups.items(), key=lambda each: -each[1]["exposed"])
    listed = [each for each in listed if each[1]["total"] > 0]
    if not listed:
        return None
    rows = []
    for group, each in listed:
        name = part.names.get(group, group)
        hidden_s = max(0.0, each["total"] - each["exposed"])
        pieces = (
            BarPiece("exposed", 0, each["exposed"], f"{name}, exposed: {format_seconds(each['exposed'])}"),
            BarPiece("hidden", each["exposed"], hidden_s, f"{name}, hidden: {format_seconds(hidden_s)}"),
        )
        note = f"{format_percent(hidden_s / each['total'])} hidden"
        rows.append(BarRow(name, pieces, (format_seconds(each["exposed"]), tag("small", note))))
    key = legend((("exposed", "exposed: the step waits for it"), ("hidden", "hidden behind computation")))
    return join((key, bars(rows, max(each["total"] for _, each in listed), format_seconds)))


def _heat_map(part: ui.HeatMap) -> Markup | None:
    """Return cells from left to right over the span, neighbours of one shade drawn as one."""
    if not part.rows or part.span_s <= 0:
        return None
    rows = [_heat_row(name, shares, part.span_s) for name, shares in part.rows]
    squares = [
        tag("svg", tag("rect", width=12, height=12, class_=f"u-{step}"), width=12, height=12, aria_hidden="true")
        for step in range(1, SHADES)
    ]
    key = tag("p", squares, tag("span", "from 0 to 100 % use"), class_="shades")
    return join((key, tag("ul", rows, axis_row(part.span_s, format_seconds, about=4), class_="rows")))


def _heat_row(name: str, shares: Sequence[float], span_s: float) -> Markup:
    shades = [shade(share, SHADES) for share in shares]
    borders = [at for at in range(1, len(shades)) if shades[at] != shades[at - 1]]
    width = 100 / len(shares)
    cells: list[Child] = []
    for start, stop in zip([0, *borders], [*borders, len(shades)], strict=True):
        largest = max(shares[start:stop])
        if largest <= 0:
            continue
        times = [format_seconds(span_s * at / len(shares)) for at in (start, stop)]
        cells.append(
            tag(
                "rect",
                x=f"{start * width:.3f}%",
                y=0,
                width=f"{(stop - start) * width:.3f}%",
                height=CELL_HEIGHT,
                class_=f"u-{shade(largest, SHADES)}",
                data_tip=f"{name}, {times[0]} to {times[1]}: {format_percent(largest)} used",
            )
        )
    drawn = tag("svg", cells, class_="bar", width="100%", height=CELL_HEIGHT, aria_hidden="true")
    mean = format_percent(sum(shares) / len(shares))
    return tag("li", tag("span", name, class_="label"), drawn, tag("span", mean, class_="value"))


def _scatter(part: ui.Scatter) -> Markup:
    x, y = part.x, part.y
    frame = ChartFrame(x.low, x.high, y.low, y.high, x.show, y.show, x.title, y.title, part.log)
    drawn: list[Child] = []
    for mark in part.marks:
        if isinstance(mark, ui.Dot):
            focus = {"tabindex": 0, "role": "img", "aria_label": mark.label} if mark.label else {}
            drawn.append(frame.dot(mark.x, mark.y, mark.kind, mark.tip, mark.radius, data_row=mark.row, **focus))
        elif mark.area:
            drawn.append(frame.area(mark.points, mark.kind, mark.tip))
        else:
            drawn.append(frame.line(mark.points, mark.kind))
    chart = frame.draw(drawn, label=part.label, key=part.key)
    key = legend(part.legend) if part.legend else None
    note = tag("p", part.note, class_="lead") if part.note else None
    return join((key, tag("div", chart, class_="square") if part.square else chart, note))


def _fact_list(part: ui.FactList) -> Markup | None:
    return blocks.pairs(part.pairs) if part.pairs else None


def _remarks(part: ui.Remarks) -> Markup | None:
    if not part.remarks:
        return tag("p", part.none) if part.none else None
    listed = [
        tag(
            "li",
            tag("strong", remark.strong),
            remark.words,
            tag("ul", [tag("li", text) for text in remark.evidence]) if remark.evidence else None,
        )
        for remark in part.remarks
    ]
    return tag("ul", listed, class_="advice")


def _commands(part: ui.Commands) -> Markup | None:
    return tag("ol", [tag("li", tag("code", command)) for command in part.commands], class_="commands")


def _columns(part: ui.Columns) -> Markup | None:
    sides = [
        [render_body(each) for each in side if each and each.shown is not ui.Shown.TEXT]
        for side in (part.left, part.right)
    ]
    return tag("div", [tag("div", side) for side in sides], class_="halves") if any(sides) else None


DRAWERS: dict[type[ui.Part], Callable[[Any], Child]] = {
    ui.Table: _table,
    ui.Breakdown: _breakdown,
    ui.Bars: _bars,
    ui.PairTable: _pairs,
    ui.ExposureBars: _exposure,
    ui.HeatMap: _heat_map,
    ui.Scatter: _scatter,
    ui.FactList: _fact_list,
    ui.Remarks: _remarks,
    ui.Commands: _commands,
    ui.Columns: _columns,
}
