"""The page of a sweep: how models scale, which settings are fast, and the best rows."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from stepcast.units import DAY, GIB, format_bytes, format_duration, format_money, format_percent, format_seconds
from stepcast.views.blocks import answer, card, pairs, sortable_table
from stepcast.views.cells import Column
from stepcast.views.charts import ChartFrame, legend
from stepcast.views.document import About, Page, Section
from stepcast.views.markup import Child, Markup, join, tag

Facts = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
# Colours that are told apart; more lines than these hide each other.
KINDS = ("compute", "tp", "dp", "ep", "pp", "optimizer", "cp", "host")
MOST_MAPS = 6
# Columns of the table of rows, shown if a row has a value; with the head of each.
COLUMNS: Mapping[str, tuple[str, Column]] = {
    "step_s": ("step", "step_s"),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", "tokens_per_s_per_gpu,"),
    "mfu": ("MFU", "mfu"),
    "memory_bytes": ("memory", "memory_bytes"),
    "days": ("days", ("days", lambda row: "-" if row["days"] is None else f"{row['days']:,.1f}")),
    "gpu_hours": ("GPU-hours", "gpu_hours,"),
    "cost": ("cost", ("cost", lambda row: _cost(row))),
    "goodput": ("goodput", "goodput"),
    "state": ("state", "state"),
}


def sweep_page(found: Facts, about: About) -> Page:
    """Of the facts of a sweep's store."""
    sections = [
        *_scaling(found["scaling"], found["kinds"]),
        *_maps(found["heat"], found["kinds"]),
        *_trade(found["rows"], found["words"], found["kinds"]),
        *_ranked(found["rows"], found["words"]),
        *_errors(found["common_errors"]),
    ]
    title = f"{found['answered']:,} points: {' '.join(_best(found))}"
    return Page(title, _headline(found), sections, about, found)


def _headline(found: Facts) -> Markup:
    cards = [
        card("Points", f"{found['points']:,}", f"{found['left']:,} not answered yet" if found["left"] else ""),
        card("Fit", "not checked" if found["fit"] is None and found["rows"] else f"{found['fit'] or 0:,}"),
        card("Errors", f"{found['errors']:,}", "", "bad" if found["errors"] else ""),
    ]
    if found["out_of_time"]:
        cards.append(card("Out of time", f"{found['out_of_time']:,}", "best so far", "bad"))
    if found["least_days"] is not None:
        cards.append(card("Shortest run", format_duration(found["least_days"] * DAY)))
    if found["least_cost"] is not None:
        cards.append(card("Lowest cost", format_money(found["least_cost"], found["currency"], short=True)))
    if found["best_mfu"] is not None:
        cards.append(card("Best MFU", format_percent(found["best_mfu"])))
    if found["least_step_s"] is not None:
        cards.append(card("Steps", format_seconds(found["least_step_s"]), f"to {format_seconds(found['most_step_s'])}"))
    about = join((tag("strong", found["folder"]), tag("span", f"varied: {_words(found['words'])}")))
    return answer(*_best(found), about, cards=cards)


def _best(found: Facts) -> tuple[str, str]:
    """Return the answer of the page: a number, or why there is none, and what it is."""
    if best := found["best_tokens_per_s_per_gpu"]:
        return f"{best:,.0f}", "tokens per second and GPU at best"
    if found["least_days"] is not None:
        number, _, unit = format_duration(found["least_days"] * DAY).partition(" ")
        return number, f"{unit} at best"
    if found["rows"]:
        number, _, unit = format_seconds(found["least_step_s"]).partition(" ")
        return number, f"{unit} per step at best"
    if found["out_of_time"]:
        return "Nothing", "found before the time was over"
    return ("Nothing", "fits") if found["fit"] is not None else ("Nothing", "could be answered")


def _words(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in names) or "nothing"


def _cost(row: Mapping[str, Any]) -> str:
    return "-" if row["cost"] is None else format_money(row["cost"], row.get("currency"))


def _kind(row: Mapping[str, Any], kinds: Sequence[str]) -> str:
    return " on ".join(str(row[name]) for name in kinds) or "all points"


def _scaling(rows: Rows, kinds: Sequence[str]) -> list[Section]:
    """Tokens per second and GPU against GPUs: flat is ideal."""
    lines = [(name, list(each)) for name, each in groupby(rows, key=lambda row: _kind(row, kinds))]
    lines = sorted(lines, key=lambda line: -max(row["tokens_per_s_per_gpu"] for row in line[1]))
    if not lines:
        return []
    sections = []
    for first in range(0, len(lines), len(KINDS)):
        some = lines[first : first + len(KINDS)]
        every = [row for _, each in some for row in each]
        speeds = [row["tokens_per_s_per_gpu"] for row in every]
        counts = [row["gpus"] for row in every]
        low, high = min(speeds) * 0.8, max(speeds) * 1.25
        frame = ChartFrame(
            min(counts) * 0.9, max(counts) * 1.1, low, high, _whole, _whole, "GPUs", "tokens/s/GPU", log=True
        )
        drawn: list[Child] = []
        for kind, (name, each) in zip(KINDS, some, strict=False):
            places = [(row["gpus"], row["tokens_per_s_per_gpu"]) for row in each]
            drawn.append(frame.line(places, "ideal"))
            drawn += [frame.dot(x, y, kind, f"{name}, {x:,} GPUs: {y:,.0f} tokens/s/GPU", 5) for x, y in places]
        key = legend(zip(KINDS, (name for name, _ in some), strict=False))
        chart = frame.draw(drawn, label="Tokens per second and GPU against GPUs")
        title = "How they scale" if not first else f"How they scale, {first // len(KINDS) + 1}"
        lead = "The best that fits at each number of GPUs; flat would be ideal. Both axes are logarithmic."
        sections.append(Section(title, join((key, chart)), lead, wide=True))
    return sections


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _maps(heat: Facts | None, kinds: Sequence[str]) -> list[Section]:
    """Two settings against each other; the darker a cell, the nearer to the best of its map."""
    if heat is None:
        return []
    names = list(dict.fromkeys(_kind(cell, kinds) for cell in heat["cells"]))
    shown = [_map(heat, kinds, name) for name in names[:MOST_MAPS]]
    across, down = heat["across"].replace("_", "-"), heat["down"].replace("_", "-")
    lead = f"The most tokens/s/GPU of what fits, {across} across and {down} down; empty: nothing fits."
    if len(names) > MOST_MAPS:
        lead += f" The first {MOST_MAPS} of {len(names)}."
    return [Section("Which settings are fast", tag("div", shown, class_="maps"), lead, wide=True)]


