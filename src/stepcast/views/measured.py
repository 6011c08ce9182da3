"""Views of measured runs: where the time of a step went, and what a change would do to it.

Megatron runs come first, then profiler traces, OptimusPrime logs and sweeps of a collective, then what jobs leave
behind: logs of steps and collectives, databases of kernels, straggler traces.
"""

from collections.abc import Iterable, Mapping, Sequence

from stepcast.ir.timeline import Timeline
from stepcast.ir.types import Fact, Facts, sum_by_key
from stepcast.units import format_bytes, format_change, format_percent, format_rate, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_figures, build_pairs, build_view, plain_pairs
from stepcast.views.text import fit
from stepcast.views.view import NAMES, say

MOST_LINES = 16
MOST_ROWS = 32
MOST_NAMED = 4
# Even routers differ by a few per cent from exchange to exchange.
UNEVEN_FACTOR = 1.15
PART_NAMES = NAMES["measured_parts"]
WORK = ("compute", "optimizer")
TIME_BREAKDOWN = "Time breakdown (mean over ranks)"
# Parts of measured runs by the colours of pages.
KINDS = NAMES["measured_colours"]
HEADS = NAMES["rank_parts"]
MOST_RANKS = 16
MOST_LOGGED = 10
NAME_WIDTH = 60
SLOW_WORDS = {"compute": "computes", "host": "computes or is idle for its CPU"}
# Parts that are work rather than overhead.
OPTIMUS_WORK = ("compute", "unhooked", "accumulation", "optimizer")
# In the order in which a reader asks.
OPTIMUS_PARTS = NAMES["optimus_parts"]
FILE_TITLES = NAMES["job_files"]
STREAM_PARTS = {"compute": "computation", "exposed": "exposed communication", "copy": "copies", "idle": "GPU idle"}


def shares_of(breakdown_s: Mapping[str, float], names: Mapping[str, str] = PART_NAMES) -> list[ui.Share]:
    """Return the parts of a measured step with their colours and names."""
    return [ui.Share(KINDS.get(part, part), names.get(part, part), seconds) for part, seconds in breakdown_s.items()]


def bottleneck_figures(
    parts: Mapping[str, float], step_s: float, work: Sequence[str], of: str = "the step"
) -> list[ui.Figure]:
    """Return the largest of the named *parts*, and where that is *work*, the largest of the others."""
    if not step_s or not parts:
        return []

    def words(name: str) -> str:
        return f"{name}: {format_seconds(parts[name])} ({format_percent(parts[name] / step_s)} of {of})"

    largest = max(parts, key=lambda name: parts[name])
    figures = [ui.text_line("bottleneck", words(largest))]
    others = [name for name in parts if name not in work and parts[name] > 0]
    if largest in work and others:
        figures.append(ui.text_line("largest overhead", words(max(others, key=lambda name: parts[name]))))
    return figures


