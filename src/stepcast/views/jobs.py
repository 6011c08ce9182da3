"""Views of what jobs leave behind: logs of steps and collectives, databases of kernels, straggler traces."""

from collections.abc import Sequence

from stepcast.ir.facts import Facts
from stepcast.ir.timeline import Timeline
from stepcast.units import format_bytes, format_percent, format_seconds
from stepcast.views import view as ui
from stepcast.views.measured import bottleneck_figures
from stepcast.views.view import NAMES

MOST_LINES = 16
TITLES = NAMES["job_files"]


def _view(
    facts: Facts, figures: Sequence[ui.Figure], parts: Sequence[ui.Part | None], timeline: Timeline | None
) -> ui.View:
    """Return the view of a file that a job left, headed by its step, its duration or how many calls it holds."""
    title, step_s = TITLES.get(facts.get("format", ""), "log"), facts.get("step_s")
    about = (title, str(facts.get("source", "")))
    if step_s or "calls" not in facts:
        words = "per step, measured" if step_s else "recorded"
        headline = ui.Headline.of_seconds(step_s or facts.get("elapsed_s", 0.0), words, about)
    else:
        headline = ui.Headline(f"{facts['calls']:,}", "calls", about)
    head = f"{title}: {headline.number} {headline.unit.split(' ')[0]}"
    return ui.View(head, headline, figures, [*parts, ui.timeline_chart(timeline)], facts)


def step_log_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the steps that a training program logged."""
    figures: list[ui.Figure] = []
    if facts["step_s"] is not None:
        step, p90 = format_seconds(facts["step_s"]), format_seconds(facts["p90_s"])
        figures.append(ui.Figure("step", step, "median", line=f"{step} (median), 90 % of steps within {p90}"))
        figures.append(ui.Figure("90 % of steps", p90, "or less", shown=ui.Shown.PAGE))
    if facts["slow_steps"] or facts["lost_s"]:
        count, lost = len(facts["slow_steps"]), format_seconds(facts["lost_s"])
        line = f"{count} clearly slower than the median; steps above it cost {lost} in total"
        figures.append(ui.Figure("slow steps", str(count), f"steps above the median cost {lost}", line=line))
    if facts["tflops_per_gpu"] is not None:
        figures.append(ui.Figure("model FLOP/s", f"{facts['tflops_per_gpu']:.1f} TFLOP/s per GPU"))
    if facts["tokens_per_s_per_gpu"] is not None:
        figures.append(ui.Figure("tokens", f"{facts['tokens_per_s_per_gpu']:,.0f} per second and GPU"))
    if facts["peak_memory_bytes"] is not None:
        figures.append(ui.Figure("peak memory", format_bytes(facts["peak_memory_bytes"])))
    for row in facts.get("stragglers", ())[:1]:
        note = f"on {row['node']}: {row['factor']:.2f} times as slow as the fastest"
        figures.append(ui.Figure("straggler", f"rank {row['rank']}", note, mood=ui.Mood.BAD))
    if facts.get("run_s"):
        figures.append(ui.Figure("run", format_seconds(facts["run_s"])))
    figures += [ui.Figure("steps logged", str(facts["steps"])), ui.Figure("program", str(facts["program"]))]
    columns = ui.columns("slow_step=step took=seconds:s of_the_median=factor:x")
    slow = ui.table_of("Slow steps", facts["slow_steps"][:MOST_LINES], columns)
    return _view(facts, figures, [slow], timeline)


def collective_log_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the collectives that NCCL recorded: what hangs, who came last, how fast each was."""
    unfinished, mismatched = facts["unfinished"], facts["mismatched"]
    verdict, mood = "all ranks finished the same calls", ui.Mood.GOOD
    if unfinished or mismatched:
        verdict, mood = f"{len(unfinished)} unfinished and {len(mismatched)} mismatched calls", ui.Mood.BAD
    figures = [ui.Figure("verdict", verdict, mood=mood)]
    if late := [row for row in facts["stragglers"] if row["waited_s"] > 0][:1]:
        waited = format_seconds(late[0]["waited_s"])
        note = f"came last to {late[0]['last']:,} calls; the others waited {waited} for it"
        rank = f"rank {late[0]['rank']}"
        figures.append(ui.Figure("latest rank", rank, note, line=f"{rank} {note}"))
    known = {"program": facts["program"], "ranks": len(facts["ranks"]), "calls": f"{facts['calls']:,}"}
    figures += [ui.Figure(name, str(value)) for name, value in known.items()]
    stuck, different = [], []
    for row in unfinished:
        absent = f" for ranks {row['absent']}, which never called it" if row["absent"] else ""
        name = f"{row['kind']} {row['turn']} of group {row['group']}"
        stuck.append(ui.Remark(name, f": ranks {row['waiting']} wait{absent}"))
    for row in mismatched:
        different.append(ui.Remark(f"call {row['turn']} of group {row['group']}", f": ranks called {row['called']}"))
    columns = ui.columns(
        "collective=kind group size=size_bytes calls median=median_s:? bus_bandwidth=busbw_bytes_per_s:?"
    )
    parts = [
        ui.Remarks("Unfinished calls", stuck),
        ui.Remarks("Mismatched calls", different),
        ui.table_of("Collectives", facts["collectives"][:MOST_LINES], columns, wide=True),
    ]
    return _view(facts, figures, parts, timeline)


