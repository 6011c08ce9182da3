"""A view as a self-contained page, each part a section; or as a frame in a notebook."""

import re
from collections.abc import Callable, Sequence

from stepcast.units import format_percent, format_seconds
from stepcast.version import __version__
from stepcast.views import document as page
from stepcast.views import view as ui
from stepcast.views.markup import Child, Markup, explain, fill_template, join, tag
from stepcast.views.terminal import shade
from stepcast.views.timeline import timeline_section

SMALLEST_SHARE = 5e-4  # of a breakdown, for a bar of its own
CELL_HEIGHT = 16
SHADES = 10
MOST_BARS, MOST_TIMES = 64, 32
LONG_VALUE, LONG_TEXT = 24, 28  # characters of a fact, of a cell in a table
MOST_PAIRS = 16  # of facts; more become a table
MOST_ROWS = 40  # of a table; longer ones scroll
NOTEBOOK_HEIGHT = 720
NEGATIVE = re.compile(r"(?:(?<=^)|(?<=[ (]))-(?=\d)")


def page_of(view: ui.View, about: page.About) -> page.Page:
    """Return the page of an answer."""
    shown = (_section(part, about) for part in view.parts if part and part.shown is not ui.Shown.TEXT)
    sections = [section for section in shown if section]
    notes = view.shown_assumptions, view.shown_warnings
    return page.Page(view.title, _answer(view), sections, about, view.facts, *notes)


def render_page(view: ui.View, about: page.About) -> bytes:
    """Return the file of a page."""
    return page.render(page_of(view, about))


def render_notebook(view: ui.View, verb: str) -> str:
    """Return the page in a frame of its own, apart from the style and programs around it.

    Its title comes first, for viewers that show no frames.
    """
    size = {"width": "100%", "height": NOTEBOOK_HEIGHT, "frameborder": 0}
    frame = tag("iframe", sandbox="allow-scripts", **size, title=view.title)
    document = render_page(view, page.About(verb, version=__version__)).decode()
    document = document.replace("&", "&amp;").replace('"', "&quot;")
    return f"<p>{tag('strong', view.title)}</p>" + frame.replace("<iframe", f'<iframe srcdoc="{document}"', 1)


def _answer(view: ui.View) -> Markup:
    """Return the headline with its interval, and the key figures as cards."""
    headline = view.headline
    first, *others = headline.about or ("",)
    cards = []
    for figure in view.figures:
        if figure.shown is not ui.Shown.TEXT:
            name = tag("span", explain(figure.name[:1].upper() + figure.name[1:]), class_="name")
            note = tag("span", _minus(figure.note), class_="note") if figure.note else None
            value = tag("strong", _minus(figure.value or figure.line))
            cards.append(tag("li", name, value, note, class_=f"card {figure.mood.value}".strip()))
    interval = None
    if band := headline.band:  # a line from low to high with the answer on it
        center = f"{4 + 92 * (band.value - band.low) / ((band.high - band.low) or 1.0):.2f}%"
        texts = {"low": band.low_text, "high": band.high_text, "words": band.words}
        interval = fill_template(page.asset("interval.html"), center=center, **texts)
    number = tag("span", _minus(headline.number), class_="number")
    return tag(
        "div",
        tag("p", tag("strong", first), [tag("span", words) for words in others], class_="about"),
        tag("h1", number, " ", tag("span", _minus(headline.unit), class_="unit")),
        interval,
        tag("ul", cards, class_="cards") if cards else None,
    )


def _minus(text: str) -> str:
    """Return *text* with minus signs where numbers begin with a hyphen."""
    return NEGATIVE.sub("−", text)


def _section(part: ui.Part, about: page.About) -> page.Section | None:
    if isinstance(part, ui.TimelineChart):
        return timeline_section(part.timeline, about.links, part.what)
    body = render_body(part)
    return page.Section(part.title, body, _minus(part.lead), part.wide) if body else None