def megatron_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a MegatronAnalysis."""
    known, step_s, ep = facts["configuration"], facts["step_s"], facts["ep"]
    named = {PART_NAMES.get(part, part): seconds for part, seconds in facts["breakdown_s"].items()}
    only_rank = len(facts["ranks"]) == 1 and facts["gpus"] > 1
    group, worst = max(facts["communication_s"].items(), key=lambda item: item[1]["exposed"], default=("", {}))
    # Sets of ranks whose experts get clearly uneven numbers of tokens.
    uneven_rows = [row for row in facts["expert_imbalance"] if _unevenness(row) >= UNEVEN_FACTOR]
    uneven = max(uneven_rows, key=_unevenness, default=None)
    waits_s = max(uneven["waits_caused_s"].values(), default=0.0) if uneven else 0.0
    operations_s = {**facts["operations_s"], "(between operations)": facts["gaps_s"]}
    heads = ("operation", "mean of ranks")
    detail = {"lead": "Mean of ranks.", "shown": ui.Shown.DETAIL}
    return build_view(
        "megatron",
        facts,
        bottleneck=bottleneck_figures(named, step_s, [PART_NAMES[part] for part in WORK]),
        slow=[_straggler_figure(facts)],
        measured=" in receives, transfers included" if only_rank else ", mean of ranks",
        worst={**worst, "group": group},
        uneven={**uneven, "waits_s": waits_s or None} if uneven else None,
        above=facts["imbalance"] if len(facts["stages"]) > 1 else None,
        experts=ep if ep > 1 else None,
        read=len(facts["ranks"]) if len(facts["ranks"]) > 1 else f"rank {facts['ranks'][0]}",
        breakdown=_breakdown(facts["breakdown_s"], step_s),
        several=facts["stages"] if len(facts["stages"]) > 1 else [],
        uneven_rows=[{**row, "evidence": _evidence_of_experts(row)} for row in uneven_rows[:MOST_LINES]],
        operations=ui.bars_of_times("Operations", operations_s, heads, **detail),
        exposed=ui.bars_of_exposure("Exposed communication", facts["communication_s"], shown=ui.Shown.PAGE),
        communication=("name", lambda row: ": ".join(dict.fromkeys((row["operation"], row["name"])))),
        bus_bandwidth=_bus_bandwidth,
        traffic=facts["communication"],
        path=_critical_path(facts),
        ran=plain_pairs(known),
        timeline=ui.timeline_chart(timeline),
    )


def _breakdown(breakdown_s: Mapping[str, float], step_s: float) -> ui.Bars:
    large = [share for share in shares_of(breakdown_s) if share.amount >= ui.SMALLEST_SHARE * step_s]
    return ui.breakdown(TIME_BREAKDOWN, large, step_s)


def _straggler_figure(facts: Facts) -> ui.Figure:
    """Return which ranks are slow and how much of the step they cost."""
    slow, cost_s = facts["stragglers"], facts.get("straggler_cost_s")
    if not slow:
        is_unknown = len(facts["ranks"]) == 1 and facts["gpus"] > 1
        words, mood = ("not known from one rank", ui.Mood.NEUTRAL) if is_unknown else ("none", ui.Mood.GOOD)
        return ui.Figure("straggler", words.capitalize(), line=words, mood=mood)
    words = ", ".join(f"rank {row['rank']} ({row['factor']:.2f}x)" for row in slow[:MOST_NAMED])
    words += f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    if len(slow) == 1:
        words = f"rank {slow[0]['rank']} takes {slow[0]['factor']:.2f}x as long as its peers"
    if cost_s is not None:
        share = format_percent(cost_s / facts["step_s"]) if facts["step_s"] else "-"
        words += f": costs {format_seconds(cost_s)}, {share} of the step"
    name = "straggler" if len(slow) == 1 else "stragglers"
    return ui.Figure(name, str(len(slow)), words, line=words, mood=ui.Mood.BAD)


def _unevenness(row: Facts) -> float:
    return float(max(row["factor"], row["exchange_factor"]))


def _evidence_of_experts(row: Facts) -> list[str]:
    """Return the tokens of the ranks that share experts, and who waits for the busiest."""
    tokens = ", ".join(map(str, row["tokens"].values()))
    waits = [f"rank {rank} {format_seconds(s)}" for rank, s in row["waits_caused_s"].items() if s > 0]
    return [
        f"ranks {', '.join(row['tokens'])} work on {tokens} tokens, mean {row['mean_tokens']:.0f}; "
        f"the busiest of each exchange on {row['exchange_factor']:.2f}x its mean",
        *([f"waiting for it: {', '.join(waits[:8])}"] if waits else ()),
    ]


def _bus_bandwidth(row: Facts) -> ui.Cell:
    rate = row["busbw_bytes_per_s"]
    return ui.Cell("with work" if row["overlapped"] else ui.format_by_name("busbw_bytes_per_s", rate), rate)


def _critical_path(facts: Facts) -> ui.Table | None:
    """Return the long stretches of the path; short ones are summed."""
    path = facts["critical_path"]
    if not path:
        return None
    long = [step for step in path if step["duration_s"] >= 0.01 * facts["step_s"]]
    rows = []
    for step in long[:MOST_ROWS]:
        begin, took = format_seconds(step["start_s"]), format_seconds(step["duration_s"])
        batch = "-" if step["micro_batch"] is None else step["micro_batch"]
        rows.append((begin, "rank " + ", ".join(map(str, step["ranks"][:4])), step["operation"], batch, took))
    rest_s = sum(step["duration_s"] for step in path) - sum(step["duration_s"] for step in long)
    rows.append(("", "", f"{len(path) - len(long)} shorter ones", "", format_seconds(rest_s)))
    if len(long) > MOST_ROWS:
        rows.append(("", "", f"and {len(long) - MOST_ROWS} more (--json)", "", ""))
    lead = f"{format_seconds(facts['critical_path_s'])} with every collective, message and optimizer at its shortest"
    heads = ("at", "where", "operation", "micro-batch", "time")
    caption = "As it ran; what takes less than a hundredth of the step is summed"
    texts = {"caption": caption, "lead": f"{lead}.", "above": f"critical path: {lead}; as it ran:"}
    return ui.plain_table("Critical path", heads, rows, **texts, shown=ui.Shown.DETAIL)


def replay_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a Replay: as measured, replayed, and changed."""
    rates, layers, is_changed = facts["sequences_per_s"], facts["layers"], bool(facts["changes"])
    same_work, more_work = (is_changed and (facts["work_factor"] == 1) == is_same for is_same in (True, False))
    breakdown = _breakdown(facts["breakdown_s"], facts["step_s"])
    stage_pairs = None
    if is_changed:
        before, after = facts["before"]["breakdown_s"], facts["breakdown_s"]
        least_s, sides = ui.SMALLEST_SHARE * facts["replayed_step_s"], ("before", "after")
        parts = [part for part in after if max(before[part], after[part]) >= least_s]
        pairs = [ui.pair_of_change(PART_NAMES.get(part, part), before[part], after[part]) for part in parts]
        change = ui.signed_seconds(facts["change_s"])
        pairs.append(ui.ValuePair("step", facts["replayed_step_s"], facts["step_s"], change))
        heads = ("time breakdown (mean over ranks)", *sides, "change")
        breakdown = ui.bars_of_pairs(TIME_BREAKDOWN, pairs, sides, heads)
        stages = {row["stage"]: row for row in facts["before"]["stages"]}
        pairs = [
            ui.pair_of_change(f"stage {row['stage']} {part}", stages[row["stage"]][f"{part}_s"], row[f"{part}_s"])
            for row in facts["stages"][:MOST_LINES]
            if row["stage"] in stages
            for part in ("busy", "bubble")
        ]
        stage_pairs = ui.bars_of_pairs("Stages", pairs, sides, ("stage", *sides, "change"))
    return build_view(
        "replay",
        facts,
        replayed=replayed_figures(facts),
        changed=", ".join(facts["changes"]),
        same_work=same_work,
        more_work=more_work,
        rates=rates if rates["before"] and rates["after"] else {},
        of_each=facts["speedup_per_gpu"] if facts["speedup_per_gpu"] != facts["speedup"] else None,
        faster=(facts["speedup"] or 0.0) >= 1,
        layers=layers if layers["before"] != layers["after"] else {},
        breakdown=breakdown,
        stage_pairs=stage_pairs,
        timeline=ui.timeline_chart(timeline, "measured, replayed and changed, one below the other"),
    )


