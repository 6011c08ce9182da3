"""Views of profiler traces, OptimusPrime logs and measured sweeps of a collective."""

from collections.abc import Sequence

from stepcast.ir.timeline import Timeline
from stepcast.ir.types import FactDict, Facts, sum_by_key
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_figures, build_pairs, build_view
from stepcast.views.measured import KINDS, bottleneck_figures, replayed_figures, shares_of
from stepcast.views.text import fit
from stepcast.views.view import NAMES

HEADS = NAMES["rank_parts"]
MOST_RANKS = 16
MOST_LINES = 10
NAME_WIDTH = 60
SLOW_WORDS = {"compute": "computes", "host": "computes or is idle for its CPU"}


def kineto_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a KinetoAnalysis, with the logs of a recorded run where there are any."""
    ranks = facts["ranks"]
    first, count = ranks[0], len(ranks)
    parts_s = {
        part: sum(rank["breakdown_s"][part] / max(rank["steps"], 1) for rank in ranks) / count
        for part in first["breakdown_s"]
    }
    heads, advice = ("class of kernels", "per step", "share"), facts.get("advice", ())
    detail = FactDict(shown=ui.Shown.DETAIL)
    remarks = [
        ui.Remark(f"rank {row['rank']}", f" {SLOW_WORDS[row['cause']]} {row['factor']:.2f}x as long as the usual rank")
        for row in facts["stragglers"]
    ]
    view = build_view(
        "kineto",
        facts,
        first=first,
        marked=first["steps"] or None,
        bottleneck=bottleneck_figures(parts_s, facts["step_s"], ("compute",)),
        slow=_straggler_figures(facts),
        breakdown=_ranks(facts),
        remarks=ui.Remarks("Slow ranks", remarks, shown=ui.Shown.PAGE),
        advised=ui.Remarks("Advice", [ui.Remark("", row["text"], [row["evidence"]]) for row in advice]),
        classes=ui.bars_of_times("Classes of kernels", facts["operations_s"], heads, lead="Per step, mean of ranks."),
        kernel=("name", lambda row: _short_name(row["name"])),
        groups=ui.ExposureBars("Communication", facts["communication_by_group_s"], {}, "communication of", **detail),
        waits=("wait_s", lambda row: format_seconds(row["wait_s"]) if row["matched"] else "-"),
        waited=facts.get("waits"),
        streams=first["streams"] if count == 1 else [],
    )
    return ui.replace(view, parts=[*view.parts, *_recorded_parts(facts.get("recorded")), ui.timeline_chart(timeline)])


def kineto_replay_view(facts: Facts) -> ui.View:
    """Return the view of a replayed profiler trace: as measured, replayed, and changed."""
    changed, low_s, ranks = ", ".join(facts["changes"]), facts["low_s"], facts["ranks"]
    least_s = low_s if changed and low_s < facts["step_s"] else None
    more: Facts = {"changed": changed, "least_s": least_s, "several": ranks if len(ranks) > 1 else []}
    return build_view("kineto replay", facts, replayed=replayed_figures(facts), **more)


def _straggler_figures(facts: Facts) -> list[ui.Figure]:
    """Return the slow ranks, and how long the others wait in collectives that they come to last."""
    if not facts["stragglers"]:
        return [ui.Figure("straggler", "none" if len(facts["ranks"]) > 1 else "not known from one rank")]
    more = {"steps": max(facts["ranks"][0]["steps"], 1)}
    rows = ({**row, "works": SLOW_WORDS[row["cause"]], **more} for row in facts["stragglers"])
    return [figure for row in rows for figure in build_figures("kineto straggler", row)]


def _ranks(facts: Facts) -> ui.Bars:
    parts = list(facts["ranks"][0]["breakdown_s"])
    bars, rows = [], []
    for rank in facts["ranks"]:
        count = max(rank["steps"], 1)
        seconds = {part: rank["breakdown_s"][part] / count for part in parts}
        amounts = {KINDS.get(part, part): amount for part, amount in seconds.items()}
        bars.append(ui.Bar(f"rank {rank['rank']}", amounts, format_seconds(rank["step_s"])))
        waits = "-" if rank["wait_s"] is None else format_seconds(rank["wait_s"] / count)
        rows.append((rank["rank"], *map(format_seconds, seconds.values()), waits))
    heads = ("rank", *(HEADS.get(part, part) for part in parts), "waits")
    listed = ui.plain_table("Time breakdown by rank", heads, rows, most_lines=MOST_RANKS)
    kinds = {KINDS.get(part, part): part for part in parts}
    most_s = max(sum(bar.amounts.values()) for bar in bars)
    return ui.Bars("Time breakdown by rank", bars, kinds, most_s, table=listed, lead="Per step.")


def _short_name(name: str) -> str:
    """Return the name of a kernel without the words that every PyTorch kernel starts with."""
    for word in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(word, "")
    return fit(name, NAME_WIDTH)


def _recorded_parts(recorded: Facts | None) -> list[ui.Part]:
    """Return the wall clock and the logs that ``stepcast record`` left with the traces."""
    if recorded is None:
        return []
    columns = ui.columns(
        "size=size_bytes calls=logged median=logged_s:? bus_bandwidth=busbw_bytes_per_s:? in_the_window=traced "
        "mean=traced_s:?"
    )
    parts: list[ui.Part] = [ui.FactList("Recorded run", build_pairs("recorded run", recorded))]
    for log in recorded["logs"]:
        own = {log["program"]: "kind", **columns}
        parts.append(ui.table_of(f"Log of {log['program']}", log["collectives"][:MOST_LINES], own, wide=True))
    return parts


# Parts that are work rather than overhead.
OPTIMUS_WORK = ("compute", "unhooked", "accumulation", "optimizer")
# In the order in which a reader asks.
OPTIMUS_PARTS = NAMES["optimus_parts"]


def optimus_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of an OptimusAnalysis: the verdict, then the breakdown and the stages."""
    layout, breakdown_s, step_s = facts["layout"], facts["breakdown_s"], facts["step_s"]
    named = {title: breakdown_s.get(part, 0.0) for part, title in OPTIMUS_PARTS.items()}
    parts_s = {part: breakdown_s[part] for part in OPTIMUS_PARTS if breakdown_s.get(part)}
    title = f"Time breakdown of stage {facts['breakdown_stage']}, the busiest"
    error, heads = format_percent(facts["error"]), ("module", "forward")
    on_page: Facts = {"lead": "Forward of one micro-batch.", "shown": ui.Shown.PAGE}
    return build_view(
        "optimus",
        facts,
        degrees=f"tp {layout['tp']} x dp {layout['dp']} x pp {layout['pp']}",
        batch=f"{facts['micro_batches']} micro-batches of {facts['micro_batch']}",
        off=f"+{error}" if facts["error"] >= 0 else error,
        hops=max(facts["messages"]["forward_per_hop"], default=None),
        bottleneck=bottleneck_figures(named, step_s, [OPTIMUS_PARTS[part] for part in OPTIMUS_WORK]),
        slow=_slow_stages(facts),
        breakdown=ui.Breakdown(title, shares_of(parts_s, OPTIMUS_PARTS), step_s),
        stage_bars=_optimus_stages(facts),
        modules=ui.bars_of_times("Timed modules", facts["operations_s"], heads, **on_page),
    )