def render_body(part: ui.Part | None) -> Child:
    """Return what a part shows below its title; nothing where it is empty."""
    return DRAWERS[type(part)](part) if part else None


def _table(part: ui.Table) -> Markup | None:
    if not part.cells:
        return None
    kinds = [_column_class([row[index].text.strip() for row in part.cells]) for index in range(len(part.heads))]
    sortable, order = ("sortable", "none") if part.sortable else (None, None)
    titles = [explain(text) for text in part.heads]
    if part.sortable:
        titles = [tag("button", title, type="button", class_="sort") for title in titles]
    heads = zip(titles, kinds, strict=True)
    head = [tag("th", title, scope="col", class_=kind, aria_sort=order) for title, kind in heads]
    body = []
    for row, number in zip(part.cells, part.ids or [None] * len(part.cells), strict=True):
        texts = [_options(cell.text) if cell.code else _minus(cell.text) for cell in row]
        columns = zip(texts, kinds, row, strict=True)
        cells = [tag("td", text, class_=kind, data_key=cell.key) for text, kind, cell in columns]
        body.append(tag("tr", cells, data_row=number))
    caption = tag("caption", part.caption) if part.caption else None
    table = tag("table", caption, tag("thead", tag("tr", head)), tag("tbody", body), class_=sortable)
    return _scrollable(table, part.caption or part.title, len(body) > MOST_ROWS)


def _scrollable(table: Markup, label: str, is_tall: bool = False) -> Markup:
    kinds = "scroll tall" if is_tall else "scroll"
    return tag("div", table, class_=kinds, tabindex="0", role="region", aria_label=label)


def _column_class(texts: Sequence[str]) -> str | None:
    """Return the class of a column: numbers, amounts of money included, or texts too long for a narrow screen."""
    if all(text in ("", "-") or re.match(r"[-+]?[$\u20ac\u00a3\u00a5]?\d", text) for text in texts):
        return "number"
    return "words" if max(map(len, texts)) > LONG_TEXT else None


def _options(words: str) -> Markup:
    """Return options of a command line, each on one line with its value."""
    first, *others = words.split(" --")
    options = [first, *(f"--{other}" for other in others)]
    return tag("code", [(tag("span", option, class_="option"), " ") for option in options])


def _breakdown(part: ui.Breakdown) -> Markup:
    """Return the parts one behind the other, and the total below them."""
    rows, pieces, start = [], [], 0.0
    for kind, name, amount in part.parts:
        if amount > 0 and amount >= SMALLEST_SHARE * part.total:
            share = format_percent(amount / part.total) if part.total else "-"
            piece = page.BarPiece(kind, start, amount, f"{name}: {part.show(amount)}, {share} of the {part.whole}")
            rows.append(page.BarRow(explain(name), (piece,), (part.show(amount), tag("small", share))))
            pieces.append(piece)
            start += amount
    rows.append(page.BarRow(part.whole, pieces, (part.show(part.total), tag("small", "100 %")), strong=True))
    return page.draw_bars(rows, part.total, part.show, part.unit)


def _bars(part: ui.Bars) -> Markup | None:
    if not part.bars:
        return None
    rows, used = [], set()
    for bar in part.bars[: MOST_BARS if part.kinds else MOST_TIMES]:
        start, pieces = bar.start, []
        for kind, amount in bar.amounts.items():
            if amount > 0:
                used.add(kind)
                words = part.kinds.get(kind, bar.label)
                pieces.append(page.BarPiece(kind, start, amount, bar.tip or f"{words}: {part.show(amount)}"))
                start += amount
        value = (bar.value, tag("small", _minus(bar.note))) if bar.note else bar.value
        rows.append(page.BarRow(bar.label, pieces, value, part.marks, bar.strong))
    known = [(kind, words) for kind, words in part.kinds.items() if kind in used]
    commands = [tag("li", tag("code", command)) for command in part.commands]
    below = tag("details", tag("summary", "Commands"), tag("ol", commands)) if commands else None
    return join((page.legend(known) if known else None, page.draw_bars(rows, part.most, part.show, part.unit), below))


