"""Static charts as SVG in percent of their width: readable at any width, without a program."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from stepcast.ir.dataclass import dataclass
from stepcast.views.markup import Child, Markup, join, tag
from stepcast.views.view import Axis

BAR_HEIGHT = 20


@dataclass(frozen=True, slots=True)
class BarPiece:
    """A piece of a bar, in the units of its chart; *kind* decides its colour."""

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


def draw_bars(rows: Iterable[BarRow], most: float, show: Callable[[float], str], unit: float = 1.0) -> Markup:
    """Return rows of bars on one scale from zero to *most*, with ticks at round numbers of *unit*."""
    most = most if most > 0 else 1.0
    return tag("ul", [_bar(row, most) for row in rows], axis_row(most, show, unit), class_="rows")


def _bar(row: BarRow, most: float) -> Markup:
    pieces = [
        tag(
            "rect",
            x=_percent(piece.start / most),
            y=0,
            width=_percent(max(0.0, piece.length / most)),
            height=BAR_HEIGHT,
            class_=f"k-{piece.kind}",
            data_tip=piece.tip or None,
        )
        for piece in row.pieces
        if piece.length > 0
    ]
    marks = [
        tag("line", x1=x, x2=x, y1=0, y2=BAR_HEIGHT, class_=f"m-{kind}", data_tip=tip or None)
        for kind, place, tip in row.marks
        if (x := _percent(place / most))
    ]
    return tag(
        "li",
        tag("span", row.label, class_="label"),
        tag("svg", pieces, marks, class_="strip", width="100%", height=BAR_HEIGHT, aria_hidden="true"),
        tag("span", row.value, class_="value"),
        class_="strong" if row.strong else None,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def axis_row(most: float, show: Callable[[float], str], unit: float = 1.0, about: int = 2) -> Markup:
    """Return the axis below rows of bars: zero, and the last of about so many round numbers, which narrow bars hold."""
    ticks = [unit * tick for tick in nice_ticks(0.0, most / unit, about)]
    texts = [
        tag(
            "text",
            shorten(show(tick)) if tick else "0",
            x=_percent(tick / most),
            y=12,
            text_anchor="start" if tick == 0 else "end" if tick > 0.97 * most else "middle",
        )
        for tick in (*ticks[:1], *ticks[1:][-1:])
    ]
    axis = tag("svg", texts, class_="ticks", width="100%", height=16, aria_hidden="true")
    return tag("li", tag("span"), axis, tag("span"), class_="axis")


def shorten(words: str) -> str:
    """Return a round number without the zeros after its point: 250.00 ms becomes 250 ms."""
    number, space, unit = words.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Return about so many round numbers from *low* to *high*."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= about + 0.5)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def swatch(kind: str, words: str, **attributes: object) -> Markup:
    """Return a colour and its meaning, as an entry of a legend."""
    square = tag("rect", width=12, height=12, class_=f"k-{kind}")
    return tag("li", tag("svg", square, width=12, height=12, aria_hidden="true"), tag("span", words), **attributes)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return the meanings of the colours of kinds."""
    return tag("ul", [swatch(kind, words) for kind, words in entries], class_="legend")


@dataclass(frozen=True, slots=True)
class ChartFrame:
    """A chart with two axes; marks are placed in percent of it."""

    x_axis: Axis
    y_axis: Axis
    log: bool = False

    def x(self, value: float) -> float:
        """Return the place of a value in percent from the left."""
        return 100 * self._share(value, self.x_axis)

    def y(self, value: float) -> float:
        """Return the place of a value in percent from the top."""
        return 100 - 100 * self._share(value, self.y_axis)

    def _share(self, value: float, axis: Axis) -> float:
        low, high = axis.low, axis.high
        if self.log:
            value, low, high = math.log10(max(value, 1e-300)), math.log10(low), math.log10(high)
        return (value - low) / (high - low) if high > low else 0.5

    def _ticks(self, axis: Axis) -> list[float]:
        if not self.log:
            return nice_ticks(axis.low, axis.high, 5)
        scale = math.log10(axis.base)
        first, last = (math.ceil(math.log10(axis.low) / scale - 1e-9), math.floor(math.log10(axis.high) / scale + 1e-9))
        every = max(1, (last - first) // 5) if axis.base == 10 else 10 if last - first > 25 else 5
        powers = [float(axis.base) ** power for power in range(-(-first // every) * every, last + 1, every)]
        return powers if len(powers) > 1 else nice_ticks(axis.low, axis.high, 4)

    def draw(self, *marks: Child, label: str, key: str | None = None) -> Markup:
        """Return *marks* within the axes."""
        lines, texts = [], []
        for tick in self._ticks(self.x_axis):
            place, text = f"{self.x(tick):.2f}%", shorten(self.x_axis.show(tick))
            lines.append(tag("line", x1=place, x2=place, y1="0%", y2="100%", class_="grid"))
            texts.append(tag("text", text, x=place, y="100%", dy=16, text_anchor="middle"))
        for tick in self._ticks(self.y_axis):
            place, text = f"{self.y(tick):.2f}%", shorten(self.y_axis.show(tick))
            lines.append(tag("line", x1="0%", x2="100%", y1=place, y2=place, class_="grid"))
            texts.append(tag("text", text, x="0%", y=place, dx=-8, dy=4, text_anchor="end"))
        size = {"width": "100%", "height": "100%", "overflow": "visible"}
        chart = tag("svg", lines, marks, texts, class_="plane", role="img", aria_label=label, **size)
        return tag(
            "figure",
            tag("div", self.y_axis.title, class_="y-title"),
            tag("div", chart, class_="frame", id=key),
            tag("div", self.x_axis.title, class_="x-title"),
            class_="chart",
        )

    def dot(self, x: float, y: float, kind: str, tip: str = "", radius: float = 4.0, **attributes: object) -> Markup:
        """Return a dot."""
        return tag(
            "circle",
            cx=f"{self.x(x):.3f}%",
            cy=f"{self.y(y):.3f}%",
            r=round(radius, 2),
            class_=f"k-{kind} dot",
            data_tip=tip or None,
            **attributes,
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> Markup:
        """Return straight pieces between *points*."""
        places = [(f"{self.x(x):.3f}%", f"{self.y(y):.3f}%") for x, y in points]
        return join(
            tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"l-{kind}") for (x1, y1), (x2, y2) in pairwise(places)
        )

    def area(self, points: Sequence[tuple[float, float]], kind: str, tip: str = "") -> Markup:
        """Return the polygon of *points*."""
        corners = " ".join(f"{self.x(x):.3f},{self.y(y):.3f}" for x, y in points)
        polygon = tag("polygon", points=corners, class_=f"a-{kind}", data_tip=tip or None)
        box = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none", "x": 0, "y": 0}
        return tag("svg", polygon, **box, width="100%", height="100%")
