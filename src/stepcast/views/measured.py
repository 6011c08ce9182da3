"""Views of measured Megatron runs: where the time of a step went, and what a change would do to it."""

from collections.abc import Mapping, Sequence

from stepcast.ir.facts import Facts
from stepcast.ir.timeline import Timeline
from stepcast.units import format_change, format_percent, format_rate, format_seconds
from stepcast.views import view as ui
from stepcast.views.view import NAMES, micro_batches_words, plain_pairs

MOST_LINES = 16
DETAIL = {"most_lines": MOST_LINES, "sortable": True, "wide": True, "shown": ui.Shown.DETAIL}  # options of tables
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
    step_s = facts["step_s"]
    layout = f"tp {facts['tp']} x dp {facts['dp']} x pp {facts['pp']} = {facts['gpus']} GPUs"
    known = {name: facts["configuration"].get(name, "?") for name in ("layers", "hidden", "seq", "dtype")}
    model = "{layers} layers, hidden {hidden}, sequence {seq}, {dtype}".format(**known)
    about = (f"Megatron run on {facts['gpus']:,} GPUs", layout, model, _ranks_words(facts))
    operations_s = {**facts["operations_s"], "(between operations)": facts["gaps_s"]}
    heads = ("operation", "mean of ranks")
    layers = ui.columns("stage layers forward_per_layer=forward_s backward_per_layer=backward_s")
    ran = plain_pairs(facts["configuration"])
    return ui.View(
        f"{format_seconds(step_s)} measured: tp {facts['tp']}, dp {facts['dp']}, pp {facts['pp']}",
        ui.Headline.of_seconds(step_s, "per step, measured", about),
        _megatron_figures(facts, layout),
        [
            _breakdown(facts["breakdown_s"], step_s),
            _stages(facts),
            _stragglers(facts),
            _experts(facts),
            ui.bars_of_times("Operations", operations_s, heads, lead="Mean of ranks.", shown=ui.Shown.DETAIL),
            ui.ExposureBars("Exposed communication", facts["communication_s"], shown=ui.Shown.PAGE),
            _communication(facts),
            ui.table_of("Layers", facts["layers"], layers, most_lines=MOST_LINES, shown=ui.Shown.DETAIL),
            _critical_path(facts),
            ui.FactList("What ran", ran, lead="Read or solved from the traces.", shown=ui.Shown.PAGE),
            ui.timeline_chart(timeline),
        ],
        facts,
    )


def _breakdown(breakdown_s: Mapping[str, float], step_s: float) -> ui.Breakdown:
    large = [share for share in shares_of(breakdown_s) if share.amount >= SMALLEST_SHARE * step_s]
    return ui.Breakdown(TIME_BREAKDOWN, large, step_s)


def _ranks_words(facts: Facts) -> str:
    ranks = facts["ranks"]
    return f"{len(ranks)} of {facts['gpus']}" if len(ranks) > 1 else f"rank {ranks[0]} of {facts['gpus']}"


