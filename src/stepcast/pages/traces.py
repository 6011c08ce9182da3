"""Pages of profiler traces, OptimusPrime logs and collective sweeps."""

from collections.abc import Mapping
from typing import Any

from stepcast.ir.timeline import Timeline
from stepcast.pages.blocks import (
    about_line,
    answer,
    card,
    signed_percent,
    sortable_table,
    stacked,
    timed_answer,
    waterfall,
)
from stepcast.pages.charts import Frame, legend
from stepcast.pages.communication import exposed_section
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Markup, tag
from stepcast.pages.measured import KINDS, parts_of, times_section
from stepcast.pages.timeline import timeline_section
from stepcast.report.optimus import PART_TITLES
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds

Facts = Mapping[str, Any]


def kineto_page(found: Facts, about: About, timeline: Timeline | None = None) -> Page:
    """Of the facts of a KinetoAnalysis."""
    ranks, step_s = found["ranks"], found["step_s"] or 1.0
    cards = [
        card("Computing", format_percent(found["compute_s"] / step_s), format_seconds(found["compute_s"])),
        card(
            "Exposed communication",
            format_percent(found["exposed_comm_s"] / step_s),
            f"{format_seconds(found['overlapped_comm_s'])} hidden",
        ),
        card("Idle", format_percent(found["bubble_s"] / step_s), format_seconds(found["bubble_s"])),
    ]
    if ranks[0]["launch_lag_s"] is not None:
        cards.append(
            card(
                "Host",
                f"{format_seconds(ranks[0]['launch_lag_s'])} ahead",
                f"{ranks[0]['launches_per_step']:,} launches per step",
            )
        )
    traced = f"PyTorch profiler trace of {len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    names = {name: name for rank in ranks for name in rank["breakdown_s"]}
    rows = []
    for rank in ranks[:64]:
        count = max(rank["steps"], 1)
        parts = {KINDS.get(name, name): seconds / count for name, seconds in rank["breakdown_s"].items()}
        rows.append((f"rank {rank['rank']}", parts, format_seconds(rank["step_s"])))
    kinds = {KINDS.get(name, name): words for name, words in names.items()}
    most = max(sum(parts.values()) for _, parts, _ in rows) if rows else 1.0
    slow = [
        tag(
            "li",
            tag("strong", f"rank {one['rank']}"),
            f" computes {one['factor']:.2f} times as long as the usual rank",
        )
        for one in found["stragglers"]
    ]
    sections = [
        Section("Where the step went", stacked(rows, kinds, most, format_seconds), "Each rank, per step."),
        Section("Slow ranks", tag("ul", slow, class_="advice")) if slow else None,
        times_section("Kinds of kernels", found["operations_s"], "Per step, mean of ranks."),
        exposed_section(found["communication_by_group_s"]),
        _kernels(found),
        timeline_section(timeline, about.links),
    ]
    return Page(
        f"{format_seconds(found['step_s'])} measured: {found['source']}",
        timed_answer(found["step_s"], "per step, measured", about_line(traced, found["source"]), cards=cards),
        sections,
        about,
        found,
        warnings=found["warnings"],
    )


def _kernels(found: Facts) -> Section:
    heads = ("kernel", "class", "runs", "total", "share")
    columns = ("name class count, total_s share",)
    made = sortable_table(heads, found["kernels"], columns, "Over all ranks and steps")
    return Section("Kernels", made, wide=True)


