"""A page from its parts: the answer first, sections in order, then defaults and the command; and its charts."""

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import NamedTuple

import msgspec

from stepcast.ir.types import Facts, dataclass
from stepcast.views.declared import asked_pairs
from stepcast.views.markup import Child, Markup, command_code, explain, fill_template, join, tag, text
from stepcast.views.text import visible
from stepcast.views.view import Axis, Dot


class Section(NamedTuple):
    """A part of a page; *lead* is a sentence that says what it shows."""

    title: str
    body: Child
    lead: str = ""
    wide: bool = False

    @property
    def key(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower()).strip("-")


class About(NamedTuple):
    """The origin of a page: its command and version."""

    verb: str
    command: str = ""
    version: str = ""
    links: tuple[tuple[str, str], ...] = ()  # words and names of files next to the page


@dataclass(frozen=True, slots=True)
class Page:
    """An answer as a page: its title, its headline, and the sections below it."""

    title: str
    headline: Child
    sections: Sequence[Section]
    about: About
    facts: Facts = field(default_factory=dict)
    assumptions: Sequence[str] = ()
    warnings: Sequence[str] = ()


def render(page: Page) -> bytes:
    """Return a page as a self-contained HTML file."""
    document = fill_template(
        load_asset("page.html"),
        policy=text(build_policy(), 4000),
        version=page.about.version,
        title=page.title,
        style=Markup(load_asset("page.css")),
        verb=page.about.verb,
        links=[tag("a", section.title, href=f"#{section.key}") for section in page.sections],
        answer=render_body(page),
        facts=data_block("facts", page.facts),
        program=Markup(load_asset("page.js")),
    )
    return f"<!doctype html>\n{document}\n".encode("utf-8", "backslashreplace")


def render_body(page: Page) -> Markup:
    """Return everything between the bar at the top and the footer."""
    asked = command = None
    # The question, as text and JSON begin with it; the command is at the end, with a button that copies it.
    if pairs := asked_pairs({name: value for name, value in page.facts.items() if name != "command"}):
        listed = [tag("div", tag("dt", name), tag("dd", text(str(value), 4000))) for name, value in pairs]
        asked = tag("dl", listed, class_="asked", aria_label="What was asked")
    if page.about.command:
        command = fill_template(
            load_asset("command.html"),
            command=text(page.about.command, 4000),
            code=command_code(page.about.command),
            links=[tag("p", tag("a", words, href=name)) for words, name in page.about.links],
        )
    warnings = _notes("Warnings", "warning", page.warnings)
    defaults = _notes("Defaults used", "assumed", page.assumptions)
    sections = tag("div", _arrange(page.sections), class_="sections")
    return join((asked, tag("header", page.headline, class_="answer"), warnings, sections, defaults, command))


def data_block(key: str, value: object) -> Markup:
    """Return *value* as a block of JSON within the page, which browsers do not execute."""
    data = msgspec.json.encode(to_plain_json(value)).decode()
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{text(key)}">{data}</script>')


