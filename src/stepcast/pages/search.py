"""The page of a search: the best strategies, what they trade, and why the first is first."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.facts import CandidateFacts, band_of
from stepcast.pages.blocks import (
    about_line,
    answer,
    band,
    card,
    pairs,
    signed,
    sortable_table,
    stacked,
    timed_answer,
)
from stepcast.pages.charts import Frame, legend
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Child, Markup, join, tag
from stepcast.report.search import end_words, nothing_words, ranked_columns, slower_words, strategy_words
from stepcast.units import GIB, format_bytes, format_percent, format_seconds
from stepcast.views.step import PART_NAMES

Facts = Mapping[str, Any]
# Dots beyond so many hide each other.
MOST_DOTS = 1500


def search_page(found: Facts, about: About, simulated: Sequence[CandidateFacts] = ()) -> Page:
    """Of the facts of a search; *simulated* are all that were run."""
    rows = found["rows"]
    sections: list[Section] = []
    if rows:
        sections = [_why(found), _parts(found), _scatter(found, simulated), _ranked(found), _commands(found)]
    elif found["counts"]["complete"]:
        sections = [_nothing(found)]
    best = f"{format_seconds(rows[0]['step_s'])} per step" if rows else nothing_words(found["counts"])
    title = f"{best}: {found['model']} on {found['cluster']}"
    return Page(
        title, _headline(found), sections, about, found, found["assumptions"], found.get("warnings", ())
    )


def _headline(found: Facts) -> Markup:
    counts, rows = found["counts"], found["rows"]
    batch = f"{found['global_batch']:,} sequences of {found['seq']:,} tokens, least {found['objective']}"
    about = about_line(f"{found['model']} on {found['cluster']}", batch)
    cards = [
        card("Candidates", f"{counts['considered']:,}", f"{counts['illegal']:,} are not legal"),
        card("Do not fit", f"{counts['too_large']:,}"),
        card("Pruned by bound", f"{counts['pruned']:,}", "by their bounds"),
        card(
            "Simulated",
            f"{counts['simulated']:,}",
            "" if counts["complete"] else f"{end_words(counts)}: not complete",
        ),
    ]
    if not rows:
        first, _, rest = nothing_words(counts).capitalize().partition(" ")
        return answer(first, rest, about, cards=cards)
    best = rows[0]
    told = band_of(best)
    cards = [
        card(
            "Memory", format_bytes(best["memory_bytes"]), f"{format_bytes(best['free_bytes'])} free", "good"
        ),
        card("MFU", format_percent(best["mfu"]), f"{best['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"),
        *cards,
    ]
    drawn = band(
        told.low_s,
        best["step_s"],
        told.high_s,
        (format_seconds(told.low_s), format_seconds(told.high_s)),
        told.words,
    )
    words = join((about, tag("span", f"{best['gpus']:,} GPUs: {strategy_words(best)}", class_="layout")))
    return timed_answer(best["step_s"], "per step, the best found", words, drawn, cards)


def _why(found: Facts) -> Section:
    rows, binds, second = found["rows"], found["binds"], found["runner_up"]
    items: list[tuple[str, Child]] = [("bottleneck", binds["what"])]
    items += [(f"{name}, of the step", format_percent(share)) for name, share in binds["shares"].items()]
    equal = sum(row["equal"] for row in rows)
    if equal > 1:
        items.append(("within our error of rank 1", f"{equal} of {len(rows)}"))
    if missed := found["missed"]:
        items.append(
            (
                "faster, but does not fit",
                f"{strategy_words(missed)}: at best {format_seconds(missed['bound_s'])}, with "
                f"{format_bytes(missed['memory_bytes'])} or more",
            )
        )
    if second:
        parts = sorted(second["parts_s"].items(), key=lambda each: -abs(each[1]))[:4]
        told = ", ".join(f"{name} {signed(seconds)}" for name, seconds in parts if abs(seconds) >= 1e-6)
        items.append((f"rank {second['rank']}", f"{slower_words(second)}: {told or 'no part differs'}"))
    return Section(
        "Why rank 1 wins",
        pairs(items),
        "Ranks marked = are within our error of rank 1, on as many GPUs.",
    )


def _parts(found: Facts) -> Section:
    rows = found["rows"]
    kinds = dict(PART_NAMES)
    shown = [
        (f"{row['rank']}{'=' if row['equal'] else ''}", row["breakdown_s"], format_seconds(row["step_s"]))
        for row in rows[:16]
    ]
    most = max(row["step_s"] for row in rows[:16])
    return Section(
        "Where their steps go",
        stacked(shown, kinds, most, format_seconds),
        "The ranked strategies, part by part.",
    )


def _scatter(found: Facts, simulated: Sequence[CandidateFacts]) -> Section:
    """Step against memory: what is simulated, the front, and the ranked ones, which the table lights up."""
    front = {_key(each) for each in found["front"]}
    others = sorted(simulated, key=lambda each: each["step_s"])[:MOST_DOTS]
    points = [*others, *found["front"], *found["rows"]]
    steps = [each["step_s"] for each in points]
    sizes = [each["memory_bytes"] / GIB for each in points]
    capacity = found["capacity_bytes"] / GIB
    high = min(max(steps), 6 * min(steps))
    frame = Frame(
        min(steps) * 0.97,
        high * 1.03,
        0.0,
        max(capacity, *sizes) * 1.05,
        format_seconds,
        lambda size: f"{size:g}",
        "time of a step",
        "GiB of a GPU",
    )
    shown = [each for each in others if each["step_s"] <= high]
    dots = [frame.dot(each["step_s"], each["memory_bytes"] / GIB, "other", _tip(each), 3) for each in shown]
    line = sorted(
        (each["step_s"], each["memory_bytes"] / GIB) for each in found["front"] if each["step_s"] <= high
    )
    best = [
        frame.dot(
            row["step_s"],
            row["memory_bytes"] / GIB,
            "optimizer" if _key(row) in front else "compute",
            _tip(row),
            7,
            data_row=row["rank"],
            tabindex=0,
            role="img",
            aria_label=f"rank {row['rank']}: {_tip(row)}",
        )
        for row in found["rows"]
    ]
    on_front = [
        frame.dot(each["step_s"], each["memory_bytes"] / GIB, "optimizer", _tip(each), 5)
        for each in found["front"]
        if each["step_s"] <= high
    ]
    limit = frame.line(((frame.x_low, capacity), (frame.x_high, capacity)), "capacity")
    key = legend((("compute", "ranked below"), ("optimizer", "Pareto-optimal"), ("other", "simulated")))
    chart = frame.draw(
        limit,
        dots,
        frame.line(line, "front"),
        on_front,
        best,
        label="Step time against memory of what was simulated",
        key="pareto",
    )
    left = len(simulated) - len(shown)
    lead = (
        "Lower left is better; the dashed line is what a GPU has. Dots of the table light up with their rows."
    )
    if left > 0:
        lead += f" {left:,} slower ones are not drawn."
    return Section("Time against memory", join((key, chart)), lead, wide=True)


def _key(each: Mapping[str, Any]) -> tuple[float, float]:
    return each["step_s"], each["memory_bytes"]


def _tip(each: Mapping[str, Any]) -> str:
    words = each.get("words") or strategy_words(each)
    return f"{format_seconds(each['step_s'])}, {format_bytes(each['memory_bytes'])}: {words}"


def _ranked(found: Facts) -> Section:
    rows = found["rows"]
    columns = ranked_columns(rows)
    caption = "Sorted by rank; click a column header to sort"
    ids = [row["rank"] for row in rows]
    made = sortable_table(list(columns), rows, list(columns.values()), caption, ids)
    return Section("Strategies", made, wide=True)


def _commands(found: Facts) -> Section:
    listed = [tag("li", tag("code", row["command"])) for row in found["rows"]]
    return Section("Reproduce a row", tag("ol", listed, class_="commands"), wide=True)


def _nothing(found: Facts) -> Section:
    items: list[tuple[str, Child]] = []
    if found["smallest_bytes"]:
        items.append(("the smallest needs", f"{format_bytes(found['smallest_bytes'])} of a GPU or more"))
    items.append(("usable memory of a GPU", format_bytes(found["capacity_bytes"])))
    change = found["change"]
    items.append(("least change", change["words"] if change else "none of those tried is enough"))
    body: list[Child] = [pairs(items)]
    if change:
        body.append(tag("p", f"{format_seconds(change['step_s'])} with {strategy_words(change)}:"))
        body.append(tag("p", tag("code", change["command"])))
    return Section("What would let it fit", body, wide=True)
