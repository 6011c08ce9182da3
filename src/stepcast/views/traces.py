"""Views of profiler traces, OptimusPrime logs and measured sweeps of a collective."""

from collections.abc import Sequence

from stepcast.ir.facts import FactDict, Facts
from stepcast.ir.grouping import sum_by_key
from stepcast.ir.timeline import Timeline
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds
from stepcast.views import view as ui
from stepcast.views.measured import KINDS, bottleneck_figures, replayed_figures, shares_of
from stepcast.views.view import NAMES

HEADS = NAMES["rank_parts"]
MOST_RANKS = 16
MOST_LINES = 10
DETAIL = {"most_lines": MOST_LINES, "sortable": True, "wide": True, "shown": ui.Shown.DETAIL}  # options of tables
NAME_WIDTH = 60
SLOW_WORDS = {"compute": "computes", "host": "computes or is idle for its CPU"}


def kineto_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a KinetoAnalysis, with the logs of a recorded run where there are any."""
    ranks = facts["ranks"]
    traced = f"PyTorch profiler trace of {len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    heads, detail = ("class of kernels", "per step", "share"), FactDict(shown=ui.Shown.DETAIL)
    waits = ui.columns("rank waits_for=waits_for collectives=collectives, waited=wait_s")
    kernels = ui.columns(
        "kernel class runs=count, total=total_s share", kernel=("name", lambda row: _short_name(row["name"]))
    )
    streams = ui.columns(
        "stream=name spans=spans, busy=busy_s compute=compute_s communication=communication_s "
        "exposed=exposed_communication_s"
    )
    return ui.View(
        f"{format_seconds(facts['step_s'])} measured: {facts['source']}",
        ui.Headline.of_seconds(facts["step_s"], "per step, measured", (traced, facts["source"])),
        _kineto_figures(facts),
        [
            _ranks(facts),
            _slow_ranks(facts),
            ui.Remarks("Advice", [ui.Remark("", row["text"], [row["evidence"]]) for row in facts.get("advice", ())]),
            ui.table_of("Who waits for whom", facts.get("waits", ()), waits, most_lines=MOST_LINES, **detail),
            ui.bars_of_times("Classes of kernels", facts["operations_s"], heads, lead="Per step, mean of ranks."),
            ui.table_of("Kernels", facts["kernels"][:200], kernels, caption="Over all ranks and steps", **DETAIL),
            ui.ExposureBars("Communication", facts["communication_by_group_s"], {}, "communication of", **detail),
            _collectives(facts),
            ui.table_of("Streams", ranks[0]["streams"] if len(ranks) == 1 else [], streams, **detail),
            *_recorded_parts(facts.get("recorded")),
            ui.timeline_chart(timeline),
        ],
        facts,
    )


def kineto_replay_view(facts: Facts) -> ui.View:
    """Return the view of a replayed profiler trace: as measured, replayed, and changed."""
    figures = replayed_figures(facts)
    if facts["changes"]:
        least = f"; at least {format_seconds(facts['low_s'])}" if facts["low_s"] < facts["step_s"] else ""
        words = f"{format_seconds(facts['step_s'])} ({facts['speedup']:.2f}x as fast){least}"
        figures += [ui.text_line("changed", ", ".join(facts["changes"])), ui.text_line("then", words)]
        figures.append(ui.Figure("change", ui.signed_seconds(facts["change_s"]), "of the step", shown=ui.Shown.PAGE))
    columns = ui.columns("rank measured=measured_s replayed=replayed_s changed=changed_s")
    return ui.View(
        f"{format_seconds(facts['step_s'])} replayed",
        ui.Headline.of_seconds(facts["step_s"], "per step, replayed", (", ".join(facts["changes"]), facts["source"])),
        figures,
        [ui.table_of("Ranks", facts["ranks"], columns) if len(facts["ranks"]) > 1 else None],
        facts,
    )


def _kineto_figures(facts: Facts) -> list[ui.Figure]:
    ranks, step_s = facts["ranks"], facts["step_s"] or 1.0
    first = ranks[0]
    parts_s = {
        part: sum(rank["breakdown_s"][part] / max(rank["steps"], 1) for rank in ranks) / len(ranks)
        for part in first["breakdown_s"]
    }
    compute, idle = format_seconds(facts["compute_s"]), format_seconds(facts["bubble_s"])
    behind, exposed = format_seconds(facts["overlapped_comm_s"]), format_seconds(facts["exposed_comm_s"])
    total, share = format_seconds(facts["communication_s"]), format_percent(facts["exposed_comm_s"] / step_s)
    figures = [
        ui.text_line("step", format_seconds(facts["step_s"])),
        *bottleneck_figures(parts_s, facts["step_s"], ("compute",)),
        *_straggler_figures(facts),
        ui.text_line("ranks", f"{len(ranks)}, {first['steps'] or 'no'} steps marked"),
        ui.Figure("compute", format_percent(facts["compute_s"] / step_s), compute, line=f"{compute} per step"),
        ui.Figure("exposed communication", share, f"{exposed}; {behind} behind computation", shown=ui.Shown.PAGE),
        ui.text_line("communication", f"{total}: {behind} behind computation, {exposed} exposed"),
        ui.Figure("idle", format_percent(facts["bubble_s"] / step_s), idle, line=f"{idle} per step"),
    ]
    if first["launch_lag_s"] is not None:
        ahead = f"{format_seconds(first['launch_lag_s'])} ahead"
        launches = f"{first['launches_per_step']:,} launches per step"
        line = f"{launches}, {ahead} of the GPU (median)"
        figures.append(ui.Figure("host", ahead, launches, line=line))
    return figures


def _straggler_figures(facts: Facts) -> list[ui.Figure]:
    """Return the slow ranks, and how long the others wait in collectives that they come to last."""
    if not facts["stragglers"]:
        return [ui.Figure("straggler", "none" if len(facts["ranks"]) > 1 else "not known from one rank")]
    steps = max(facts["ranks"][0]["steps"], 1)
    figures = []
    for row in facts["stragglers"]:
        text = f"{SLOW_WORDS[row['cause']]} {row['factor']:.2f}x as long as the median of the others"
        if row["meetings"]:
            text += (
                f"; the others wait {format_seconds(row['waits_s'] / steps)} per step, and it came last to "
                f"{row['last']:,} of {row['meetings']:,} matched collectives"
            )
        rank = f"rank {row['rank']}"
        figures.append(ui.Figure("straggler", rank, text, line=f"{rank} {text}", mood=ui.Mood.BAD))
    return figures


def _slow_ranks(facts: Facts) -> ui.Remarks:
    remarks = []
    for row in facts["stragglers"]:
        words = f" {SLOW_WORDS[row['cause']]} {row['factor']:.2f}x as long as the usual rank"
        remarks.append(ui.Remark(f"rank {row['rank']}", words))
    return ui.Remarks("Slow ranks", remarks, shown=ui.Shown.PAGE)


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
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def _collectives(facts: Facts) -> ui.Table:
    columns = ui.columns(
        "collective=kind group size=size_bytes runs=count, total=total_s one_transfer=transfer_s waits "
        "bus_bandwidth=busbw_bytes_per_s",
        waits=("wait_s", lambda row: format_seconds(row["wait_s"]) if row["matched"] else "-"),
    )
    return ui.table_of("Collectives", facts["collectives"], columns, **DETAIL)


def _recorded_parts(recorded: Facts | None) -> list[ui.Part]:
    """Return the wall clock and the logs that ``stepcast record`` left with the traces."""
    if recorded is None:
        return []
    inside, outside = _seconds(recorded["wall_step_s"]), _seconds(recorded["plain_step_s"])
    pairs = [
        ("wall clock", f"{inside} a step in the window, {outside} outside"),
        ("clocks", f"{format_seconds(recorded['clock_spread_s'])} apart at most"),
    ]
    columns = ui.columns(
        "size=size_bytes calls=logged median=logged_s:? bus_bandwidth=busbw_bytes_per_s:? in_the_window=traced "
        "mean=traced_s:?"
    )
    parts: list[ui.Part] = [ui.FactList("Recorded run", pairs)]
    for log in recorded["logs"]:
        own = {log["program"]: "kind", **columns}
        parts.append(ui.table_of(f"Log of {log['program']}", log["collectives"][:MOST_LINES], own, wide=True))
    return parts


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


# ---- OptimusPrime ------------------------------------------------------------------------------------

# Parts that are work rather than overhead.
OPTIMUS_WORK = ("compute", "unhooked", "accumulation", "optimizer")
# In the order in which a reader asks.
OPTIMUS_PARTS = NAMES["optimus_parts"]


def optimus_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of an OptimusAnalysis: the verdict, then the breakdown and the stages."""
    layout, step_s, breakdown_s = facts["layout"], facts["step_s"] or 1.0, facts["breakdown_s"]
    bubble_share, exposed_share = (format_percent(facts[name] / step_s) for name in ("bubble_s", "exposed_comm_s"))
    degrees = f"tp {layout['tp']} x dp {layout['dp']} x pp {layout['pp']}"
    batch = f"{facts['micro_batches']} micro-batches of {facts['micro_batch']}"
    named = {title: breakdown_s.get(part, 0.0) for part, title in OPTIMUS_PARTS.items()}
    bubble, exposed = format_seconds(facts["bubble_s"]), format_seconds(facts["exposed_comm_s"])
    predicted, error = format_seconds(facts["predicted_step_s"]), format_percent(facts["error"])
    error = f"+{error}" if facts["error"] >= 0 else error
    figures = [
        ui.text_line("step", f"{format_seconds(facts['step_s'])} measured (median)"),
        *bottleneck_figures(named, facts["step_s"], [OPTIMUS_PARTS[part] for part in OPTIMUS_WORK]),
        *_slow_stages(facts),
        ui.text_line("run", f"{facts['model']}, {degrees}"),
        ui.text_line("batch", batch),
        ui.text_line("sequence", f"{facts['sequence']:g} tokens (median of the steps)"),
        ui.Figure("predicted step", predicted, error, line=f"{predicted} ({error})"),
        ui.Figure("bubble", bubble_share, bubble, shown=ui.Shown.PAGE),
        ui.Figure("exposed communication", exposed_share, exposed, shown=ui.Shown.PAGE),
    ]
    messages = facts["messages"]
    if hops := messages["forward_per_hop"]:
        words = f"{max(hops)} forward and {messages['backward_per_hop']} backward per hop and micro-batch"
        figures.append(ui.text_line("messages", words))
    parts_s = {part: breakdown_s[part] for part in OPTIMUS_PARTS if breakdown_s.get(part)}
    title = f"Time breakdown of stage {facts['breakdown_stage']}, the busiest"
    about, heads = (str(facts["model"]), degrees, batch, facts["source"]), ("module", "forward")
    on_page: Facts = {"lead": "Forward of one micro-batch.", "shown": ui.Shown.PAGE}
    return ui.View(
        f"{format_seconds(facts['step_s'])} measured: {facts['model']}",
        ui.Headline.of_seconds(facts["step_s"], "per step, measured", about),
        figures,
        [
            ui.Breakdown(title, shares_of(parts_s, OPTIMUS_PARTS), facts["step_s"]),
            _optimus_stages(facts),
            ui.bars_of_times("Timed modules", facts["operations_s"], heads, **on_page),
        ],
        facts,
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
        words = f"its timed modules take {row['factor']:.2f}x the median of the stages"
        if own_s := forward_s.get(row["stage"]):
            extra_s = own_s * (1 - 1 / row["factor"]) * facts["micro_batches"]
            words += f"; {format_seconds(extra_s)} more per step in its forward passes"
        stage = f"stage {row['stage']}"
        figures.append(ui.Figure("straggler", stage, words, line=f"{stage}: {words}", mood=ui.Mood.BAD))
    unknown = "none" if len(facts["stages"]) > 2 else "not known from so few stages"
    return figures or [ui.Figure("straggler", unknown)]


# ---- sweeps of a collective --------------------------------------------------------------------------


def link_sweep_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a measured sweep of a collective and its prediction."""
    nodes = facts["nodes"]
    ranks = f"{facts['ranks']} on {nodes} node{'s' if nodes != 1 else ''}"
    error = format_percent(facts["mean_abs_error"])
    number, unit = error.split(" ")
    about = (f"{facts['collective']}, ranks: {ranks}", facts["cluster"], facts["device"] or "")
    causes = "; ".join(row["means"] for row in facts["findings"])
    figures = [
        ui.text_line("verdict", causes or "all sizes reach the predicted bandwidth"),
        ui.text_line("collective", facts["collective"]),
        ui.text_line("ranks", ranks),
        ui.text_line("device", facts["device"] or "not stated"),
        ui.text_line("cluster", facts["cluster"]),
        ui.text_line("mean error", f"{error} of the measured times"),
        *(_size_range(name, row) for name, row in facts["ranges"].items() if row),
    ]
    findings = [
        ui.Remark(row["cause"], f": {row['means']}", (f"because {row['rule']}", f"look at {row['check']}"))
        for row in facts["findings"]
    ]
    return ui.View(
        f"{facts['collective']} measured vs predicted on {facts['cluster']}",
        ui.Headline(number, f"{unit} between measured and predicted times", about),
        figures,
        [ui.Remarks("What falls short", findings, "Nothing does."), _bandwidth(facts["rows"]), _sizes(facts["rows"])],
        facts,
    )


def _size_range(name: str, row: Facts) -> ui.Figure:
    reached = row["reached"]
    value = "disturbed" if reached is None else format_percent(reached)
    note = "" if reached is None else "of the predicted bandwidth"
    ends = f"{format_bytes(row['from_bytes'])} to {format_bytes(row['to_bytes'])}"
    mood = ui.Mood.BAD if reached is not None and reached < 0.8 else ui.Mood.GOOD
    line = f"{ends}: {value} {note}".rstrip()
    return ui.Figure(f"{name} sizes", value, note or "not judged", line=line, mood=mood)


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
    return ui.Scatter(
        "Bandwidth by size",
        ui.Axis(min(sizes) / 1.5, max(sizes) * 1.5, format_bytes, "size", 2),
        ui.Axis(min(rates) / 2, max(rates) * 2, format_rate, "bus bandwidth"),
        [*lines, *dots],
        "Bus bandwidth by size",
        legend=(("first", "measured"), ("second", "predicted")),
        log=True,
        shown=ui.Shown.PAGE,
    )


def _sizes(rows: Sequence[Facts]) -> ui.Table:
    columns = ui.columns(
        "size measured=measured_s predicted=predicted_s busbw=measured_busbw_bytes_per_s "
        "predicted_busbw=predicted_busbw_bytes_per_s reached predicted_with",
        size=("size_bytes", lambda row: format_bytes(row["size_bytes"]) + (" *" if row["spike"] else "")),
        predicted_with=("algorithm", lambda row: f"{row['algorithm']} {row['protocol']}"),
    )
    disturbed = "* slower than the next larger size: disturbed, and not judged"
    note = disturbed if any(row["spike"] for row in rows) else ""
    caption = f"Size by size; {disturbed}" if note else "Size by size"
    return ui.table_of("Sizes", rows, columns, caption=caption, sortable=True, wide=True, note=note)