def to_plain_json(value: object) -> object:
    """Return *value* with what JSON can hold: valid text, and lists instead of arrays."""
    if isinstance(value, Mapping):
        return {visible(str(key)): to_plain_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [to_plain_json(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _arrange(sections: Sequence[Section]) -> list[Markup]:
    """Return *sections* two to a row; a section that is alone in its row has the full width."""
    placed: list[Markup] = []
    alone = True
    for index, section in enumerate(sections):
        last = index + 1 == len(sections) or sections[index + 1].wide
        wide = section.wide or (alone and last)
        alone = section.wide or not alone
        title = f"{section.key}-title"
        lead = tag("p", section.lead, class_="lead") if section.lead else None
        attributes = {"id": section.key, "aria_labelledby": title, "class_": "wide" if wide else None}
        placed.append(tag("section", tag("h2", explain(section.title), id=title), lead, section.body, **attributes))
    return placed


def _notes(title: str, kind: str, notes: Sequence[str]) -> Markup | None:
    if not notes:
        return None
    listed = [tag("li", text(note, 2000)) for note in dict.fromkeys(notes)]
    return tag("aside", tag("h2", title), tag("ul", listed), class_=f"notes {kind}", aria_label=title)


# The style and the program that every page holds, and the digests by which its policy knows them.


@cache
def load_asset(name: str) -> str:
    """Return a file of this package as text."""
    return files("stepcast.views").joinpath("assets", name).read_text("utf-8")


@cache
def compute_digest(name: str) -> str:
    """Return the digest by which a Content-Security-Policy allows a script or style inside the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(load_asset(name).encode()).digest()).decode()}'"


@cache
def build_policy() -> str:
    """Return the Content-Security-Policy of a page, which may use its own program and style, and nothing else."""
    return (
        f"default-src 'none'; script-src {compute_digest('page.js')}; style-src {compute_digest('page.css')}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


# ---- static charts as SVG in percent of their width: readable at any width, without a program ---------------


def percent(share: float) -> str:
    """Return a share as a length of SVG."""
    return f"{100 * share:.3f}%"


def axis_row(most: float, show: Callable[[float], str], unit: float = 1.0, count: int = 2) -> Markup:
    """Return the axis below rows of bars: zero, and the largest of about *count* round numbers, so that it fits."""
    ticks = [unit * tick for tick in nice_ticks(0.0, most / unit, count)]
    texts = []
    for tick in (*ticks[:1], *ticks[1:][-1:]):
        anchor = "start" if tick == 0 else "end" if tick > 0.97 * most else "middle"
        words = shorten(show(tick)) if tick else "0"
        texts.append(tag("text", words, x=percent(tick / most), y=12, text_anchor=anchor))
    axis = tag("svg", texts, class_="ticks", width="100%", height=16, aria_hidden="true")
    return tag("li", tag("span"), axis, tag("span"), class_="axis")


def shorten(words: str) -> str:
    """Return a round number without the zeros after its point: 250.00 ms becomes 250 ms."""
    number, space, unit = words.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about *count* round numbers from *low* to *high*."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= count + 0.5)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def swatch(kind: str, words: str, **attributes: object) -> Markup:
    """Return a colour and its meaning, as an entry of a legend."""
    square = tag("rect", width=12, height=12, class_=f"k-{kind}")
    return tag("li", tag("svg", square, width=12, height=12, aria_hidden="true"), tag("span", words), **attributes)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return a legend: the colour of each kind and its meaning."""
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
        step = max(1, (last - first) // 5) if axis.base == 10 else 10 if last - first > 25 else 5
        powers = [float(axis.base) ** power for power in range(-(-first // step) * step, last + 1, step)]
        return powers if len(powers) > 1 else nice_ticks(axis.low, axis.high, 4)

    def draw(self, *marks: Child, label: str, key: str | None = None) -> Markup:
        """Return *marks* within the axes."""
        lines, texts = [], []
        for tick in self._ticks(self.x_axis):
            place, words = f"{self.x(tick):.2f}%", shorten(self.x_axis.show(tick))
            lines.append(tag("line", x1=place, x2=place, y1="0%", y2="100%", class_="grid"))
            texts.append(tag("text", words, x=place, y="100%", dy=16, text_anchor="middle"))
        for tick in self._ticks(self.y_axis):
            place, words = f"{self.y(tick):.2f}%", shorten(self.y_axis.show(tick))
            lines.append(tag("line", x1="0%", x2="100%", y1=place, y2=place, class_="grid"))
            texts.append(tag("text", words, x="0%", y=place, dx=-8, dy=4, text_anchor="end"))
        size = {"width": "100%", "height": "100%", "overflow": "visible"}
        chart = tag("svg", lines, marks, texts, class_="plane", role="img", aria_label=label, **size)
        frame = tag("div", chart, class_="frame", id=key)
        return fill_template(load_asset("chart.html"), y=self.y_axis.title, frame=frame, x=self.x_axis.title)

    def dot(self, dot: Dot, **attributes: object) -> Markup:
        """Return a dot."""
        place = {"cx": f"{self.x(dot.x):.3f}%", "cy": f"{self.y(dot.y):.3f}%", "r": round(dot.radius, 2)}
        return tag("circle", **place, class_=f"k-{dot.kind} dot", data_tip=dot.tip or None, **attributes)

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> Markup:
        """Return straight lines from each of *points* to the next."""
        places = [(f"{self.x(x):.3f}%", f"{self.y(y):.3f}%") for x, y in points]
        pairs = ((*start, *end) for start, end in pairwise(places))
        return join(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"l-{kind}") for x1, y1, x2, y2 in pairs)

    def area(self, points: Sequence[tuple[float, float]], kind: str, tip: str = "") -> Markup:
        """Return the polygon of *points*."""
        corners = " ".join(f"{self.x(x):.3f},{self.y(y):.3f}" for x, y in points)
        polygon = tag("polygon", points=corners, class_=f"a-{kind}", data_tip=tip or None)
        box = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none", "x": 0, "y": 0}
        return tag("svg", polygon, **box, width="100%", height="100%")
