"""Views of measured Megatron runs: where the time of a step went, and what a change would do to it."""

from collections.abc import Mapping, Sequence

from stepcast.ir.timeline import Timeline
from stepcast.ir.types import FactDict, Facts
from stepcast.units import format_change, format_percent, format_rate, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_figures, build_view, plain_pairs
from stepcast.views.view import NAMES

MOST_LINES = 16
MOST_ROWS = 32
MOST_NAMED = 4
SMALLEST_SHARE = 5e-4
# Even routers differ by a few per cent from exchange to exchange.
UNEVEN_FACTOR = 1.15
PART_NAMES = NAMES["measured_parts"]
WORK = ("compute", "optimizer")
TIME_BREAKDOWN = "Time breakdown (mean over ranks)"
# Parts of measured runs by the colours of pages.
KINDS = NAMES["measured_colours"]
STAGE_KINDS = {"compute": "compute", "optimizer": "optimizer", "hidden": "waiting within the stage", "bubble": "bubble"}


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
    heads, on_page = ("operation", "mean of ranks"), FactDict(shown=ui.Shown.PAGE)
    detail = {"lead": "Mean of ranks.", "shown": ui.Shown.DETAIL}
    slow = " is slow: {factor:x} as long as others for the same work"
    remarks = [ui.Remark(f"rank {row['rank']}", str(ui.say(slow, row)), row["evidence"]) for row in facts["stragglers"]]
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
        stage_bars=_stages(facts),
        stragglers=ui.Remarks("Slow ranks", remarks, lead="What to look at first."),
        expert_loads=_experts(uneven_rows),
        operations=ui.bars_of_times("Operations", operations_s, heads, **detail),
        exposed=ui.ExposureBars("Exposed communication", facts["communication_s"], **on_page),
        communication=("name", lambda row: ": ".join(dict.fromkeys((row["operation"], row["name"])))),
        bus_bandwidth=_bus_bandwidth,
        traffic=facts["communication"],
        path=_critical_path(facts),
        ran=ui.FactList("What ran", plain_pairs(known), lead="Read or solved from the traces.", **on_page),
        timeline=ui.timeline_chart(timeline),
    )


def _breakdown(breakdown_s: Mapping[str, float], step_s: float) -> ui.Breakdown:
    large = [share for share in shares_of(breakdown_s) if share.amount >= SMALLEST_SHARE * step_s]
    return ui.Breakdown(TIME_BREAKDOWN, large, step_s)


def straggler_words(facts: Facts) -> str:
    """Return which ranks are slow and how much of the step they cost, in a line."""
    slow, cost_s = facts["stragglers"], facts.get("straggler_cost_s")
    if not slow:
        return "not known from one rank" if len(facts["ranks"]) == 1 and facts["gpus"] > 1 else "none"
    named = ", ".join(f"rank {row['rank']} ({row['factor']:.2f}x)" for row in slow[:MOST_NAMED])
    more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    if len(slow) == 1:
        named = f"rank {slow[0]['rank']} takes {slow[0]['factor']:.2f}x as long as its peers"
    if cost_s is None:
        return named + more
    share = format_percent(cost_s / facts["step_s"]) if facts["step_s"] else "-"
    return f"{named}{more}: costs {format_seconds(cost_s)}, {share} of the step"


def _straggler_figure(facts: Facts) -> ui.Figure:
    slow, words = facts["stragglers"], straggler_words(facts)
    if not slow:
        mood = ui.Mood.GOOD if words == "none" else ui.Mood.NEUTRAL
        return ui.Figure("straggler", words.capitalize(), line=words, mood=mood)
    name = "straggler" if len(slow) == 1 else "stragglers"
    return ui.Figure(name, str(len(slow)), words, line=words, mood=ui.Mood.BAD)


def _unevenness(row: Facts) -> float:
    return float(max(row["factor"], row["exchange_factor"]))


