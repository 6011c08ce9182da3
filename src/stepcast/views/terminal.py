"""A view as text that fits a terminal."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from stepcast.units import format_seconds
from stepcast.views import view as ui
from stepcast.views.text import GAP, bullet, facts, table, visible

# From idle to the capacity of a link, in ten steps that any terminal shows.
SHADES = " .:-=+*#%@"
MOST_COMMANDS = 3


def render_text(view: ui.View, width: int, verbose: bool = True) -> str:
    """Return the question, the key figures, the parts and the defaults of an answer, a blank line between."""
    figures = [(figure.name, figure.text) for figure in view.figures if figure.shown is not ui.Shown.PAGE]
    blocks = [facts(view.asked, width) if view.asked else "", facts(figures, width) if figures else ""]
    hidden = []
    for part in view.parts:
        if part is None or part.shown is ui.Shown.PAGE:
            continue
        text = render_part(part, width)
        if text and part.shown is ui.Shown.DETAIL and not verbose:
            hidden.append(ui.within_sentence(part.title))
        else:
            blocks.append(text)
    if hidden:
        *first, last = hidden
        blocks.append(f"--verbose adds {', '.join(first)} and {last}" if first else f"--verbose adds {last}")
    if view.assumptions:
        blocks.append("\n".join(["defaults used:", *(bullet(note, "  - ", width) for note in view.assumptions)]))
    blocks.append("\n".join(bullet(note, "config: ", width) for note in view.config))
    return "\n\n".join(block for block in blocks if block)


def render_part(part: ui.Part, width: int) -> str:
    """Return a part as text, under its title; empty where it has nothing to show, or a picture alone."""
    writer = WRITERS.get(type(part))
    text = writer(part, width) if writer else ""
    if text and part.above:
        text = "\n".join([bullet(part.above, "", width), text])
    return text if not text or names_part(part.title, text.partition("\n")[0]) else f"{part.title}\n{text}"


def names_part(title: str, line: str) -> bool:
    """Return True if a line of text names a part: it has the words of the title, in the singular or the plural."""
    return _singular(title) in _singular(line)


def _singular(text: str) -> str:
    return " ".join(re.sub(r"ies$", "y", re.sub(r"sses$", "ss", word)).rstrip("s") for word in text.lower().split())


def _table(part: ui.Table, width: int) -> str:
    if not part.cells and not part.is_shown_empty:
        return ""
    lines = [[cell.text for cell in row] for row in part.cells[: part.most_lines]]
    text = table(part.heads, lines, width, whole=part.uncut)
    if part.narrow and max(map(len, text.split("\n"))) > width:
        return _table(part.narrow, width)
    left_out = len(part.cells) - len(lines)
    more = f"... and {left_out:,} more (--json)" if left_out else ""
    return "\n".join(line for line in (text, more, part.note) if line)


def _heat_map(part: ui.HeatMap, width: int) -> str:
    """Return a line per row: how much is used, from the start to the end of the span."""
    if not part.rows:
        return ""
    label = max(len(name) for name, _ in part.rows)
    room = max(10, width - label - len(GAP) - 2)
    lines = [f"{name.ljust(label)}{GAP}|{shade_line(shares, room)}|" for name, shares in part.rows]
    length = len(shade_line(part.rows[0][1], room))
    axis = " " * (label + len(GAP) + 1) + "0" + format_seconds(part.span_s).rjust(length - 1)
    return "\n".join([f"{part.key}, from 0 to 100 %: {SHADES.strip()}", *lines, axis])


def shade_line(shares: Sequence[float], room: int) -> str:
    """Return one character for each of *room* slices: the shade of the largest share in it."""
    room = min(room, len(shares))
    bounds = [index * len(shares) // room for index in range(room + 1)] if room else [0]
    largest = [max(shares[start:stop]) for start, stop in pairwise(bounds)]
    return "".join(SHADES[shade(share, len(SHADES))] for share in largest)


def shade(share: float, steps: int) -> int:
    """Return which of *steps* shades: the first for no use at all, the last for more than 94 %."""
    return 0 if share <= 0 else max(1, min(steps - 1, int(share * (steps - 1) + 0.5)))


def _remarks(part: ui.Remarks, width: int) -> str:
    lines = []
    for remark in part.remarks:
        lines.append(bullet(f"{remark.strong}{remark.words}", "", width))
        lines += [bullet(text, "  - ", width) for text in remark.evidence]
    return "\n".join(lines)


def _commands(part: ui.Commands, width: int) -> str:
    lines = [visible(command) for command in part.commands[:MOST_COMMANDS]]
    if part.numbered:
        lines = [f"{number:>3}  {line}" for number, line in enumerate(lines, 1)]
    if left := len(part.commands) - len(lines):
        lines.append(f"     and {left} more with --html or --json")
    return "\n".join([f"{ui.within_sentence(part.title)}:", *lines])


def _columns(part: ui.Columns, width: int) -> str:
    shown = [child for child in (*part.left, *part.right) if child and child.shown is not ui.Shown.PAGE]
    heading = "\n".join([part.title, *([bullet(part.lead, "  ", width)] if part.lead else [])]) if part.headed else ""
    return "\n\n".join(text for text in (heading, *(render_part(child, width) for child in shown)) if text)


WRITERS: dict[type[ui.Part], Callable[..., str]] = {
    ui.Table: _table,
    ui.Bars: lambda part, width: _table(part.table, width) if part.table else "",
    ui.HeatMap: _heat_map,
    ui.FactList: lambda part, width: facts(part.pairs, width),
    ui.Remarks: _remarks,
    ui.Commands: _commands,
    ui.Columns: _columns,
}
