"""Pages of measured runs: where the time of a Megatron run went, and what a change would do to it."""

from collections.abc import Mapping
from typing import Any

from stepcast.ir.timeline import Timeline
from stepcast.pages.blocks import (
    SMALLEST_SHARE,
    about_line,
    card,
    paired,
    pairs,
    plain_pairs,
    signed,
    signed_percent,
    sortable_table,
    stacked,
    table,
    timed_answer,
    waterfall,
)
from stepcast.pages.charts import Piece, Row, bars
from stepcast.pages.communication import exposed_section
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Child, Markup, tag
from stepcast.pages.timeline import timeline_section
from stepcast.report.analysis import PART_NAMES, PATH, PATH_HEADS, sent_name, straggler_words
from stepcast.report.cells import cells
from stepcast.units import format_percent, format_seconds

Facts = Mapping[str, Any]
MOST_ROWS = 32
# Parts of measured runs by the colours of pages.
KINDS = {
    "embedding": "dp",
    "expert-dp": "dp",
    "wait": "hidden",
    "host": "host",
    "unhooked": "weight",
    "accumulation": "backward",
    "tensor": "tp",
    "data": "dp",
    "messages": "pp",
    "fixed": "other",
    "unexplained": "hidden",
    "exposed communication": "tp",
    "exposed copies": "copy",
    "idle: host": "host",
    "idle: between kernels": "hidden",
    "idle: dependency": "bubble",
}
STAGES = {
    "compute": "compute",
    "optimizer": "optimizer",
    "hidden": "waiting within the stage",
    "bubble": "bubble",
}


def parts_of(breakdown_s: Facts, titles: Mapping[str, str] = PART_NAMES) -> list[tuple[str, str, float]]:
    """Kind, name and seconds of each part, for a waterfall."""
    return [(KINDS.get(name, name), titles.get(name, name), seconds) for name, seconds in breakdown_s.items()]


def megatron_page(found: Facts, about: About, timeline: Timeline | None = None) -> Page:
    """Of the facts of a MegatronAnalysis."""
    sections: list[Section | None] = [
        Section(
            "Where the step went",
            waterfall(parts_of(found["breakdown_s"]), found["step_s"]),
            "Mean over ranks.",
        ),
        _stragglers(found),
        _stages(found),
        exposed_section(found["communication_s"]),
        _operations(found),
        _traffic(found),
        _critical(found),
        _configuration(found),
        timeline_section(timeline, about.links),
    ]
    title = (
        f"{format_seconds(found['step_s'])} measured: tp {found['tp']}, dp {found['dp']}, pp {found['pp']}"
    )
    return Page(title, _headline(found), sections, about, found, warnings=found["warnings"])


def _headline(found: Facts) -> Markup:
    ranks, known = found["ranks"], found["configuration"]
    given = (
        f"{len(ranks)} of {found['gpus']} ranks given"
        if len(ranks) > 1
        else f"rank {ranks[0]} of {found['gpus']}"
    )
    layout = f"tp {found['tp']} · dp {found['dp']} · pp {found['pp']}"
    said = {name: known.get(name, "?") for name in ("layers", "hidden", "seq", "dtype")}
    model = "{layers} layers, hidden {hidden}, sequence {seq}, {dtype}".format(**said)
    about = about_line(f"Megatron run on {found['gpus']:,} GPUs", layout, model, given)
    step_s = found["step_s"] or 1.0
    cards = [
        card("Bubble", format_percent(found["bubble_share"]), format_seconds(found["bubble_s"])),
        card(
            "Exposed communication",
            format_percent(found["exposed_comm_s"] / step_s),
            format_seconds(found["exposed_comm_s"]),
        ),
    ]
    hurts = max(found["communication_s"].items(), key=lambda each: each[1]["exposed"], default=None)
    if hurts:
        cards.append(
            card("Costliest communication", hurts[0], f"{format_seconds(hurts[1]['exposed'])} exposed")
        )
    cards.append(_slow_card(found))
    if len(found["stages"]) > 1:
        cards.append(card("Busiest stage", f"+{format_percent(found['imbalance'])}", "above the mean"))
    return timed_answer(found["step_s"], "per step, measured", about, cards=cards)


def _slow_card(found: Facts) -> Markup:
    slow = found["stragglers"]
    if slow:
        return card("Stragglers", str(len(slow)), straggler_words(found), "bad")
    if len(found["ranks"]) == 1:
        return card("Stragglers", "Not known", "one rank alone does not show them")
    return card("Stragglers", "None", "", "good")


def _stages(found: Facts) -> Section | None:
    if len(found["stages"]) < 2:
        return None
    rows = [
        (
            f"stage {row['stage']}",
            {
                "compute": row["compute_s"],
                "optimizer": row["optimizer_s"],
                "hidden": row["wait_s"],
                "bubble": row["bubble_s"],
            },
            (format_seconds(row["compute_s"]), tag("small", f"bubble {format_seconds(row['bubble_s'])}")),
        )
        for row in found["stages"][:64]
    ]
    return Section("Stages", stacked(rows, STAGES, found["step_s"], format_seconds))