def _optimus_stages(facts: Facts) -> ui.Bars:
    bars = []
    for row in facts["stages"]:
        amounts = sum_by_key((KINDS.get(part, part), seconds) for part, seconds in row["parts_s"].items())
        bars.append(ui.Bar(f"stage {row['stage']}", amounts, format_seconds(row["busy_s"]), "busy"))
    columns = ui.columns("stage ends_with layers=layers:g timed_forward=forward_s busy=busy_s bubble=bubble_s")
    kinds = {KINDS.get(part, part): title for part, title in OPTIMUS_PARTS.items()}
    most_s = max(sum(bar.amounts.values()) for bar in bars)
    return ui.Bars("Stages", bars, kinds, most_s, table=ui.table_of("Stages", facts["stages"], columns))


def _slow_stages(facts: Facts) -> list[ui.Figure]:
    """Return the slow stages, and how much longer their forward passes take in a step."""
    forward_s = {row["stage"]: row["forward_s"] for row in facts["stages"]}
    figures = []
    for row in facts["stragglers"]:
        own_s = forward_s.get(row["stage"])
        extra_s = own_s * (1 - 1 / row["factor"]) * facts["micro_batches"] if own_s else None
        figures += build_figures("optimus straggler", row, extra_s=extra_s)
    unknown = "none" if len(facts["stages"]) > 2 else "not known from so few stages"
    return figures or [ui.Figure("straggler", unknown)]


