"""What several pages share: the answer with its band, cards, tables, and bars of the parts of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepcast.units import format_percent, format_seconds
from stepcast.views.cells import Column, cells, keys
from stepcast.views.charts import BarPiece, BarRow, bars, legend
from stepcast.views.markup import Child, Markup, join, tag

Facts = Mapping[str, Any]
SMALLEST_SHARE = 5e-4


def answer(words: str, unit: str, about: Child, band: Markup | None = None, cards: Child = None) -> Markup:
    """The number that was asked for, how sure it is, and what of."""
    return tag(
        "div",
        tag("p", about, class_="about"),
        tag("h1", tag("span", words, class_="number"), " ", tag("span", unit, class_="unit")),
        band,
        tag("ul", cards, class_="cards") if cards else None,
    )


def about_line(first: Child, *further: Child) -> Markup:
    """What an answer is of: its *first* word strong."""
    return join((tag("strong", first), *(tag("span", each) for each in further)))


def band(low: float, value: float, high: float, words: Sequence[str], sure: str) -> Markup:
    """A line from low to high with the answer on it; *words* are low and high as text."""
    span = (high - low) or 1.0
    at = f"{4 + 92 * (value - low) / span:.2f}%"
    drawn = tag(
        "svg",
        tag("rect", x="4%", y=9, width="92%", height=6, rx=3, class_="k-band"),
        tag("circle", cx=at, cy=12, r=7, class_="k-point"),
        class_="band-line",
        width="100%",
        height=24,
        aria_hidden="true",
    )
    return tag(
        "div",
        tag("span", words[0], class_="low"),
        drawn,
        tag("span", words[1], class_="high"),
        tag("span", sure, class_="sure"),
        class_="band",
    )


def card(name: str, value: str, note: Child = "", mood: str = "") -> Markup:
    """One figure; *mood* is good, bad or nothing."""
    return tag(
        "li",
        tag("span", name, class_="name"),
        tag("strong", value),
        tag("span", note, class_="note") if note else None,
        class_=f"card {mood}".strip(),
    )


def waterfall(
    parts: Sequence[tuple[str, str, float]],
    total_s: float,
    total: str = "step",
    words: Callable[[float], str] = format_seconds,
    unit: float = 1.0,
) -> Markup:
    """Parts of a step one behind the other: kind, name and seconds of each."""
    shown = [part for part in parts if part[2] > 0 and part[2] >= SMALLEST_SHARE * total_s]
    rows, pieces, start = [], [], 0.0
    for kind, name, seconds in shown:
        share = format_percent(seconds / total_s) if total_s else "-"
        piece = BarPiece(kind, start, seconds, f"{name}: {words(seconds)}, {share} of the {total}")
        rows.append(BarRow(name, (piece,), (words(seconds), tag("small", share))))
        pieces.append(piece)
        start += seconds
    rows.append(BarRow(total, pieces, (words(total_s), tag("small", "100 %")), strong=True))
    return bars(rows, total_s, words, unit)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Child]],
    caption: str,
    sort_by: Iterable[Sequence[object]] | None = None,
    sortable: bool = False,
    ids: Iterable[object] | None = None,
) -> Markup:
    """A table; *sort_by* are what its cells are sorted by, where that is not what they show."""
    lines = list(rows)
    sorts = [[None] * len(heads)] * len(lines) if sort_by is None else list(sort_by)
    numbers = [None] * len(lines) if ids is None else list(ids)
    numeric = [bool(lines) and all(_is_number(row[at]) for row in lines) for at in range(len(heads))]
    head = [
        tag(
            "th",
            tag("button", each, type="button", class_="sort") if sortable else each,
            scope="col",
            class_="number" if numeric[at] else None,
            aria_sort="none" if sortable else None,
        )
        for at, each in enumerate(heads)
    ]
    body = [
        tag(
            "tr",
            [
                tag("td", cell, class_="number" if numeric[at] else None, data_key=sort[at])
                for at, cell in enumerate(row)
            ],
            data_row=number,
        )
        for row, sort, number in zip(lines, sorts, numbers, strict=True)
    ]
    made = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_="sortable" if sortable else None,
    )
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def sortable_table(
    heads: Sequence[str],
    rows: Sequence[Facts],
    columns: Sequence[Column],
    caption: str,
    ids: Iterable[object] | None = None,
) -> Markup:
    """A table whose heads sort it by the values of *rows*."""
    return table(heads, cells(rows, *columns), caption, keys(rows, *columns), sortable=True, ids=ids)


def _is_number(cell: Child) -> bool:
    shown = str(cell).strip()
    return shown in ("", "-") or shown[:1].isdigit() or (shown[:1] in "+-−" and shown[1:2].isdigit())


def pairs(items: Iterable[tuple[str, Child]]) -> Markup:
    """Names and values."""
    listed = [
        tag("div", tag("dt", name), tag("dd", value), class_="long" if len(str(value)) > 48 else None)
        for name, value in items
    ]
    return tag("dl", listed, class_="pairs")


def signed_percent(fraction: float) -> str:
    return f"{fraction * 100:+.1f} %".replace("-", "−")


def paired(rows: Iterable[tuple[str, float, float, Child]], names: tuple[str, str]) -> Markup:
    """Two values of each row, one bar above the other, on one scale."""
    listed = list(rows)
    most = max((max(first, second) for _, first, second, _ in listed), default=1.0)
    drawn = []
    for label, first, second, value in listed:
        drawn.append(
            BarRow(label, (BarPiece("first", 0, first, f"{label}, {names[0]}: {format_seconds(first)}"),), value)
        )
        drawn.append(BarRow("", (BarPiece("second", 0, second, f"{label}, {names[1]}: {format_seconds(second)}"),), ""))
    key = legend((("first", names[0]), ("second", names[1])))
    return Markup(key + tag("div", bars(drawn, most, format_seconds), class_="pairwise"))
