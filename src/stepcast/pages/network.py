"""The page of a step's network: a heat map of its links over time, and who was slowed down by whom."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.pages.blocks import about_line, answer, card, table
from stepcast.pages.charts import Piece, Row, axis_row, bars, legend
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Child, Markup, join, tag
from stepcast.report.cells import cells
from stepcast.report.network import TIER, Kind, kind_cells, kinds_of, link_use, shade, slower, used_tiers
from stepcast.units import format_bytes, format_percent, format_seconds

Facts = Mapping[str, Any]
CELL_HEIGHT = 16
STEPS = 10
# Sharing links costs so much of a step that it is worth a look.
COSTLY = 0.01
TIERS_LEAD = "Use of the busiest link of each tier, from the start of the step to its end."
LINKS_LEAD = "A line for each link, the busiest first. Darker is more use; red is more than 94 %."


def network_page(found: Facts, about: About) -> Page:
    step_s, tiers = found["step_s"], used_tiers(found)
    tier_lines = [(each["tier"], each["busiest_over_time"]) for each in tiers]
    link_lines = [(_link_name(each), each["share_over_time"]) for each in found["hottest"]]
    sections = [
        *_map("Tiers over time", tier_lines, step_s, TIERS_LEAD),
        *_map("The busiest links over time", link_lines, step_s, LINKS_LEAD),
        *_tiers(tiers),
        *_hottest(found["hottest"], step_s),
        *_operations(kinds_of(found["operations"])),
    ]
    title = f"{format_seconds(step_s)} per step: sharing links costs {slower(found) * 100:.1f} %"
    return Page(title, _headline(found), sections, about, found, found["assumptions"], found["warnings"])


def _headline(found: Facts) -> Markup:
    lost = f"sharing links costs {slower(found) * 100:.1f} %"
    cards = [
        card("Without sharing", format_seconds(found["alone_step_s"]), lost),
        card("Fast engine", format_seconds(found["fast_step_s"]), "times each collective by itself"),
        card("Links", f"{found['links']:,}", found["routing"]),
    ]
    if found["hottest"]:
        first = found["hottest"][0]
        note = link_use(first, found["step_s"])
        cards.append(card("Busiest link", first["link"], note, "bad" if slower(found) >= COSTLY else ""))
    what = found.get("model") or found.get("workload") or ""
    about = about_line(what, f"{found['gpus']:,} GPUs of {found['cluster']}")
    return answer(format_seconds(found["step_s"]), "per step with shared links", about, cards=cards)


def _link_name(link: Facts) -> str:
    others = link["alike"] - 1
    return f"{link['link']}, and {others:,} alike" if others else str(link["link"])


def _map(title: str, lines: Sequence[tuple[str, Sequence[float]]], step_s: float, lead: str) -> list[Section]:
    """Cells from left to right over the step, neighbours of one shade drawn as one."""
    if not lines or step_s <= 0:
        return []
    rows = [_map_row(name, shares, step_s) for name, shares in lines]
    below = axis_row(step_s, format_seconds, about=4)
    key = tag(
        "p", [_shade_key(at) for at in range(1, STEPS)], tag("span", "from 0 to 100 % use"), class_="shades"
    )
    return [Section(title, join((key, tag("ul", rows, below, class_="rows"))), lead, wide=True)]


def _shade_key(at: int) -> Markup:
    cell = tag("rect", width=12, height=12, class_=f"u-{at}")
    return tag("svg", cell, width=12, height=12, aria_hidden="true")


def _map_row(name: str, shares: Sequence[float], step_s: float) -> Markup:
    drawn_cells: list[Child] = []
    wide = 100 / len(shares)
    for start, stop in _runs([shade(share, STEPS) for share in shares]):
        most = max(shares[start:stop])
        if most <= 0:
            continue
        times = [format_seconds(step_s * at / len(shares)) for at in (start, stop)]
        drawn_cells.append(
            tag(
                "rect",
                x=f"{start * wide:.3f}%",
                y=0,
                width=f"{(stop - start) * wide:.3f}%",
                height=CELL_HEIGHT,
                class_=f"u-{shade(most, STEPS)}",
                data_tip=f"{name}, {times[0]} to {times[1]}: {format_percent(most)} used",
            )
        )
    drawn = tag("svg", drawn_cells, class_="bar", width="100%", height=CELL_HEIGHT, aria_hidden="true")
    mean = format_percent(sum(shares) / len(shares))
    return tag("li", tag("span", name, class_="label"), drawn, tag("span", mean, class_="value"))


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where neighbours are equal."""
    borders = [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    return list(zip([0, *borders], [*borders, len(values)], strict=True))


def _tiers(tiers: Sequence[Facts]) -> list[Section]:
    if not tiers:
        return []
    heads = ("Tier", "Links", "Each", "Carried", "Mean use", "Peak use")
    caption = "Mean use is that of all links over the step; peak use is that of the busiest link"
    return [Section("Tiers", table(heads, cells(tiers, TIER), caption), wide=True)]


def _hottest(links: Sequence[Facts], step_s: float) -> list[Section]:
    if not links:
        return []
    names = sorted({name for each in links for name in each["users"]})
    rows = []
    for each in links:
        at, pieces, total = 0.0, [], sum(each["users"].values()) or 1.0
        for name in names:
            size = each["users"].get(name, 0.0)
            used = size / total * each["share"]
            if used > 0:
                tip = f"{each['link']}: {name} {format_bytes(size)}"
                pieces.append(Piece(kind_of(name), at, used, tip))
                at += used
        note = f"at capacity {format_percent(each['full_s'] / step_s)}"
        rows.append(Row(_link_name(each), pieces, (format_percent(each["share"]), tag("small", note))))
    key = legend([(kind_of(name), name) for name in names])
    most = max(each["share"] for each in links)
    lead = "Mean use of each link by the groups that use it, and the share of the step at capacity."
    body = Markup(key + bars(rows, most, format_percent, 0.01))
    return [Section("Who uses the busiest links", body, lead, wide=True)]


def kind_of(group: str) -> str:
    """The colour of a group: those of its family share one."""
    return next((kind for kind in ("tp", "cp", "ep", "pp", "dp") if kind in group), "other")


def _operations(kinds: Sequence[Kind]) -> list[Section]:
    if not kinds:
        return []
    lines = [kind_cells(each, "×") for each in kinds]
    keys = [
        [each.what, each.group, each.times, each.alone_s, each.took_s, each.slowdown, each.slowest]
        for each in kinds
    ]
    heads = ("Communication", "Group", "Times", "Alone", "Shared", "Slowdown", "Worst")
    caption = "Most time lost first; click a column header to sort"
    return [Section("Slowed down by shared links", table(heads, lines, caption, keys, True), wide=True)]