def _experts(rows: Sequence[Facts]) -> ui.Remarks:
    remarks = []
    for row in rows[:MOST_LINES]:
        tokens = ", ".join(map(str, row["tokens"].values()))
        evidence = [
            f"ranks {', '.join(row['tokens'])} work on {tokens} tokens, mean {row['mean_tokens']:.0f}; "
            f"the busiest of each exchange on {row['exchange_factor']:.2f}x its mean"
        ]
        waits = [f"rank {rank} {format_seconds(s)}" for rank, s in row["waits_caused_s"].items() if s > 0]
        if waits:
            evidence.append(f"waiting for it: {', '.join(waits[:8])}")
        words = f" has busy experts: {row['factor']:.2f}x the mean tokens of the ranks it shares them with"
        remarks.append(ui.Remark(f"rank {row['busiest_rank']}", words, evidence))
    return ui.Remarks("Expert imbalance", remarks)


def _stages(facts: Facts) -> ui.Bars | None:
    if len(facts["stages"]) < 2:
        return None
    bars = []
    for row in facts["stages"]:
        amounts = {kind: row[f"{kind.replace('hidden', 'wait')}_s"] for kind in STAGE_KINDS}
        note = f"bubble {format_seconds(row['bubble_s'])}"
        bars.append(ui.Bar(f"stage {row['stage']}", amounts, format_seconds(row["compute_s"]), note))
    columns = ui.columns("stage compute=compute_s optimizer=optimizer_s wait_within=wait_s bubble=bubble_s")
    listed = ui.table_of("Stages", facts["stages"], columns, most_lines=MOST_LINES)
    return ui.Bars("Stages", bars, STAGE_KINDS, facts["step_s"], table=listed)


def _bus_bandwidth(row: Facts) -> ui.Cell:
    rate = row["busbw_bytes_per_s"]
    words = "-" if rate is None else format_rate(rate)
    return ui.Cell("with work" if row["overlapped"] else words, rate)


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
    shortest = format_seconds(facts["critical_path_s"])
    lead = f"{shortest} with every collective, message and optimizer at its shortest"
    heads = ("at", "where", "operation", "micro-batch", "time")
    caption = "As it ran; what takes less than a hundredth of the step is summed"
    texts = {"caption": caption, "lead": f"{lead}.", "above": f"critical path: {lead}; as it ran:"}
    return ui.plain_table("Critical path", heads, rows, **texts, shown=ui.Shown.DETAIL)


def replay_view(facts: Facts, timeline: Timeline | None = None) -> ui.View:
    """Return the view of a Replay: as measured, replayed, and changed."""
    rates, layers, is_changed = facts["sequences_per_s"], facts["layers"], bool(facts["changes"])
    same_work, more_work = (is_changed and (facts["work_factor"] == 1) == is_same for is_same in (True, False))
    breakdown: ui.Part = _breakdown(facts["breakdown_s"], facts["step_s"])
    stage_pairs = None
    if is_changed:
        before, after = facts["before"]["breakdown_s"], facts["breakdown_s"]
        least_s, sides = SMALLEST_SHARE * facts["replayed_step_s"], ("before", "after")
        parts = [part for part in after if max(before[part], after[part]) >= least_s]
        pairs = [ui.ValuePair.of_change(PART_NAMES.get(part, part), before[part], after[part]) for part in parts]
        change = ui.signed_seconds(facts["change_s"])
        pairs.append(ui.ValuePair("step", facts["replayed_step_s"], facts["step_s"], change))
        heads = ("time breakdown (mean over ranks)", *sides, "change")
        breakdown = ui.PairTable(TIME_BREAKDOWN, pairs, sides, heads)
        stages = {row["stage"]: row for row in facts["before"]["stages"]}
        pairs = [
            ui.ValuePair.of_change(f"stage {row['stage']} {part}", stages[row["stage"]][f"{part}_s"], row[f"{part}_s"])
            for row in facts["stages"][:MOST_LINES]
            if row["stage"] in stages
            for part in ("busy", "bubble")
        ]
        stage_pairs = ui.PairTable("Stages", pairs, sides, ("stage", *sides, "change"))
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