def _megatron_figures(facts: Facts, layout: str) -> list[ui.Figure]:
    known, step_s = facts["configuration"], facts["step_s"]
    named = {PART_NAMES.get(part, part): seconds for part, seconds in facts["breakdown_s"].items()}
    layers = f"{known['layers']} layers, " if "layers" in known else ""
    hidden = f"hidden {known['hidden']}, " if "hidden" in known else ""
    count = micro_batches_words(known["micro_batches"]) if "micro_batches" in known else "? micro-batches"
    experts = f", experts over {facts['ep']}" if facts["ep"] > 1 else ""
    only_rank = len(facts["ranks"]) == 1 and facts["gpus"] > 1
    bubble_s, exposed_s = format_seconds(facts["bubble_s"]), format_seconds(facts["exposed_comm_s"])
    share, exposed_share = map(format_percent, (facts["bubble_share"], facts["exposed_comm_s"] / (step_s or 1.0)))
    line = f"{bubble_s} ({share}){' in receives, transfers included' if only_rank else ', mean of ranks'}"
    figures = [
        ui.text_line("step", format_seconds(step_s)),
        *bottleneck_figures(named, step_s, [PART_NAMES[part] for part in WORK]),
        _straggler_figure(facts),
        *_expert_figures(facts),
        ui.Figure("bubble", share, bubble_s, line=line),
        ui.Figure("exposed communication", exposed_share, exposed_s, line=exposed_s),
    ]
    if facts["communication_s"]:
        group, worst = max(facts["communication_s"].items(), key=lambda item: item[1]["exposed"])
        exposed = f"{format_seconds(worst['exposed'])} exposed"
        figures.append(ui.Figure("costliest communication", group, exposed, shown=ui.Shown.PAGE))
    if len(facts["stages"]) > 1:
        above = format_percent(facts["imbalance"])
        line = f"busiest stage {above} above the mean"
        figures.append(ui.Figure("stage imbalance", f"+{above}", "busiest stage above the mean", line=line))
    seq, micro_batch, dtype = (known.get(name, "?") for name in ("seq", "micro_batch", "dtype"))
    model = f"{layers}{hidden}sequence {seq}, {count} of {micro_batch}, {dtype}"
    lines = {"layout": f"{layout}{experts}", "model": model, "ranks read": _ranks_words(facts)}
    return [*figures, *(ui.text_line(name, line) for name, line in lines.items())]


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


def _uneven(facts: Facts) -> list[Facts]:
    """Return the sets of ranks whose experts get clearly uneven numbers of tokens."""
    return [row for row in facts["expert_imbalance"] if max(row["factor"], row["exchange_factor"]) >= UNEVEN_FACTOR]


def _expert_figures(facts: Facts) -> list[ui.Figure]:
    uneven = _uneven(facts)
    if not uneven:
        return []
    worst = max(uneven, key=lambda row: max(row["factor"], row["exchange_factor"]))
    waits_s = max(worst["waits_caused_s"].values(), default=0.0)
    waited = f"; others wait up to {format_seconds(waits_s)} for it" if waits_s else ""
    busiest = f"rank {worst['busiest_rank']} gets {worst['factor']:.2f}x the mean number of tokens"
    return [ui.Figure("expert imbalance", f"{worst['factor']:.2f}x", busiest, line=f"{busiest}{waited}")]


def _experts(facts: Facts) -> ui.Remarks:
    remarks = []
    for row in _uneven(facts)[:MOST_LINES]:
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


def _stragglers(facts: Facts) -> ui.Remarks:
    remarks = []
    for row in facts["stragglers"]:
        words = f" is slow: {row['factor']:.2f}x as long as others for the same work"
        remarks.append(ui.Remark(f"rank {row['rank']}", words, row["evidence"]))
    return ui.Remarks("Slow ranks", remarks, lead="What to look at first.")


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


def _communication(facts: Facts) -> ui.Table:
    known = any(row["cluster_busbw_bytes_per_s"] is not None for row in facts["communication"])
    columns = ui.columns(
        "communication group size=size_bytes count=count, total=total_s transfer=transfer_s bus_bandwidth "
        + "cluster=cluster_busbw_bytes_per_s" * known,
        communication=("name", lambda row: ": ".join(dict.fromkeys((row["operation"], row["name"])))),
        bus_bandwidth=_bus_bandwidth,
    )
    caption = "By operation; bandwidth where no computation ran at the same time"
    return ui.table_of("Communication", facts["communication"][:MOST_ROWS], columns, caption=caption, **DETAIL)


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
    changed = bool(facts["changes"])
    counted = micro_batches_words(facts["micro_batches"])
    layout = f"tp {facts['tp']} x dp {facts['dp']} x pp {facts['pp']}, {counted}"
    about = (", ".join(facts["changes"]) or "as it was measured", layout)
    parts: list[ui.Part | None] = [_breakdown(facts["breakdown_s"], facts["step_s"])]
    if changed:
        parts = [_before_after(facts), _stages_before_after(facts)]
    parts.append(ui.timeline_chart(timeline, "measured, replayed and changed, one below the other"))
    headline = ui.Headline.of_seconds(facts["step_s"], f"per step{', if changed so' if changed else ''}", about)
    title = f"{format_seconds(facts['step_s'])} replayed"
    return ui.View(title, headline, _replay_figures(facts, layout), parts, facts)


