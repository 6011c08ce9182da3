"""Views of what jobs leave behind: logs of steps and collectives, databases of kernels, straggler traces."""

from collections.abc import Sequence

from stepcast.ir.timeline import Timeline
from stepcast.ir.types import Fact, Facts
from stepcast.units import format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_figures, build_view
from stepcast.views.measured import bottleneck_figures
from stepcast.views.view import NAMES, say

MOST_LINES = 16
TITLES = NAMES["job_files"]


def _view(section: str, facts: Facts, timeline: Timeline | None = None, **more: Fact) -> ui.View:
    """Return the view of a file that a job left, headed by its step, its duration or how many calls it holds."""
    file, step_s, calls = TITLES.get(facts.get("format", ""), "log"), facts.get("step_s"), facts.get("calls")
    recorded_s = None if step_s or calls is not None else facts.get("elapsed_s", 0.0)
    headline = str(
        say(
            "[{step_s:!}{step_s} per step, measured][{recorded_s} recorded][{calls:,} calls]",
            {"step_s": step_s, "recorded_s": recorded_s, "calls": None if step_s else calls},
        )
    )
    title = f"{file}: {' '.join(headline.split(' ')[:2])}"
    about, chart = (file, str(facts.get("source", ""))), ui.timeline_chart(timeline)
    return build_view(section, facts, **more, job_title=title, job_headline=headline, about=about, timeline=chart)


def step_log_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the steps that a training program logged."""
    is_slow, stragglers = bool(facts["slow_steps"] or facts["lost_s"]), facts.get("stragglers", ())
    straggler = stragglers[0] if stragglers else None
    return _view("step log", facts, timeline, is_slow=is_slow, straggler=straggler, run_s=facts.get("run_s") or None)


def collective_log_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the collectives that NCCL recorded: what hangs, who came last, how fast each was."""
    unfinished, mismatched = facts["unfinished"], facts["mismatched"]
    is_wrong = bool(unfinished or mismatched)
    late = [row for row in facts["stragglers"] if row["waited_s"] > 0]
    stuck, different = [], []
    for row in unfinished:
        absent = f" for ranks {row['absent']}, which never called it" if row["absent"] else ""
        name = f"{row['kind']} {row['turn']} of group {row['group']}"
        stuck.append(ui.Remark(name, f": ranks {row['waiting']} wait{absent}"))
    for row in mismatched:
        different.append(ui.Remark(f"call {row['turn']} of group {row['group']}", f": ranks called {row['called']}"))
    more: Facts = {
        "is_wrong": is_wrong,
        "is_right": not is_wrong,
        "late": late[0] if late else None,
        "stuck": ui.Remarks("Unfinished calls", stuck),
        "different": ui.Remarks("Mismatched calls", different),
    }
    return _view("collective log", facts, timeline, **more)


STREAM_PARTS = {"compute": "computation", "exposed": "exposed communication", "copy": "copies", "idle": "GPU idle"}
STREAM_COLOURS = {"compute": "compute", "exposed": "exposed", "copy": "copy", "idle": "bubble"}


def streams_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the kernels that Nsight Systems saw, by GPU."""
    named = {words: facts["operations_s"][part] for part, words in STREAM_PARTS.items()}
    slow = [figure for row in facts["stragglers"] for figure in build_figures("stream straggler", row)]
    if facts["devices"] and not slow:
        slow = [ui.Figure("straggler", "none" if len(facts["devices"]) > 1 else "not known from one GPU")]
    bars = []
    for row in facts["devices"]:
        amounts = {STREAM_COLOURS[part]: row[f"{part}_s"] for part in STREAM_PARTS}
        bars.append(ui.Bar(f"GPU {row['device']}", amounts, format_seconds(row["compute_s"])))
    most_s = max((sum(bar.amounts.values()) for bar in bars), default=1.0)
    columns = ui.columns("GPU=device compute=compute_s exposed_communication=exposed_s copies=copy_s idle=idle_s")
    kinds = {STREAM_COLOURS[part]: words for part, words in STREAM_PARTS.items()}
    devices = ui.table_of("GPUs", facts["devices"], columns)
    ranges = "Span" if facts.get("format") == "otlp" else "NVTX range"
    more: Facts = {
        "bottleneck": bottleneck_figures(named, sum(named.values()), (STREAM_PARTS["compute"],), "the time of a GPU"),
        "slow": slow,
        "bars": ui.Bars("GPUs", bars, kinds, most_s, table=devices, wide=True),
        "kernel_runs": _runs("Kernels", "kernel", facts["kernels"]),
        "range_runs": _runs(f"{ranges}s", ranges.replace("Span", "span"), facts["ranges"]),
    }
    return _view("streams", facts, timeline, **more)


def _runs(title: str, head: str, rows: Sequence[Facts]) -> ui.Table:
    columns: dict[str, ui.Source] = {head: "name", "runs": "runs", "total": "total_s"}
    return ui.table_of(title, rows[:MOST_LINES], columns, sortable=True, shown=ui.Shown.DETAIL)


def stragglers_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a straggler trace: what slow operations cost, who is slow, and each part alone."""
    by_stage = {f"stage {stage}": value for stage, value in enumerate(facts["by_stage"])}
    by_replica = {f"replica {replica}": value for replica, value in enumerate(facts["by_dp_rank"])}
    alone = [(name, f"{value:.3f}") for name, value in {**by_stage, **by_replica, **facts["by_kind"]}.items()]
    heads = ("with recorded times of this alone", "slowdown")
    title = "The slowdown by each stage, replica and kind of operation"
    kind, factor = next(iter(facts["by_kind"].items()), (None, None))
    cost_s = max(0.0, facts["undelayed_s"] - facts["ideal_s"])
    more: Facts = {
        "cost_s": cost_s,
        "cost_share": cost_s / facts["step_s"] if facts["step_s"] else None,
        "worst": {"kind": kind, "factor": factor},
        "straggler": facts["stragglers"][0] if facts["stragglers"] else None,
        "fine": not facts["stragglers"],
        "alone": ui.plain_table(title, heads, alone[:40], shown=ui.Shown.DETAIL),
    }
    return _view("stragglers", facts, timeline, **more)


def watch_view(facts: Facts, steps: Sequence[tuple[int, float]]) -> ui.View:
    """Return the view of a job that was watched: its alerts, and the time of each step."""
    chart = None
    if len(steps) > 1:
        times_s = [seconds for _, seconds in steps]
        wrong = {row["step"]: row["text"] for row in facts["alerts"]}
        dots = [ui.Dot(step, seconds, "tp", wrong[step]) for step, seconds in steps if step in wrong]
        line = ui.Line([(float(step), seconds) for step, seconds in steps], "same")
        x = ui.Axis(steps[0][0], steps[-1][0] + 1, lambda step: f"{step:,.0f}", "step")
        y = ui.Axis(0.95 * min(times_s), 1.05 * max(times_s), format_seconds, "seconds")
        label = f"{len(steps)} steps"
        chart = ui.Scatter("Steps", x, y, [line, *dots], label, legend=(("tp", "alert"),), shown=ui.Shown.PAGE)
    more: Facts = {
        "verdict": ", ".join(facts["active"]) or "normal",
        "fine": not facts["active"],
        "forecast_s": facts["forecast_s"] or None,
        "total_steps": facts["total_steps"] or None,
        "has_steps": bool(facts["step_s"]),
        "has_none": not facts["step_s"],
        "chart": chart,
    }
    return build_view("watch", facts, **more)
