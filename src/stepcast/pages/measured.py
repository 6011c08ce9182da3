"""Pages of measured runs: where the time of a Megatron run went, and what a change would do to it."""

from collections.abc import Mapping
from typing import Any

from stepcast.ir.timeline import Timeline
from stepcast.pages.blocks import (
    SMALLEST_SHARE,
    answer,
    card,
    paired,
    pairs,
    signed,
    signed_percent,
    stacked,
    table,
    waterfall,
)
from stepcast.pages.charts import Piece, Row, bars
from stepcast.pages.communication import exposed_section
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Child, Markup, join, tag
from stepcast.pages.timeline import timeline_section
from stepcast.report.analysis import PART_NAMES
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds

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
            "An average rank.",
        ),
        _stragglers(found),
        _stages(found),
        exposed_section(found["communication_s"]),
        _operations(found),
        _traffic(found),
        _critical(found),
        _configuration(found),
    ]
    if timeline is not None and len(timeline):
        sections.append(timeline_section(timeline, about.links))
    title = (
        f"{format_seconds(found['step_s'])} measured: tp {found['tp']}, dp {found['dp']}, pp {found['pp']}"
    )
    shown = [each for each in sections if each]
    return Page(title, _headline(found), shown, about, found, warnings=found["warnings"])


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
    about = join(
        (
            tag("strong", f"Megatron run on {found['gpus']:,} GPUs"),
            tag("span", layout),
            tag("span", model),
            tag("span", given),
        )
    )
    number, unit = format_seconds(found["step_s"]).split(" ")
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
    return answer(number, f"{unit} per step, measured", about, cards=cards)


def _slow_card(found: Facts) -> Markup:
    slow = found["stragglers"]
    if slow:
        return card(
            "Slow ranks", str(len(slow)), f"rank {slow[0]['rank']}: {slow[0]['factor']:.2f}x as long", "bad"
        )
    if len(found["ranks"]) == 1:
        return card("Slow ranks", "Not told", "one rank alone does not show them")
    return card("Slow ranks", "None", "", "good")


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


def times_section(
    title: str, times_s: Mapping[str, float], kind: str = "compute", lead: str = ""
) -> Section | None:
    """A bar for each name, longest first."""
    listed = sorted(times_s.items(), key=lambda each: -each[1])[:MOST_ROWS]
    if not listed:
        return None
    whole = sum(times_s.values()) or 1.0
    rows = [
        Row(
            name,
            (Piece(kind, 0, seconds, f"{name}: {format_seconds(seconds)}"),),
            (format_seconds(seconds), tag("small", format_percent(seconds / whole))),
        )
        for name, seconds in listed
    ]
    return Section(title, bars(rows, listed[0][1], format_seconds), lead)


def _operations(found: Facts) -> Section | None:
    return times_section(
        "Operations",
        {**found["operations_s"], "(between operations)": found["gaps_s"]},
        lead="Mean of ranks.",
    )


def _traffic(found: Facts) -> Section | None:
    rows = found["communication"][:MOST_ROWS]
    if not rows:
        return None
    cells = [
        (
            f"{row['operation']}: {row['name']}" if row["name"] != row["operation"] else row["name"],
            row["group"],
            "-" if row["size_bytes"] is None else format_bytes(row["size_bytes"]),
            f"{row['count']:,}",
            format_seconds(row["total_s"]),
            "-" if row["busbw_bytes_per_s"] is None else format_rate(row["busbw_bytes_per_s"]),
            "-"
            if row["cluster_busbw_bytes_per_s"] is None
            else format_rate(row["cluster_busbw_bytes_per_s"]),
        )
        for row in rows
    ]
    keys = [
        (
            row["name"],
            row["group"],
            row["size_bytes"],
            row["count"],
            row["total_s"],
            row["busbw_bytes_per_s"],
            row["cluster_busbw_bytes_per_s"],
        )
        for row in rows
    ]
    heads = ("communication", "group", "size", "count", "total", "bus bandwidth", "cluster")
    return Section(
        "What was sent",
        table(heads, cells, "By operation; bandwidth where nothing ran beside it", keys, sortable=True),
        wide=True,
    )


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
    cells = [
        (
            format_seconds(one["start_s"]),
            "rank " + ", ".join(map(str, one["ranks"][:4])),
            one["operation"],
            "-" if one["micro_batch"] is None else one["micro_batch"],
            format_seconds(one["duration_s"]),
        )
        for one in path[:MOST_ROWS]
    ]
    shortest = format_seconds(found["critical_path_s"])
    lead = f"{shortest} with every collective, message and optimizer at its shortest."
    return Section(
        "Critical path",
        table(
            ("at", "where", "operation", "micro-batch", "time"),
            cells,
            "As it ran; what takes less than a hundredth of the step is left out",
        ),
        lead,
    )


def _configuration(found: Facts) -> Section:
    items: list[tuple[str, Child]] = []
    for name, value in found["configuration"].items():
        if not isinstance(value, dict | list):
            items.append(
                (
                    name.replace("_", " "),
                    f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value),
                )
            )
    return Section("What ran", pairs(items), "Read or solved from the traces.")


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
        sections.append(Section("Before and after", paired(rows, names), "An average rank."))
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
                "An average rank.",
            )
        )
    if timeline is not None and len(timeline):
        sections.append(
            timeline_section(timeline, about.links, "measured, replayed and changed, one below the other")
        )
    title = f"{format_seconds(found['step_s'])} replayed"
    shown = [each for each in sections if each]
    return Page(title, _replayed(found), shown, about, found, found["assumptions"], found["warnings"])


def _replayed(found: Facts) -> Markup:
    layout = (
        f"tp {found['tp']} · dp {found['dp']} · pp {found['pp']} · {found['micro_batches']} micro-batches"
    )
    words = ", ".join(found["changes"]) or "as it was measured"
    about = join((tag("strong", words), tag("span", layout)))
    cards = [
        card("Measured", format_seconds(found["measured_step_s"])),
        card(
            "Replayed as it was",
            format_seconds(found["replayed_step_s"]),
            f"{signed_percent(found['error'])} of the measured",
        ),
    ]
    number, unit = format_seconds(found["step_s"]).split(" ")
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
    return answer(
        number, f"{unit} per step{', if changed so' if found['changes'] else ''}", about, cards=cards
    )