def optimus_page(found: Facts, about: About, timeline: Timeline | None = None) -> Page:
    """Of the facts of an OptimusAnalysis."""
    layout = found["layout"]
    batch = f"{found['micro_batches']} micro-batches of {found['micro_batch']}"
    words = f"tp {layout['tp']} · dp {layout['dp']} · pp {layout['pp']} · {batch}"
    what = about_line(str(found["model"]), words, found["source"])
    step_s = found["step_s"] or 1.0
    cards = [
        card("Predicted step", format_seconds(found["predicted_step_s"]), signed_percent(found["error"])),
        card("Bubble", format_percent(found["bubble_s"] / step_s), format_seconds(found["bubble_s"])),
        card(
            "Exposed communication",
            format_percent(found["exposed_comm_s"] / step_s),
            format_seconds(found["exposed_comm_s"]),
        ),
    ]
    parts = {
        name: found["breakdown_s"][name] for name in PART_TITLES if found["breakdown_s"].get(name, 0) > 0
    }
    kinds = {KINDS.get(name, name): title for name, title in PART_TITLES.items()}
    rows = []
    for row in found["stages"][:64]:
        drawn: dict[str, float] = {}
        for name, seconds in row["parts_s"].items():
            drawn[KINDS.get(name, name)] = drawn.get(KINDS.get(name, name), 0.0) + seconds
        rows.append((f"stage {row['stage']}", drawn, (format_seconds(row["busy_s"]), tag("small", "busy"))))
    lead = f"Stage {found['breakdown_stage']}, which waits least."
    sections = [
        Section("Where the step went", waterfall(parts_of(parts, PART_TITLES), found["step_s"]), lead),
        Section("Stages", stacked(rows, kinds, max(sum(each[1].values()) for each in rows), format_seconds)),
        times_section("Timed modules", found["operations_s"], "Forward of one micro-batch."),
    ]
    return Page(
        f"{format_seconds(found['step_s'])} measured: {found['model']}",
        timed_answer(found["step_s"], "per step, measured", what, cards=cards),
        sections,
        about,
        found,
        warnings=found["warnings"],
    )


def sweep_page(found: Facts, about: About, timeline: Timeline | None = None) -> Page:
    """Of the facts of a measured sweep of a collective beside its prediction."""
    rows = [row for row in found["rows"] if row["size_bytes"] > 0 and row["measured_busbw_bytes_per_s"] > 0]
    nodes = found["nodes"]
    ran = f"{found['collective']} on {found['ranks']} ranks, {nodes} node{'s' if nodes != 1 else ''}"
    what = about_line(ran, found["cluster"], found["device"] or "")
    number, unit = format_percent(found["mean_abs_error"]).split(" ")
    cards = [
        card(
            f"{name.capitalize()} sizes",
            "disturbed" if one["reached"] is None else format_percent(one["reached"]),
            "of the predicted bandwidth",
            "bad" if one["reached"] is not None and one["reached"] < 0.8 else "good",
        )
        for name, one in found["ranges"].items()
        if one
    ]
    sections = [_bandwidth(rows), _findings(found), _sizes(found)]
    return Page(
        f"{found['collective']} measured vs predicted on {found['cluster']}",
        answer(number, f"{unit} between measured and predicted times", what, cards=cards),
        sections,
        about,
        found,
        warnings=found["warnings"],
    )


def _bandwidth(rows: list[Facts]) -> Section:
    sizes = [float(row["size_bytes"]) for row in rows]
    rates = [
        row[key] for row in rows for key in ("measured_busbw_bytes_per_s", "predicted_busbw_bytes_per_s")
    ]
    frame = Frame(
        min(sizes) / 1.5,
        max(sizes) * 1.5,
        min(rates) / 2,
        max(rates) * 2,
        format_bytes,
        format_rate,
        "size",
        "bus bandwidth",
        log=True,
    )
    lines = [
        frame.line([(float(row["size_bytes"]), row[f"{side}_busbw_bytes_per_s"]) for row in rows], kind)
        for side, kind in (("measured", "first"), ("predicted", "second"))
    ]
    dots = [
        frame.dot(
            row["size_bytes"],
            row["measured_busbw_bytes_per_s"],
            "first",
            f"{format_bytes(row['size_bytes'])}: {format_rate(row['measured_busbw_bytes_per_s'])}, "
            f"{format_percent(row['reached'])} of the predicted",
            4,
        )
        for row in rows
    ]
    key = legend((("first", "measured"), ("second", "predicted")))
    return Section("Bandwidth by size", Markup(key + frame.draw(*lines, dots, label="Bus bandwidth by size")))


def _findings(found: Facts) -> Section:
    if not found["findings"]:
        return Section("What falls short", tag("p", "Nothing does."))
    listed = [
        tag(
            "li",
            tag("strong", one["cause"]),
            f": {one['means']}",
            tag("ul", tag("li", f"because {one['rule']}"), tag("li", f"look at {one['check']}")),
        )
        for one in found["findings"]
    ]
    return Section("What falls short", tag("ul", listed, class_="advice"))


def _sizes(found: Facts) -> Section:
    heads = ("size", "measured", "predicted", "busbw", "reached", "predicted with")
    columns = (
        "size_bytes measured_s predicted_s measured_busbw_bytes_per_s reached",
        ("algorithm", lambda row: f"{row['algorithm']} {row['protocol']}"),
    )
    return Section("Sizes", sortable_table(heads, found["rows"], columns, "Size by size"), wide=True)
