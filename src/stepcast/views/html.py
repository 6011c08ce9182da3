"""A view as a self-contained page, each part a section; or as a frame in a notebook."""

import re
from collections.abc import Callable, Sequence

from stepcast.units import format_percent, format_seconds
from stepcast.version import __version__
from stepcast.views import document as page
from stepcast.views import view as ui
from stepcast.views.markup import Child, Markup, command_code, explain, fill_template, join, tag
from stepcast.views.terminal import shade
from stepcast.views.timeline import timeline_section

BAR_HEIGHT, CELL_HEIGHT = 20, 16
SHADES = 10
LONG_VALUE, LONG_TEXT = 24, 28  # characters of a fact, of a cell in a table
MOST_PAIRS = 16  # of facts; more become a table
MOST_ROWS = 40  # of a table; longer ones scroll
NOTEBOOK_HEIGHT = 720
NEGATIVE = re.compile(r"(?:(?<=^)|(?<=[ (]))-(?=\d)")


def page_of(view: ui.View, about: page.About) -> page.Page:
    """Return the page of an answer."""
    shown = (_section(part, about) for part in view.parts if part and part.shown is not ui.Shown.TEXT)
    sections = [section for section in shown if section]
    return page.Page(view.title, _answer(view), sections, about, view.facts, view.assumptions, view.warnings)


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
        interval = fill_template(page.load_asset("interval.html"), center=center, **texts)
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
        texts = [command_code(cell.text) if cell.code else _minus(cell.text) for cell in row]
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


def _bars(part: ui.Bars) -> Markup | None:
    """Return rows of bars with ticks at round numbers, and the meanings of the colours that they have."""
    if not part.bars:
        return None
    most, used, rows = part.most if part.most > 0 else 1.0, set[str](), []
    for bar in part.bars[: part.most_bars]:
        start, shapes = bar.start, []
        for kind, length, tip in bar.pieces:
            used.add(kind)
            if length > 0:
                place = {"x": page.percent(start / most), "y": 0, "width": page.percent(length / most)}
                shapes.append(tag("rect", **place, height=BAR_HEIGHT, class_=f"k-{kind}", data_tip=tip or None))
            start += length
        for kind, mark, tip in part.marks:
            x = page.percent(mark / most)
            shapes.append(tag("line", x1=x, x2=x, y1=0, y2=BAR_HEIGHT, class_=f"m-{kind}", data_tip=tip or None))
        strip = tag("svg", shapes, class_="strip", width="100%", height=BAR_HEIGHT, aria_hidden="true")
        label = tag("span", explain(bar.label) if bar.is_term else bar.label, class_="label")
        note = tag("small", _minus(bar.note)) if bar.note else None
        value = tag("span", _minus(bar.value), note, class_="value")
        rows.append(tag("li", label, strip, value, class_="strong" if bar.strong else None))
    chart = tag("ul", rows, page.axis_row(most, part.show, part.unit), class_="rows")
    known = [(kind, words) for kind, words in part.kinds.items() if kind in used]
    commands = [tag("li", command_code(command)) for command in part.commands]
    below = tag("details", tag("summary", "Commands"), tag("ol", commands)) if commands else None
    note = tag("p", part.note, class_="lead") if part.note else None
    chart = tag("div", chart, class_="pairwise") if part.in_pairs else chart
    return join((page.legend(known) if known else None, chart, below, note))


def _heat_map(part: ui.HeatMap) -> Markup | None:
    """Return cells from left to right over the span, with neighbours of one shade merged."""
    if not part.rows or part.span_s <= 0:
        return None
    rows = [_heat_row(name, shares, part.span_s) for name, shares in part.rows]
    colours = (tag("rect", width=12, height=12, class_=f"u-{step}") for step in range(1, SHADES))
    squares = [tag("svg", colour, width=12, height=12, aria_hidden="true") for colour in colours]
    key = tag("p", squares, tag("span", "from 0 to 100 % use"), class_="shades")
    return join((key, tag("ul", rows, page.axis_row(part.span_s, format_seconds, count=4), class_="rows")))


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
            cells.append(tag("rect", **place, height=CELL_HEIGHT, class_=f"u-{shade(largest, SHADES)}", data_tip=tip))
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
    return tag("ol", [tag("li", command_code(command)) for command in part.commands], class_="commands", tabindex="0")


def _columns(part: ui.Columns) -> Markup | None:
    sides = [
        [render_body(child) for child in side if child and child.shown is not ui.Shown.TEXT]
        for side in (part.left, part.right)
    ]
    return tag("div", [tag("div", side) for side in sides], class_="halves") if any(sides) else None


DRAWERS: dict[type[ui.Part], Callable[..., Child]] = {
    ui.Table: _table,
    ui.Bars: _bars,
    ui.HeatMap: _heat_map,
    ui.GridCharts: _grids,
    ui.Scatter: _scatter,
    ui.FactList: _fact_list,
    ui.Remarks: _remarks,
    ui.Commands: _commands,
    ui.Columns: _columns,
}
