"""The vocabulary of answers, which the docstring of the package lists, and values as text."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace as replace

from stepcast import units
from stepcast.ir.tables import parse_tables
from stepcast.ir.types import Fact, Facts

if TYPE_CHECKING:
    from stepcast.ir.timeline import Timeline

DATA = Path(__file__).parents[1] / "data"
NAMES: Mapping[str, Mapping[str, str]] = parse_tables((DATA / "names.toml").read_text(encoding="utf-8"))
"""Tables of words and colours by the keys of the JSON, in the order in which they are shown."""
Show = Callable[[float], str]
"""A formatter of ``stepcast.units``."""

# The first ending of a name that fits decides the unit; a comma after a name separates the thousands of a count.
FORMATS: Mapping[str, Callable[..., str]] = {
    "_bytes_per_s": units.format_rate,
    "_s": units.format_seconds,
    "bytes": units.format_bytes,
    "share": units.format_percent,
    "abs_error": units.format_percent,
    "mfu": units.format_percent,
    "goodput": units.format_percent,
    "reached": units.format_percent,
    ",": units.format_count,
}


def format_by_name(name: str, value: object) -> str:
    """Return a value in the unit that its name ends in, and ``-`` for none."""
    if value is None:
        return "-"
    return next((show for ending, show in FORMATS.items() if name.endswith(ending)), str)(value)


class Shown(Enum):
    """The places in which a figure or a part appears."""

    ALWAYS = auto()
    DETAIL = auto()  # on the page, and in text with --verbose
    TEXT = auto()
    PAGE = auto()


class Mood(Enum):
    """The judgement that colours a figure on a page."""

    NEUTRAL = ""
    GOOD = "good"
    BAD = "bad"


class HeadlineInterval(NamedTuple):
    """An interval around the number of a headline; *words* name it."""

    low: float
    value: float
    high: float
    low_text: str
    high_text: str
    words: str


class Headline(Struct, frozen=True):
    """The number that was asked for; *about* says what it describes, the first words strongest."""

    number: str
    unit: str
    about: Sequence[str]
    band: HeadlineInterval | None = None


class Figure(Struct, frozen=True):
    """A key figure; *line* is its text where that is not the value and the note with a comma."""

    name: str
    value: str
    note: str = ""
    line: str = ""
    mood: Mood = Mood.NEUTRAL
    shown: Shown = Shown.ALWAYS

    @property
    def text(self) -> str:
        return self.line or (f"{self.value}, {self.note}" if self.note else self.value)


def text_line(name: str, line: str) -> Figure:
    """Return a figure that is a sentence, which no card has room for."""
    return Figure(name, "", line=line, shown=Shown.TEXT)


class PartOptions(Struct, frozen=True, kw_only=True):
    """The first sentence of the section of a part on a page, and where and how widely it is shown."""

    lead: str = ""
    wide: bool = False
    shown: Shown = Shown.ALWAYS
    above: str = ""  # a sentence above the part in text


class Part(PartOptions, frozen=True):
    """A part of an answer, with its title."""

    title: str


class Cell(NamedTuple):
    """A cell of a table: its text, and the value that the column is sorted by; *code* are options to type."""

    text: str
    key: object = None
    code: bool = False


Source = str | Callable[[Facts], object] | tuple[str, Callable[[Facts], object]]
"""The key of a value, whose ending decides its unit; or a function of the row, and the key to sort by."""


class Table(Part, frozen=True):
    """Rows under heads; *most_lines* of them appear in text."""

    heads: Sequence[str]
    cells: Sequence[Sequence[Cell]]
    caption: str = ""
    most_lines: int | None = None
    sortable: bool = False
    ids: Sequence[object] | None = None
    is_shown_empty: bool = False  # in text, its heads alone
    uncut: Sequence[int] = ()  # columns that text never shortens
    note: str = ""  # a line below the table in text
    narrow: "Table | None" = None  # the table for terminals that this one is too wide for


def columns(spec: str, **sources: Source) -> dict[str, Source]:
    """Return the columns of a table from words such as ``stage busy=busy_s slowdown=factor:.3f``.

    A word is a head and the key of its values, or both in one, and the format where their name does not decide it, of
    Python or of FORMS; a question mark leaves cells without a value blank. A dot leads to a key within a value, a slash
    divides two, and ``{factor:.2f}_x`` is a sentence, which is sorted by its first value unless it begins with ~.
    Underscores in heads and sentences are blanks. *sources* are those of heads that take a function.
    """
    pairs = (word.partition("=") for word in spec.split())
    return {head.rstrip(",").replace("_", " "): sources.get(head) or key or head for head, _, key in pairs}


def columns_by_key(spec: str, **sources: Source) -> dict[str, tuple[str, Source]]:
    """Return the head and the source of each of these columns, by the key of its values."""
    named = columns(spec, **sources).items()
    keys = (str(source[0] if isinstance(source, tuple) else source) for _, source in named)
    return {key.partition(":")[0].rstrip(","): column for key, column in zip(keys, named, strict=True)}


def table_of(title: str, rows: Iterable[Facts], columns: Mapping[str, Source], **options: Fact) -> Table:
    """Return the table of *rows* with the heads and sources of *columns*."""
    cells = [[cell_of(row, source) for source in columns.values()] for row in rows]
    return Table(title, list(columns), cells, **options)


def plain_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]], **options: Fact) -> Table:
    """Return the table of rows whose cells are text already."""
    return Table(title, heads, [[Cell(str(cell)) for cell in row] for row in rows], **options)


KEY = re.compile("[{:}]")


def cell_of(row: Facts, source: Source) -> Cell:
    """Return the cell of a row: its text, and the value that it is sorted by."""
    if isinstance(source, str) and "{" in source:
        words = say(re.sub(r"_(?![^{]*})", " ", source).lstrip("~"), row)
        return Cell(words or "-", None if "~" in source else find_value(row, KEY.split(source)[1]))
    if isinstance(source, str):
        path, _, form = source.partition(":")
        value = find_value(row, path)
        if value is None:
            return Cell("" if form.endswith("?") else "-")
        over, _, under = path.partition("/")
        return Cell(show_value(path, form.rstrip("?"), value, row), find_value(row, over) if under.isupper() else value)
    name, show = source if isinstance(source, tuple) else ("", source)
    value = show(row)
    return value if isinstance(value, Cell) else Cell(str(value), row.get(name) if name else None)


UNITS = {
    "GBIT": units.GB / 8,
    **{name: vars(units)[name] for name in ("MS", "US", "HOUR", "GB", "TB", "GIB", "TFLOPS")},
}
"""Units by which sentences and columns divide values."""


def find_value(facts: Facts, path: str) -> Fact:
    """Return the value at ``a.b`` of *facts*, the quotient ``a/b`` or the number ``#a`` of entries; None if unknown.

    A divisor may be a unit in capitals, as in ``size_bytes/GIB``.
    """
    first, divided, second = path.partition("/")
    if divided:
        over, under = find_value(facts, first), UNITS[second] if second.isupper() else find_value(facts, second)
        return None if over is None or under is None else over / (under or 1.0)
    value: Fact = facts
    for key in path.strip("#,").split("."):
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, Mapping) else None
    return len(value) if path.startswith("#") and value is not None else value


def show_value(path: str, form: str, value: Fact, facts: Facts) -> str:
    """Return a value in its form, or else in the unit of its name."""
    if form == "money":
        return units.format_money(value, find_value(facts, ".".join([*path.split(".")[:-1], "currency"])))
    if not form and "/" not in path:
        return format_by_name(path, value)
    return FORMS[form or "%"](value) if form in ("", *FORMS) else format(value, form)


def say(template: str, facts: Facts) -> str | None:
    """Return a sentence with values in place of words in braces; None if one outside of brackets is unknown."""
    pieces = re.split(r"[\[\]]", template)
    texts: list[str | None] = [*pieces]
    for index in (*range(0, len(pieces), 2), *range(1, len(pieces), 2)):
        texts[index] = _fill(pieces[index], facts)
        if texts[index] is None and not index % 2:
            return None
    return "".join(filter(None, texts))


def _fill(template: str, facts: Facts) -> str | None:
    pieces = re.split("[{}]", template)
    for index in range(1, len(pieces), 2):
        place, has_default, default = pieces[index].partition("?")
        path, _, form = place.partition(":")
        value = find_value(facts, path)
        is_unknown = value is None or value == "" or (form == "!" and not value)
        if is_unknown and not has_default:
            return None
        pieces[index] = default if is_unknown else show_value(path, form, value, facts)
    return "".join(pieces)


class Share(NamedTuple):
    """A part of a total: the kind that decides its colour, its name and its amount."""

    kind: str
    name: str
    amount: float


class BarPiece(NamedTuple):
    """A piece of a bar, in the units of its chart; *kind* decides its colour."""

    kind: str
    length: float
    tip: str = ""


class Bar(NamedTuple):
    """A row of bars: pieces one after the other from *start*, then the value and a note after it."""

    label: str
    pieces: Sequence[BarPiece]
    value: str = ""
    note: str = ""
    strong: bool = False
    start: float = 0.0
    is_term: bool = False  # the label, which a page explains

    @property
    def length(self) -> float:
        return sum(piece.length for piece in self.pieces)


class Bars(Part, frozen=True):
    """Bars on one scale from zero to *most*.

    *kinds* are the colours and their words; *table* is the same in text, where text has it.
    """

    bars: Sequence[Bar]
    kinds: Mapping[str, str]
    most: float
    show: Show = units.format_seconds
    unit: float = 1.0  # of the ticks
    marks: Sequence[tuple[str, float, str]] = ()  # kind, place, tip: lines across all bars
    table: Table | None = None
    commands: Sequence[str] = ()  # of the bars, folded below them on a page
    note: str = ""  # a sentence below them on a page
    in_pairs: bool = False
    most_bars: int = 64


def stack(
    label: str,
    amounts: Mapping[str, float],
    kinds: Mapping[str, str],
    value: str,
    note: str = "",
    show: Show = units.format_seconds,
) -> Bar:
    """Return the bar of an amount of each kind; *kinds* are the words of its tips."""
    known = ((kind, amount) for kind, amount in amounts.items() if amount > 0)
    pieces = [BarPiece(kind, amount, f"{kinds.get(kind, label)}: {show(amount)}") for kind, amount in known]
    return Bar(label, pieces, value, note)


SMALLEST_SHARE = 5e-4  # of a breakdown, for a bar of its own
MOST_TIMES = 32
BAR_WIDTH = 24  # characters of a whole, in text


def breakdown(title: str, parts: Iterable[Share], total: float, whole: str = "step", **options: Fact) -> Bars:
    """Return parts that sum to *total*, the time of *whole*: one behind the other, in text with their shares."""
    show: Show = options.get("show", units.format_seconds)
    bars, rows, start = list[Bar](), [], 0.0
    for kind, name, amount in parts:
        if amount > 0:
            share = amount / (total or 1.0)
            texts = show(amount), units.format_percent(share)
            rows.append((name, *texts, "#" * round(min(share, 1) * BAR_WIDTH)))
            if amount >= SMALLEST_SHARE * total:
                piece = BarPiece(kind, amount, f"{name}: {texts[0]}, {texts[1]} of the {whole}")
                bars.append(Bar(name, [piece], *texts, start=start, is_term=True))
                start += amount
    bars.append(Bar(whole, [piece for bar in bars for piece in bar.pieces], show(total), "100 %", strong=True))
    listed = plain_table(title, (within_sentence(title), "time", "share", ""), rows, is_shown_empty=True)
    return Bars(title, bars, {}, total, table=listed, **options)


def within_sentence(title: str) -> str:
    """Return a title as words within a sentence: its first letter small, unless it begins an acronym."""
    return title if title[:2].isupper() else title[:1].lower() + title[1:]


def bars_of_times(title: str, times_s: Mapping[str, float], heads: Sequence[str], **options: Fact) -> Bars | None:
    """Return one bar per name, longest first, with its share of the sum; None without any."""
    if not times_s:
        return None
    total_s = sum(times_s.values()) or 1.0
    rows = {name: (name, units.format_seconds(s), units.format_percent(s / total_s)) for name, s in times_s.items()}
    longest_first = sorted(times_s.items(), key=lambda item: -item[1])
    bars = [stack(name, {"compute": seconds}, {}, *rows[name][1:]) for name, seconds in longest_first]
    listed = plain_table(title, heads, [row[: len(heads)] for row in rows.values()])
    return Bars(title, bars, {}, longest_first[0][1], table=listed, most_bars=MOST_TIMES, **options)


class ValuePair(NamedTuple):
    """Two values of one quantity, and how far they differ."""

    name: str
    first: float
    second: float
    difference: str
    note: str = ""


def pair_of_change(name: str, before_s: float, after_s: float) -> ValuePair:
    """Return a time before and after a change."""
    return ValuePair(name, before_s, after_s, signed_seconds(after_s - before_s))


def bars_of_pairs(
    title: str, pairs: Sequence[ValuePair], sides: Sequence[str], heads: Sequence[str], most: int = 64
) -> Bars:
    """Return two bars per row, one above the other; *sides* name them on the page, *heads* in text."""
    bars, rows, kinds = list[Bar](), [], {"first": sides[0], "second": sides[1]}
    for name, first_s, second_s, difference, note in pairs:
        texts = first, second = units.format_seconds(first_s), units.format_seconds(second_s)
        rows.append((name, *texts, difference, note)[: len(heads)])
        upper = BarPiece("first", first_s, f"{name}, {sides[0]}: {first}")
        lower = BarPiece("second", second_s, f"{name}, {sides[1]}: {second}")
        bars += [Bar(name, [upper], difference, "" if note == "-" else note), Bar("", [lower])]
    left_out = len(pairs) - most
    longest = max((piece.length for bar in bars[: 2 * most] for piece in bar.pieces), default=0.0)
    note = f"{left_out} more are in the JSON." if left_out > 0 else ""
    on_page: Facts = {"note": note, "in_pairs": True, "most_bars": 2 * most}
    return Bars(title, bars, kinds, longest, table=plain_table(title, heads, rows), **on_page)


EXPOSURE_KINDS = {"exposed": "exposed: the step waits for it", "hidden": "hidden behind computation"}


def bars_of_exposure(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    head: str = "communication",
    names: Mapping[str, str] | None = None,
    **options: Fact,
) -> Bars:
    """Return the seconds of communication by group: exposed, then hidden; on the page the most exposed first."""
    bars, rows, show = list[Bar](), [], units.format_seconds
    for group, seconds in groups.items():
        total_s, exposed_s, name = seconds["total"], seconds["exposed"], (names or {}).get(group, group)
        hidden_s = max(0.0, total_s - exposed_s)
        hidden = units.format_percent(hidden_s / total_s) if total_s else "-"
        rows.append((group, show(total_s), show(exposed_s), hidden))
        if total_s > 0:
            amounts = {"exposed": exposed_s, "hidden": hidden_s}
            pieces = [BarPiece(kind, size, f"{name}, {kind}: {show(size)}") for kind, size in amounts.items()]
            bars.append(Bar(name, pieces, show(exposed_s), f"{hidden} hidden"))
    bars.sort(key=lambda bar: -bar.pieces[0].length)
    longest = max((seconds["total"] for seconds in groups.values()), default=0.0)
    listed = plain_table(title, (head, "total", "exposed", "hidden"), rows)
    return Bars(title, bars, EXPOSURE_KINDS, longest, table=listed, **options)


class HeatMap(Part, frozen=True):
    """Shares between 0 and 1 over *span_s* seconds, one row per name."""

    rows: Sequence[tuple[str, Sequence[float]]]
    span_s: float
    key: str


class ShadedGrid(NamedTuple):
    """Values by a row and a column, each shaded by its share of the largest; None where there is none."""

    name: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]


class GridCharts(Part, frozen=True):
    """Grids of two settings against each other."""

    grids: Sequence[ShadedGrid]
    show: Show


class Dot(NamedTuple):
    """A dot of a scatter plot; *row* is the row of a table that lights up with it."""

    x: float
    y: float
    kind: str
    tip: str = ""
    radius: float = 4.0
    row: object = None
    label: str = ""


class Line(NamedTuple):
    """Straight pieces between points, or with *area* the polygon they enclose."""

    points: Sequence[tuple[float, float]]
    kind: str
    area: bool = False
    tip: str = ""


class Axis(NamedTuple):
    """An axis of a scatter plot; with a logarithmic scale its ticks are powers of *base*."""

    low: float
    high: float
    show: Show
    title: str
    base: int = 10


class Scatter(Part, frozen=True):
    """Lines and dots, in this order, within two axes."""

    x: Axis
    y: Axis
    marks: Sequence[Dot | Line]
    label: str
    legend: Sequence[tuple[str, str]] = ()
    log: bool = False
    square: bool = False
    key: str | None = None
    note: str = ""


class TimelineChart(Part, frozen=True):
    """Every span of a run; *what* says whose they are."""

    timeline: "Timeline"
    what: str = ""


def timeline_chart(timeline: "Timeline | None", what: str = "") -> TimelineChart | None:
    """Return the chart of a timeline, None where there is none to see."""
    if timeline is None or not len(timeline):
        return None
    return TimelineChart("Timeline", timeline, what, wide=True, shown=Shown.PAGE)


class FactList(Part, frozen=True):
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


class Remark(NamedTuple):
    """A sentence that begins with a strong word, and the evidence for it."""

    strong: str
    words: str
    evidence: Sequence[str] = ()


class Remarks(Part, frozen=True):
    """Sentences with their evidence; *none* is shown if there are none."""

    remarks: Sequence[Remark]
    none: str = ""


class Commands(Part, frozen=True):
    """Command lines, with their numbers unless there is one alone."""

    commands: Sequence[str]
    numbered: bool = True


class Columns(Part, frozen=True):
    """Parts in two columns of a page; text begins with the title and the lead where it is *headed*."""

    left: Sequence[Part | None]
    right: Sequence[Part | None]
    headed: bool = False


class View(Struct, frozen=True):
    """One answer; *asked* is the question it answers, *facts* is its JSON."""

    title: str
    headline: Headline
    figures: Sequence[Figure]
    parts: Sequence[Part | None]
    facts: Facts
    asked: Sequence[tuple[str, object]] = ()
    config: Sequence[str] = ()  # what became of the keys of a configuration file
    assumptions: Sequence[str] = ()  # the defaults that the answer used
    warnings: Sequence[str] = ()


def signed_seconds(seconds: float) -> str:
    """Return a difference of times with its sign."""
    seconds = round(seconds, 11)  # sums of the same times differ by less
    return ("+" if seconds > 0 else "-" if seconds < 0 else "") + units.format_seconds(abs(seconds))


FORMS: Mapping[str, Callable[..., str]] = {
    "%": units.format_percent,
    "+%": units.format_change,
    "s": units.format_seconds,
    "+s": signed_seconds,
    "x": "{:.2f}x".format,
    "duration": units.format_duration,
    "days": lambda days: units.format_duration(days * units.DAY),
    "mwh": units.format_energy,
    "yes": lambda value: "yes" if value else "no",
    "bytes": units.format_bytes,
    "rate": units.format_rate,
    "short": units.format_short_count,
    "amount": units.format_amount,
    "%0": lambda share: units.format_percent(share, 0),
    "plural": lambda count: "" if count == 1 else "s",
    "micro-batches": lambda count: f"{count:,} micro-batch{'' if count == 1 else 'es'}",
    "!": lambda value: "",  # known and not zero
}
"""Formats in columns and sentences, besides those of Python and of money."""