def _pairs(part: ui.PairTable) -> Markup | None:
    """Return two bars for each row, one above the other, on one scale."""
    if not part.rows:
        return None
    shown, bars = part.rows[: part.most_bars], []
    for row in shown:
        value = (_minus(row.difference), tag("small", _minus(row.note)) if row.note != "-" else None)
        sides = zip(("first", "second"), part.sides, (row.first, row.second), (row.name, ""), (value, ""), strict=True)
        for kind, side, seconds, label, text in sides:
            piece = page.BarPiece(kind, 0, seconds, f"{row.name}, {side}: {format_seconds(seconds)}")
            bars.append(page.BarRow(label, (piece,), text))
    longest = max(max(row.first, row.second) for row in shown)
    left_out = len(part.rows) - len(shown)
    chart = tag("div", page.draw_bars(bars, longest, format_seconds), class_="pairwise")
    more = tag("p", f"{left_out} more are in the JSON.", class_="lead") if left_out else None
    return join((page.legend(zip(("first", "second"), part.sides, strict=True)), chart, more))


def _exposure(part: ui.ExposureBars) -> Markup | None:
    """Return the seconds of each group, the costliest first: exposed, then hidden behind computation."""
    rows = []
    for group, seconds in sorted(part.groups.items(), key=lambda item: -item[1]["exposed"]):
        if seconds["total"] > 0:
            name, exposed_s = part.names.get(group, group), seconds["exposed"]
            hidden_s = max(0.0, seconds["total"] - exposed_s)
            amounts = (("exposed", 0.0, exposed_s), ("hidden", exposed_s, hidden_s))
            pieces = [page.BarPiece(*amount, f"{name}, {amount[0]}: {format_seconds(amount[2])}") for amount in amounts]
            note = f"{format_percent(hidden_s / seconds['total'])} hidden"
            rows.append(page.BarRow(name, pieces, (format_seconds(exposed_s), tag("small", note))))
    key = page.legend((("exposed", "exposed: the step waits for it"), ("hidden", "hidden behind computation")))
    longest = max((seconds["total"] for seconds in part.groups.values()), default=0.0)
    return join((key, page.draw_bars(rows, longest, format_seconds))) if rows else None


def _heat_map(part: ui.HeatMap) -> Markup | None:
    """Return cells from left to right over the span, with neighbours of one shade merged."""
    if not part.rows or part.span_s <= 0:
        return None
    rows = [_heat_row(name, shares, part.span_s) for name, shares in part.rows]
    colours = (tag("rect", width=12, height=12, class_=f"u-{step}") for step in range(1, SHADES))
    squares = [tag("svg", colour, width=12, height=12, aria_hidden="true") for colour in colours]
    key = tag("p", squares, tag("span", "from 0 to 100 % use"), class_="shades")
    return join((key, tag("ul", rows, page.axis_row(part.span_s, format_seconds, about=4), class_="rows")))


def _heat_row(name: str, shares: Sequence[float], span_s: float) -> Markup:
    shades = [shade(share, SHADES) for share in shares]
    borders = [index for index in range(1, len(shades)) if shades[index] != shades[index - 1]]
    width = 100 / len(shares)
    cells: list[Child] = []
    for start, stop in zip([0, *borders], [*borders, len(shades)], strict=True):
        largest = max(shares[start:stop])
        if largest > 0:
            times = " to ".join(format_seconds(span_s * index / len(shares)) for index in (start, stop))
            tip = f"{name}, {times}: {format_percent(largest)} used"
            place = {"x": f"{start * width:.3f}%", "y": 0, "width": f"{(stop - start) * width:.3f}%"}
            kind = f"u-{shade(largest, SHADES)}"
            cells.append(tag("rect", **place, height=CELL_HEIGHT, class_=kind, data_tip=tip))
    row = tag("svg", cells, class_="strip", width="100%", height=CELL_HEIGHT, aria_hidden="true")
    mean = format_percent(sum(shares) / len(shares))
    return tag("li", tag("span", name, class_="label"), row, tag("span", mean, class_="value"))