def replayed_figures(facts: Facts) -> list[ui.Figure]:
    """Return the measured step and the replayed one with its error."""
    replayed, error = format_seconds(facts["replayed_step_s"]), f"{format_change(facts['error'], 2)} of the measured"
    return [
        ui.Figure("measured step", format_seconds(facts["measured_step_s"])),
        ui.Figure("replayed", replayed, error, line=f"{replayed} ({error})"),
    ]


def _replay_figures(facts: Facts, layout: str) -> list[ui.Figure]:
    figures = replayed_figures(facts)
    if not facts["changes"]:
        return figures
    step, change = format_seconds(facts["step_s"]), ui.signed_seconds(facts["change_s"])
    figures.append(ui.text_line("changed", ", ".join(facts["changes"])))
    if facts["work_factor"] == 1:
        figures.append(ui.text_line("then", f"{step} ({facts['speedup']:.2f}x as fast, {change})"))
    else:
        sequences = f"for {facts['work_factor']:.3g}x the sequences"
        figures.append(ui.text_line("then", f"{step} ({facts['step_factor']:.2f}x as long, {change}) {sequences}"))
    if facts["speedup"] is not None:
        rates = facts["sequences_per_s"]
        line = f"{facts['speedup']:.2f}x"
        if rates["before"] and rates["after"]:
            line += f", {rates['after']:.4g} sequences/s in place of {rates['before']:.4g}"
        if facts["speedup_per_gpu"] != facts["speedup"]:
            line += f"; of each GPU {facts['speedup_per_gpu']:.2f}x"
        shown = ui.Shown.PAGE if facts["work_factor"] == 1 else ui.Shown.ALWAYS
        mood = ui.Mood.GOOD if facts["speedup"] >= 1 else ui.Mood.BAD
        figures.append(ui.Figure("throughput", f"{facts['speedup']:.2f}x", line=line, mood=mood, shown=shown))
    figures.append(ui.Figure("change", change, "of the step", shown=ui.Shown.PAGE))
    layers = facts["layers"]
    if layers["before"] != layers["after"]:
        words = f"{layers['after']} layers in place of {layers['before']}: not the same work"
        figures.append(ui.text_line("model", words))
    return [*figures, ui.text_line("layout", layout)]


SIDES = ("before", "after")


def _before_after(facts: Facts) -> ui.PairTable:
    before, after = facts["before"]["breakdown_s"], facts["breakdown_s"]
    rows = [
        ui.ValuePair.of_change(PART_NAMES.get(part, part), before[part], after[part])
        for part in after
        if max(before[part], after[part]) >= SMALLEST_SHARE * facts["replayed_step_s"]
    ]
    rows.append(ui.ValuePair("step", facts["replayed_step_s"], facts["step_s"], ui.signed_seconds(facts["change_s"])))
    return ui.PairTable(TIME_BREAKDOWN, rows, SIDES, ("time breakdown (mean over ranks)", *SIDES, "change"))


def _stages_before_after(facts: Facts) -> ui.PairTable:
    before = {row["stage"]: row for row in facts["before"]["stages"]}
    rows = [
        ui.ValuePair.of_change(f"stage {row['stage']} {part}", before[row["stage"]][f"{part}_s"], row[f"{part}_s"])
        for row in facts["stages"][:MOST_LINES]
        if row["stage"] in before
        for part in ("busy", "bubble")
    ]
    return ui.PairTable("Stages", rows, SIDES, ("stage", *SIDES, "change"))