def _map(heat: Facts, kinds: Sequence[str], name: str) -> Markup:
    speeds = {
        (cell[heat["across"]], cell[heat["down"]]): cell["tokens_per_s_per_gpu"]
        for cell in heat["cells"]
        if _kind(cell, kinds) == name
    }
    best = max(speeds.values(), default=1.0)
    head = tag(
        "tr",
        tag("th", f"{_short(heat['down'])} \\ {_short(heat['across'])}"),
        [tag("th", _cell(x), scope="col") for x in heat["x"]],
    )
    body = [
        tag("tr", tag("th", _cell(y), scope="row"), [_shade(speeds.get((x, y)), best) for x in heat["x"]])
        for y in heat["y"]
    ]
    made = tag("table", tag("caption", name), tag("thead", head), tag("tbody", body), class_="heat")
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=name)


def _shade(speed: float | None, best: float) -> Markup:
    if speed is None:
        return tag("td", "")
    tenth = max(0, min(9, int(10 * speed / best)))
    return tag("td", f"{speed:,.0f}", class_=f"number h-{tenth}", data_tip=f"{speed / best:.0%} of the best here")


def _short(name: str) -> str:
    return name.replace("_", "-")


def _word(name: str) -> Column:
    return name, lambda row: _cell(row.get(name))


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _trade(rows: Rows, words: Sequence[str], kinds: Sequence[str]) -> list[Section]:
    """Speed against memory of the fastest rows."""
    rows = [row for row in rows if row["memory_bytes"] and row["tokens_per_s_per_gpu"]]
    if len(rows) < 2:
        return []
    sizes = [row["memory_bytes"] / GIB for row in rows]
    speeds = [row["tokens_per_s_per_gpu"] for row in rows]
    frame = ChartFrame(
        0.0,
        max(sizes) * 1.05,
        0.0,
        max(speeds) * 1.08,
        lambda size: f"{size:g}",
        _whole,
        "GiB of a GPU",
        "tokens/s/GPU",
    )
    names = list(dict.fromkeys(_kind(row, kinds) for row in rows))[: len(KINDS)]
    colour = dict(zip(names, KINDS, strict=False))
    dots = [
        frame.dot(size, speed, colour.get(_kind(row, kinds), "hidden"), _tip(row, words), 4, data_row=row["position"])
        for row, size, speed in zip(rows, sizes, speeds, strict=True)
    ]
    front = frame.line(_front(sorted(zip(sizes, speeds, strict=True))), "front")
    chart = frame.draw(front, dots, label="Tokens per second and GPU against memory", key="pareto")
    lead = f"The {len(rows):,} fastest that fit. Upper left is better; nothing beats a point on the line."
    key = legend([(kind, name) for name, kind in colour.items()])
    return [Section("Speed against memory", join((key, chart)), lead, wide=True)]


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other one of less memory outruns."""
    kept: list[tuple[float, float]] = []
    for size, speed in points:
        if not kept or speed > kept[-1][1]:
            kept.append((size, speed))
    return kept


def _tip(row: Mapping[str, Any], words: Sequence[str]) -> str:
    told = ", ".join(f"{_short(name)} {row[name]}" for name in words if row.get(name) is not None)
    return f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {format_bytes(row['memory_bytes'])}: {told}"


def _ranked(rows: Rows, words: Sequence[str]) -> list[Section]:
    if not rows:
        return []
    ids = [row["position"] for row in rows]
    told = {name: column for name, column in COLUMNS.items() if any(row[name] is not None for row in rows)}
    heads = [*map(_short, words), *(head for head, _ in told.values())]
    columns = (*map(_word, words), *(column for _, column in told.values()))
    made = sortable_table(heads, rows, columns, "Fastest first; click a column header to sort", ids)
    fit = "that fit" if any(row["fits"] for row in rows) else "rows"
    return [Section(f"The fastest {fit}", made, wide=True)]


def _errors(errors: Rows) -> list[Section]:
    if not errors:
        return []
    listed = [(f"{each['points']:,} points", each["error"]) for each in errors]
    return [Section("What could not be answered", pairs(listed), wide=True)]