STREAM_PARTS = {"compute": "computation", "exposed": "exposed communication", "copy": "copies", "idle": "GPU idle"}
STREAM_COLOURS = {"compute": "compute", "exposed": "exposed", "copy": "copy", "idle": "bubble"}


def streams_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the kernels that Nsight Systems saw, by GPU."""
    step = facts["steps"]
    figures = []
    if step:
        median = format_seconds(step["median_s"])
        figures.append(ui.Figure("step", median, f"median of {step['count']} ranges {step['name']}"))
    named = {words: facts["operations_s"][part] for part, words in STREAM_PARTS.items()}
    total_s = sum(named.values())
    figures += bottleneck_figures(named, total_s, (STREAM_PARTS["compute"],), "the time of a GPU")
    for row in facts["stragglers"]:
        more = format_seconds(row["extra_s"])
        note = f"computes {row['factor']:.2f}x as long as the median of the others ({more} more)"
        rank = f"GPU {row['rank']}"
        figures.append(ui.Figure("straggler", rank, note, line=f"{rank} {note}", mood=ui.Mood.BAD))
    if facts["devices"] and not facts["stragglers"]:
        figures.append(ui.Figure("straggler", "none" if len(facts["devices"]) > 1 else "not known from one GPU"))
    figures.append(ui.Figure("elapsed", format_seconds(facts["elapsed_s"])))
    bars = []
    for row in facts["devices"]:
        amounts = {STREAM_COLOURS[part]: row[f"{part}_s"] for part in STREAM_PARTS}
        bars.append(ui.Bar(f"GPU {row['device']}", amounts, format_seconds(row["compute_s"])))
    most_s = max((sum(bar.amounts.values()) for bar in bars), default=1.0)
    columns = ui.columns("GPU=device compute=compute_s exposed_communication=exposed_s copies=copy_s idle=idle_s")
    kinds = {STREAM_COLOURS[part]: words for part, words in STREAM_PARTS.items()}
    devices = ui.table_of("GPUs", facts["devices"], columns)
    ranges = "Span" if facts.get("format") == "otlp" else "NVTX range"
    parts = [
        ui.Bars("GPUs", bars, kinds, most_s, table=devices, wide=True),
        _runs("Kernels", "kernel", facts["kernels"]),
        _runs(f"{ranges}s", ranges.replace("Span", "span"), facts["ranges"]),
    ]
    return _view(facts, figures, parts, timeline)


def _runs(title: str, head: str, rows: Sequence[Facts]) -> ui.Table:
    columns: dict[str, ui.Source] = {head: "name", "runs": "runs", "total": "total_s"}
    return ui.table_of(title, rows[:MOST_LINES], columns, sortable=True, shown=ui.Shown.DETAIL)


def stragglers_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a straggler trace: what slow operations cost, who is slow, and each part alone."""
    cost_s = max(0.0, facts["undelayed_s"] - facts["ideal_s"])
    share = format_percent(cost_s / facts["step_s"]) if facts["step_s"] else "-"
    cost, slowdown = format_seconds(cost_s), f"{facts['slowdown']:.3f}x"
    figures = [
        ui.text_line("step", format_seconds(facts["step_s"])),
        ui.Figure("slow operations cost", cost, f"{share} of the step ({slowdown})"),
    ]
    for kind, factor in list(facts["by_kind"].items())[:1]:
        note = f"it alone makes the step {factor:.3f}x as long"
        figures.append(ui.Figure("bottleneck", kind, note, line=f"{kind}: {note}"))
    for row in facts["stragglers"][:1]:
        rank, where = f"rank {row['rank']}", f"replica {row['dp_rank']}, stage {row['stage']}"
        note, line = f"{where}: {row['factor']:.3f}x", f"{rank} ({where}): {row['factor']:.3f}x"
        figures.append(ui.Figure("straggler", rank, note, line=line, mood=ui.Mood.BAD))
    if not facts["stragglers"]:
        figures.append(ui.Figure("straggler", "none", mood=ui.Mood.GOOD))
    figures += [
        ui.Figure("without CPU launch gaps", format_seconds(facts["undelayed_s"])),
        ui.Figure("with typical operations", format_seconds(facts["ideal_s"])),
        ui.Figure("due to the last stage", format_percent(facts["last_stage_share"])),
        ui.Figure("due to the slowest workers", format_percent(facts["worst_workers_share"])),
        ui.text_line("layout", f"dp {facts['dp']} x pp {facts['pp']}, {facts['steps']} steps"),
    ]
    columns = ui.columns("slow_rank=rank replica=dp_rank stage slowdown=factor:.3f")
    by_stage = {f"stage {stage}": value for stage, value in enumerate(facts["by_stage"])}
    by_replica = {f"replica {replica}": value for replica, value in enumerate(facts["by_dp_rank"])}
    alone = [(name, f"{value:.3f}") for name, value in {**by_stage, **by_replica, **facts["by_kind"]}.items()]
    title = "The slowdown by each stage, replica and kind of operation"
    heads = ("with recorded times of this alone", "slowdown")
    slow = ui.table_of("Slow ranks", facts["stragglers"][:MOST_LINES], columns)
    parts = [slow, ui.plain_table(title, heads, alone[:40], shown=ui.Shown.DETAIL)]
    return _view(facts, figures, parts, timeline)


