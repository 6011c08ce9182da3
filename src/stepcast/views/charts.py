"""Charts in which nothing moves, as SVG in percent of its width: readable at any width, without a program."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepcast.views.markup import Child, Markup, join, tag

BAR_HEIGHT = 20


@dataclass(frozen=True, slots=True)
class BarPiece:
    """Part of a bar, in the units of its chart; *kind* decides its colour."""

    kind: str
    start: float
    length: float
    tip: str = ""


@dataclass(frozen=True, slots=True)
class BarRow:
    """A bar with its label before and its value after it."""

    label: Child
    pieces: Sequence[BarPiece]
    value: Child = ""
    marks: Sequence[tuple[str, float, str]] = ()  # kind, place, tip: lines across the bar
    strong: bool = False


def bars(rows: Iterable[BarRow], most: float, axis: Callable[[float], str] | None = None, unit: float = 1.0) -> Markup:
    """Rows of bars on one scale from zero to *most*, with ticks at round numbers of *unit*."""
    most = most if most > 0 else 1.0
    listed = [_row(row, most) for row in rows]
    below = axis_row(most, axis, unit) if axis else None
    return tag("ul", listed, below, class_="rows")


def _row(row: BarRow, most: float) -> Markup:
    drawn = [
        tag(
            "rect",
            x=f"{100 * piece.start / most:.3f}%",
            y=0,
            width=f"{max(0.0, 100 * piece.length / most):.3f}%",
            height=BAR_HEIGHT,
            class_=f"k-{piece.kind}",
            data_tip=piece.tip or None,
        )
        for piece in row.pieces
        if piece.length > 0
    ]
    marks = [
        tag(
            "line",
            x1=f"{100 * place / most:.3f}%",
            x2=f"{100 * place / most:.3f}%",
            y1=0,
            y2=BAR_HEIGHT,
            class_=f"m-{kind}",
            data_tip=tip or None,
        )
        for kind, place, tip in row.marks
    ]
    chart = tag("svg", drawn, marks, class_="bar", width="100%", height=BAR_HEIGHT, aria_hidden="true")
    return tag(
        "li",
        tag("span", row.label, class_="label"),
        chart,
        tag("span", row.value, class_="value"),
        class_="strong" if row.strong else None,
    )


def axis_row(most: float, words: Callable[[float], str], unit: float = 1.0, about: int = 2) -> Markup:
    """The axis below rows of bars, with about so many ticks."""
    ticks = [unit * tick for tick in nice_ticks(0.0, most / unit, about)]
    drawn = [
        tag(
            "text",
            short(words(tick)) if tick else "0",
            x=f"{100 * tick / most:.3f}%",
            y=12,
            text_anchor="start" if tick == 0 else "end" if tick > 0.97 * most else "middle",
        )
        for tick in ticks
    ]
    axis = tag("svg", drawn, class_="ticks", width="100%", height=16, aria_hidden="true")
    return tag("li", tag("span"), axis, tag("span"), class_="axis")


def short(words: str) -> str:
    """A round number without the zeros behind its point: 250.00 ms is 250 ms."""
    number, space, unit = words.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from *low* to *high*, about so many."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if span / (each * power) <= about + 0.5)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def swatch(kind: str, words: str, **more: object) -> Markup:
    """A colour and what it stands for, as an entry of a legend."""
    square = tag("rect", width=12, height=12, class_=f"k-{kind}")
    drawn = tag("svg", square, width=12, height=12, aria_hidden="true")
    return tag("li", drawn, tag("span", words), **more)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """What the colours of kinds mean."""
    return tag("ul", [swatch(kind, words) for kind, words in entries], class_="legend")


@dataclass(frozen=True, slots=True)
class ChartFrame:
    """A chart with two axes; ``x`` and ``y`` are shares of it, from the left and from the bottom."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    x_words: Callable[[float], str]
    y_words: Callable[[float], str]
    x_title: str
    y_title: str
    log: bool = False

    def x(self, value: float) -> float:
        return self._share(value, self.x_low, self.x_high)

    def y(self, value: float) -> float:
        return self._share(value, self.y_low, self.y_high)

    def _share(self, value: float, low: float, high: float) -> float:
        if self.log:
            value, low, high = math.log10(max(value, 1e-300)), math.log10(low), math.log10(high)
        return (value - low) / (high - low) if high > low else 0.5

    def _ticks(self, low: float, high: float) -> list[float]:
        if not self.log:
            return nice_ticks(low, high, 5)
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, (last - first) // 5)
        found = [10.0**power for power in range(first, last + 1, every)]
        return found if len(found) > 1 else nice_ticks(low, high, 4)

    def draw(self, *inside: Child, label: str, key: str | None = None) -> Markup:
        """*inside* within axes; what it draws is in percent of the chart."""
        lines, words = [], []
        for tick in self._ticks(self.x_low, self.x_high):
            at = f"{100 * self.x(tick):.2f}%"
            lines.append(tag("line", x1=at, x2=at, y1="0%", y2="100%", class_="grid"))
            words.append(tag("text", short(self.x_words(tick)), x=at, y="100%", dy=16, text_anchor="middle"))
        for tick in self._ticks(self.y_low, self.y_high):
            at = f"{100 - 100 * self.y(tick):.2f}%"
            lines.append(tag("line", x1="0%", x2="100%", y1=at, y2=at, class_="grid"))
            words.append(tag("text", short(self.y_words(tick)), x="0%", y=at, dx=-8, dy=4, text_anchor="end"))
        chart = tag(
            "svg",
            lines,
            inside,
            words,
            class_="plane",
            width="100%",
            height="100%",
            role="img",
            aria_label=label,
            overflow="visible",
        )
        return tag(
            "figure",
            tag("div", self.y_title, class_="y-title"),
            tag("div", chart, class_="frame", id=key),
            tag("div", self.x_title, class_="x-title"),
            class_="chart",
        )

    def dot(self, x: float, y: float, kind: str, tip: str = "", radius: float = 4.0, **more: object) -> Markup:
        return tag(
            "circle",
            cx=f"{100 * self.x(x):.3f}%",
            cy=f"{100 - 100 * self.y(y):.3f}%",
            r=round(radius, 2),
            class_=f"k-{kind} dot",
            data_tip=tip or None,
            **more,
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> Markup:
        """Straight pieces between *points*."""
        pairs = pairwise(points)
        return join(
            tag(
                "line",
                x1=f"{100 * self.x(x1):.3f}%",
                y1=f"{100 - 100 * self.y(y1):.3f}%",
                x2=f"{100 * self.x(x2):.3f}%",
                y2=f"{100 - 100 * self.y(y2):.3f}%",
                class_=f"l-{kind}",
            )
            for (x1, y1), (x2, y2) in pairs
        )

    def area(self, points: Sequence[tuple[float, float]], kind: str, tip: str = "") -> Markup:
        """The polygon of *points*."""
        placed = " ".join(f"{100 * self.x(x):.3f},{100 - 100 * self.y(y):.3f}" for x, y in points)
        inner = tag("polygon", points=placed, class_=f"a-{kind}", data_tip=tip or None)
        return tag(
            "svg", inner, viewBox="0 0 100 100", preserveAspectRatio="none", x=0, y=0, width="100%", height="100%"
        )