def times_section(title: str, times_s: Mapping[str, float], lead: str) -> Section | None:
    """A bar for each name, longest first."""
    listed = sorted(times_s.items(), key=lambda each: -each[1])[:MOST_ROWS]
    if not listed:
        return None
    whole = sum(times_s.values()) or 1.0
    rows = [
        Row(
            name,
            (Piece("compute", 0, seconds, f"{name}: {format_seconds(seconds)}"),),
            (format_seconds(seconds), tag("small", format_percent(seconds / whole))),
        )
        for name, seconds in listed
    ]
    return Section(title, bars(rows, listed[0][1], format_seconds), lead)


def _operations(found: Facts) -> Section | None:
    times_s = {**found["operations_s"], "(between operations)": found["gaps_s"]}
    return times_section("Operations", times_s, "Mean of ranks.")


def _traffic(found: Facts) -> Section | None:
    rows = found["communication"][:MOST_ROWS]
    if not rows:
        return None
    heads = ("communication", "group", "size", "count", "total", "bus bandwidth", "cluster")
    columns = (
        ("name", sent_name),
        "group size_bytes count, total_s busbw_bytes_per_s cluster_busbw_bytes_per_s",
    )
    caption = "By operation; bandwidth where nothing ran beside it"
    return Section("What was sent", sortable_table(heads, rows, columns, caption), wide=True)


def _stragglers(found: Facts) -> Section | None:
    listed: list[Child] = []
    for one in found["stragglers"]:
        evidence = [tag("li", text) for text in one["evidence"]]
        listed.append(
            tag(
                "li",
                tag("strong", f"rank {one['rank']}"),
                f" takes {one['factor']:.2f}x as long as others for the same work",
                tag("ul", evidence),
            )
        )
    if not listed:
        return None
    return Section("Slow ranks", tag("ul", listed, class_="advice"), "What to look at first.")


def _critical(found: Facts) -> Section | None:
    path = [one for one in found["critical_path"] if one["duration_s"] >= 0.01 * found["step_s"]]
    if not path:
        return None
    shortest = format_seconds(found["critical_path_s"])
    lead = f"{shortest} with every collective, message and optimizer at its shortest."
    caption = "As it ran; what takes less than a hundredth of the step is left out"
    return Section("Critical path", table(PATH_HEADS, cells(path[:MOST_ROWS], *PATH), caption), lead)


def _configuration(found: Facts) -> Section:
    return Section("What ran", pairs(plain_pairs(found["configuration"])), "Read or solved from the traces.")


def replay_page(found: Facts, about: About, timeline: Timeline | None = None) -> Page:
    """Of the facts of a Replay: as measured, replayed, and changed."""
    changed = bool(found["changes"])
    names = ("as it was", "changed")
    sections: list[Section | None] = []
    if changed:
        before, after = found["before"]["breakdown_s"], found["breakdown_s"]
        rows = [
            (PART_NAMES.get(name, name), before[name], after[name], signed(after[name] - before[name]))
            for name in after
            if max(before[name], after[name]) >= SMALLEST_SHARE * found["replayed_step_s"]
        ]
        sections.append(Section("Before and after", paired(rows, names), "Mean over ranks."))
        old = {row["stage"]: row for row in found["before"]["stages"]}
        stages = [
            (
                f"stage {row['stage']} {what}",
                old[row["stage"]][f"{what}_s"],
                row[f"{what}_s"],
                signed(row[f"{what}_s"] - old[row["stage"]][f"{what}_s"]),
            )
            for row in found["stages"][:MOST_ROWS]
            if row["stage"] in old
            for what in ("busy", "bubble")
        ]
        sections.append(Section("Stages", paired(stages, names)))
    else:
        sections.append(
            Section(
                "Where the step goes",
                waterfall(parts_of(found["breakdown_s"]), found["step_s"]),
                "Mean over ranks.",
            )
        )
    sections.append(
        timeline_section(timeline, about.links, "measured, replayed and changed, one below the other")
    )
    title = f"{format_seconds(found['step_s'])} replayed"
    return Page(title, _replayed(found), sections, about, found, found["assumptions"], found["warnings"])


def _replayed(found: Facts) -> Markup:
    layout = (
        f"tp {found['tp']} · dp {found['dp']} · pp {found['pp']} · {found['micro_batches']} micro-batches"
    )
    words = ", ".join(found["changes"]) or "as it was measured"
    cards = [
        card("Measured", format_seconds(found["measured_step_s"])),
        card(
            "Replayed as it was",
            format_seconds(found["replayed_step_s"]),
            f"{signed_percent(found['error'])} of the measured",
        ),
    ]
    if found["changes"]:
        if found["speedup"] is not None:
            cards.append(
                card(
                    "Work a second",
                    f"{found['speedup']:.2f}x",
                    mood="good" if found["speedup"] >= 1 else "bad",
                )
            )
        cards.append(card("Change", signed(found["change_s"]), "of the step"))
    said = f"per step{', if changed so' if found['changes'] else ''}"
    return timed_answer(found["step_s"], said, about_line(words, layout), cards=cards)