def _grids(part: ui.GridCharts) -> Markup:
    """Return a table for each grid; the darker a cell, the nearer to the largest of its grid."""
    tables = []
    for grid in part.grids:
        largest = max((value for _, row in grid.rows for value in row if value is not None), default=1.0)
        head = tag("tr", tag("th", grid.corner), [tag("th", name, scope="col") for name in grid.columns])
        body = []
        for name, row in grid.rows:
            cells = [tag("th", name, scope="row")]
            for value in row:
                share = 0.0 if value is None else value / largest
                about = {"class_": f"number h-{max(0, min(9, int(10 * share)))}"}
                about["data_tip"] = f"{format_percent(share, 0)} of the best here"
                cells.append(tag("td", "") if value is None else tag("td", part.show(value), **about))
            body.append(tag("tr", cells))
        table = tag("table", tag("caption", grid.name), tag("thead", head), tag("tbody", body), class_="heat")
        tables.append(_scrollable(table, grid.name))
    return tag("div", tables, class_="maps")


def _scatter(part: ui.Scatter) -> Markup:
    frame = page.ChartFrame(part.x, part.y, part.log)
    marks: list[Child] = []
    for mark in part.marks:
        if isinstance(mark, ui.Dot):
            focus = {"tabindex": 0, "role": "img", "aria_label": mark.label} if mark.label else {}
            marks.append(frame.dot(mark, data_row=mark.row, **focus))
        elif mark.area:
            marks.append(frame.area(mark.points, mark.kind, mark.tip))
        else:
            marks.append(frame.line(mark.points, mark.kind))
    chart = frame.draw(marks, label=part.label, key=part.key)
    key = page.legend(part.legend) if part.legend else None
    note = tag("p", part.note, class_="lead") if part.note else None
    return join((key, tag("div", chart, class_="square") if part.square else chart, note))


def _fact_list(part: ui.FactList) -> Markup | None:
    if len(part.pairs) > MOST_PAIRS:
        return _table(ui.plain_table(part.title, ("figure", "value"), part.pairs))
    items = [
        tag("div", tag("dt", name), tag("dd", value), class_="long" if len(value) > LONG_VALUE else None)
        for name, value in part.pairs
    ]
    return tag("dl", items, class_="pairs") if items else None


def _remarks(part: ui.Remarks) -> Markup | None:
    if not part.remarks:
        return tag("p", part.none) if part.none else None
    items = []
    for remark in part.remarks:
        evidence = tag("ul", [tag("li", text) for text in remark.evidence]) if remark.evidence else None
        items.append(tag("li", tag("strong", remark.strong), remark.words, evidence))
    return tag("ul", items, class_="advice")


def _commands(part: ui.Commands) -> Markup | None:
    commands = [tag("li", tag("code", command)) for command in part.commands]
    return tag("ol", commands, class_="commands", tabindex="0")


def _columns(part: ui.Columns) -> Markup | None:
    sides = [
        [render_body(child) for child in side if child and child.shown is not ui.Shown.TEXT]
        for side in (part.left, part.right)
    ]
    return tag("div", [tag("div", side) for side in sides], class_="halves") if any(sides) else None


DRAWERS: dict[type[ui.Part], Callable[..., Child]] = {
    ui.Table: _table,
    ui.Breakdown: _breakdown,
    ui.Bars: _bars,
    ui.PairTable: _pairs,
    ui.ExposureBars: _exposure,
    ui.HeatMap: _heat_map,
    ui.GridCharts: _grids,
    ui.Scatter: _scatter,
    ui.FactList: _fact_list,
    ui.Remarks: _remarks,
    ui.Commands: _commands,
    ui.Columns: _columns,
}