def replayed_figures(facts: Facts) -> list[ui.Figure]:
    """Return the measured step and the replayed one with its error."""
    return build_figures("replayed", facts, off=format_change(facts["error"], 2))


def kineto_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a KinetoAnalysis, with the logs of a recorded run where there are any."""
    ranks = facts["ranks"]
    first, count = ranks[0], len(ranks)
    parts_s = {
        part: sum(rank["breakdown_s"][part] / max(rank["steps"], 1) for rank in ranks) / count
        for part in first["breakdown_s"]
    }
    # How long the others wait in collectives that they come to last.
    steps, heads = max(first["steps"], 1), ("class of kernels", "per step", "share")
    slow = [{**row, "works": SLOW_WORDS[row["cause"]], "steps": steps} for row in facts["stragglers"]]
    by_group = facts["communication_by_group_s"]
    view = build_view(
        "kineto",
        facts,
        first=first,
        marked=first["steps"] or None,
        bottleneck=bottleneck_figures(parts_s, facts["step_s"], ("compute",)),
        slow=_slow_figures("kineto straggler", slow, count > 1, "one rank"),
        breakdown=_ranks(facts),
        slow_ranks=slow,
        advised=[{**row, "evidence": [row["evidence"]]} for row in facts.get("advice", ())],
        classes=ui.bars_of_times("Classes of kernels", facts["operations_s"], heads, lead="Per step, mean of ranks."),
        kernel=("name", lambda row: _short_name(row["name"])),
        groups=ui.bars_of_exposure("Communication", by_group, "communication of", shown=ui.Shown.DETAIL),
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


def _slow_figures(section: str, rows: Iterable[Facts], is_comparable: bool, of: str) -> list[ui.Figure]:
    """Return a figure for each that is slow, or one that says that none is, as far as they can be compared."""
    figures = [figure for row in rows for figure in build_figures(section, row)]
    return figures or [ui.Figure("straggler", "none" if is_comparable else f"not known from {of}")]


def _ranks(facts: Facts) -> ui.Bars:
    parts = list(facts["ranks"][0]["breakdown_s"])
    kinds = {KINDS.get(part, part): part for part in parts}
    bars, rows = [], []
    for rank in facts["ranks"]:
        count = max(rank["steps"], 1)
        seconds = {part: rank["breakdown_s"][part] / count for part in parts}
        amounts = {KINDS.get(part, part): amount for part, amount in seconds.items()}
        bars.append(ui.stack(f"rank {rank['rank']}", amounts, kinds, format_seconds(rank["step_s"])))
        waits = "-" if rank["wait_s"] is None else format_seconds(rank["wait_s"] / count)
        rows.append((rank["rank"], *map(format_seconds, seconds.values()), waits))
    heads = ("rank", *(HEADS.get(part, part) for part in parts), "waits")
    listed = ui.plain_table("Time breakdown by rank", heads, rows, most_lines=MOST_RANKS)
    most_s = max(bar.length for bar in bars)
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
        parts.append(ui.table_of(f"Log of {log['program']}", log["collectives"][:MOST_LOGGED], own, wide=True))
    return parts


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
        breakdown=ui.breakdown(title, shares_of(parts_s, OPTIMUS_PARTS), step_s),
        stage_bars=_optimus_stages(facts),
        modules=ui.bars_of_times("Timed modules", facts["operations_s"], heads, **on_page),
    )


def _optimus_stages(facts: Facts) -> ui.Bars:
    kinds, bars = {KINDS.get(part, part): title for part, title in OPTIMUS_PARTS.items()}, []
    for row in facts["stages"]:
        amounts = sum_by_key((KINDS.get(part, part), seconds) for part, seconds in row["parts_s"].items())
        bars.append(ui.stack(f"stage {row['stage']}", amounts, kinds, format_seconds(row["busy_s"]), "busy"))
    columns = ui.columns("stage ends_with layers=layers:g timed_forward=forward_s busy=busy_s bubble=bubble_s")
    most_s = max(bar.length for bar in bars)
    return ui.Bars("Stages", bars, kinds, most_s, table=ui.table_of("Stages", facts["stages"], columns))


def _slow_stages(facts: Facts) -> list[ui.Figure]:
    """Return the slow stages, and how much longer their forward passes take in a step."""
    forward_s = {row["stage"]: row["forward_s"] for row in facts["stages"]}
    rows = []
    for row in facts["stragglers"]:
        own_s = forward_s.get(row["stage"])
        extra_s = own_s * (1 - 1 / row["factor"]) * facts["micro_batches"] if own_s else None
        rows.append({**row, "extra_s": extra_s})
    return _slow_figures("optimus straggler", rows, len(facts["stages"]) > 2, "so few stages")


def link_sweep_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a measured sweep of a collective and its prediction."""
    disturbed = "* slower than the next larger size: disturbed, and not judged"
    sizes: list[ui.Figure] = []
    for name, row in facts["ranges"].items():
        if row:
            section = "sizes disturbed" if row["reached"] is None else "sizes judged"
            sizes += build_figures(section, row, name=name, fine=row["reached"] is None or row["reached"] >= 0.8)
    return build_view(
        "link sweep",
        facts,
        verdict="; ".join(row["means"] for row in facts["findings"]) or "all sizes reach the predicted bandwidth",
        sizes=sizes,
        short=[{**row, "evidence": (f"because {row['rule']}", f"look at {row['check']}")} for row in facts["findings"]],
        chart=_bandwidth(facts["rows"]),
        spikes=disturbed if any(row["spike"] for row in facts["rows"]) else "",
        size=("size_bytes", lambda row: format_bytes(row["size_bytes"]) + (" *" if row["spike"] else "")),
        predicted_with=("algorithm", lambda row: f"{row['algorithm']} {row['protocol']}"),
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


def _job_view(section: str, facts: Facts, timeline: Timeline | None = None, **more: Fact) -> ui.View:
    """Return the view of a file that a job left, headed by its step, its duration or how many calls it holds."""
    file, step_s, calls = FILE_TITLES.get(facts.get("format", ""), "log"), facts.get("step_s"), facts.get("calls")
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
    return _job_view(
        "step log", facts, timeline, is_slow=is_slow, straggler=straggler, run_s=facts.get("run_s") or None
    )


def collective_log_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the collectives that NCCL recorded: what hangs, who came last, how fast each was."""
    is_wrong = bool(facts["unfinished"] or facts["mismatched"])
    late = next((row for row in facts["stragglers"] if row["waited_s"] > 0), None)
    return _job_view("collective log", facts, timeline, is_wrong=is_wrong, is_right=not is_wrong, late=late)


def streams_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of the kernels that Nsight Systems saw, by GPU."""
    named = {words: facts["operations_s"][part] for part, words in STREAM_PARTS.items()}
    of = "the step" if facts["step_s"] else "the time of a GPU"
    slow = _slow_figures("stream straggler", facts["stragglers"], len(facts["devices"]) > 1, "one GPU")
    ranges = "spans" if facts.get("format") == "otlp" else "nvtx_ranges"
    more: Facts = {
        "bottleneck": bottleneck_figures(named, sum(named.values()), (STREAM_PARTS["compute"],), of),
        "slow": slow if facts["devices"] or facts["stragglers"] else [],
        ranges: facts["ranges"],
    }
    return _job_view("streams", facts, timeline, **more)


def stragglers_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a straggler trace: what slow operations cost, who is slow, and each part alone."""
    by_stage = {f"stage {stage}": value for stage, value in enumerate(facts["by_stage"])}
    by_replica = {f"replica {replica}": value for replica, value in enumerate(facts["by_dp_rank"])}
    alone = {**by_stage, **by_replica, **facts["by_kind"]}
    kind, factor = next(iter(facts["by_kind"].items()), (None, None))
    cost_s = max(0.0, facts["undelayed_s"] - facts["ideal_s"])
    more: Facts = {
        "cost_s": cost_s,
        "cost_share": cost_s / facts["step_s"] if facts["step_s"] else None,
        "worst": {"kind": kind, "factor": factor},
        "straggler": facts["stragglers"][0] if facts["stragglers"] else None,
        "fine": not facts["stragglers"],
        "alone": [{"name": name, "slowdown": value} for name, value in alone.items()],
    }
    return _job_view("stragglers", facts, timeline, **more)


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
    alerts = ", ".join(facts["active"])
    more: Facts = {
        "verdict": f"alerts: {alerts}" if alerts else "normal" if facts["steps"] else "no steps",
        "fine": not facts["active"] and facts["steps"] > 0,
        "forecast_s": facts["forecast_s"] or None,
        "total_steps": facts["total_steps"] or None,
        "has_steps": bool(facts["step_s"]),
        "has_none": not facts["step_s"],
        "chart": chart,
    }
    return build_view("watch", facts, **more)