def watch_view(facts: Facts, steps: Sequence[tuple[int, float]]) -> ui.View:
    """Return the view of a job that was watched: its alerts, and the time of each step."""
    alerts, step_s = facts["alerts"], facts["step_s"]
    mood = ui.Mood.BAD if facts["active"] else ui.Mood.GOOD
    figures = [ui.Figure("verdict", ", ".join(facts["active"]) or "normal", mood=mood)]
    if step_s is not None:
        figures.append(ui.Figure("step", format_seconds(step_s), "median"))
    if facts["forecast_s"]:
        figures.append(ui.Figure("forecast", format_seconds(facts["forecast_s"])))
    of = f" of {facts['total_steps']:,}" if facts["total_steps"] else ""
    figures.append(ui.Figure("steps", f"{facts['steps']:,}", f"the last is {facts['last_step']}{of}"))
    columns = ui.columns("step alert=kind what=text")
    parts: list[ui.Part | None] = [ui.table_of("Alerts", alerts, columns, uncut=(2,))]
    if len(steps) > 1:
        times_s = [seconds for _, seconds in steps]
        wrong = {row["step"]: row["text"] for row in alerts}
        dots = [ui.Dot(step, seconds, "tp", wrong[step]) for step, seconds in steps if step in wrong]
        line = ui.Line([(float(step), seconds) for step, seconds in steps], "same")
        x = ui.Axis(steps[0][0], steps[-1][0] + 1, lambda step: f"{step:,.0f}", "step")
        y = ui.Axis(0.95 * min(times_s), 1.05 * max(times_s), format_seconds, "seconds")
        label = f"{len(steps)} steps"
        parts.append(ui.Scatter("Steps", x, y, [line, *dots], label, legend=(("tp", "alert"),), shown=ui.Shown.PAGE))
    number, unit = format_seconds(step_s).split(" ") if step_s else ("no", "steps")
    headline = ui.Headline(number, f"{unit} per step, measured" if step_s else unit, ("watched job",))
    return ui.View("watched job", headline, figures, parts, facts)