def link_sweep_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a measured sweep of a collective and its prediction."""
    causes = "; ".join(row["means"] for row in facts["findings"])
    disturbed = "* slower than the next larger size: disturbed, and not judged"
    spikes = disturbed if any(row["spike"] for row in facts["rows"]) else ""
    findings = [
        ui.Remark(row["cause"], f": {row['means']}", (f"because {row['rule']}", f"look at {row['check']}"))
        for row in facts["findings"]
    ]
    columns = ui.columns(
        "size measured=measured_s predicted=predicted_s busbw=measured_busbw_bytes_per_s "
        "predicted_busbw=predicted_busbw_bytes_per_s reached predicted_with",
        size=("size_bytes", lambda row: format_bytes(row["size_bytes"]) + (" *" if row["spike"] else "")),
        predicted_with=("algorithm", lambda row: f"{row['algorithm']} {row['protocol']}"),
    )
    texts = {"caption": f"Size by size; {spikes}" if spikes else "Size by size", "note": spikes}
    sizes: list[ui.Figure] = []
    for name, row in facts["ranges"].items():
        if row:
            section = "sizes disturbed" if row["reached"] is None else "sizes judged"
            sizes += build_figures(section, row, name=name, fine=row["reached"] is None or row["reached"] >= 0.8)
    return build_view(
        "link sweep",
        facts,
        verdict=causes or "all sizes reach the predicted bandwidth",
        sizes=sizes,
        short=ui.Remarks("What falls short", findings, "Nothing does."),
        chart=_bandwidth(facts["rows"]),
        table=ui.table_of("Sizes", facts["rows"], columns, sortable=True, wide=True, **texts),
    )


def _bandwidth(rows: Sequence[Facts]) -> ui.Scatter | None:
    rows = [row for row in rows if row["size_bytes"] > 0 and row["measured_busbw_bytes_per_s"] > 0]
    if not rows:
        return None
    sizes = [float(row["size_bytes"]) for row in rows]
    sides = {"measured": "first", "predicted": "second"}
    rates = [row[f"{side}_busbw_bytes_per_s"] for row in rows for side in sides]
    lines = [
        ui.Line([(float(row["size_bytes"]), row[f"{side}_busbw_bytes_per_s"]) for row in rows], kind)
        for side, kind in sides.items()
    ]
    dots = []
    for row in rows:
        size, rate = row["size_bytes"], row["measured_busbw_bytes_per_s"]
        tip = f"{format_bytes(size)}: {format_rate(rate)}, {format_percent(row['reached'])} of the predicted"
        dots.append(ui.Dot(size, rate, "first", tip))
    x = ui.Axis(min(sizes) / 1.5, max(sizes) * 1.5, format_bytes, "size", 2)
    y = ui.Axis(min(rates) / 2, max(rates) * 2, format_rate, "bus bandwidth")
    on_page: Facts = {"legend": [(kind, side) for side, kind in sides.items()], "log": True, "shown": ui.Shown.PAGE}
    return ui.Scatter("Bandwidth by size", x, y, [*lines, *dots], "Bus bandwidth by size", **on_page)
