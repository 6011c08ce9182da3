"""Views of a simulated step: how long, where the time goes, whether it fits, what to change, and use of its links."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepcast.ir.types import ChangeFacts, FactDict, Facts, RooflineFacts, group_by_key, read_interval, sum_by_key
from stepcast.units import GIB, TFLOPS, format_bytes, format_change, format_percent, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import LAYOUT, build_view, config_notes, phrase, plain_pairs
from stepcast.views.view import NAMES

if TYPE_CHECKING:
    from stepcast.ir.timeline import Timeline

MOST_LINES = 16
MOST_STAGES = 64
LEAST_SHOWN = 0.001  # of the step, for a column of its own
STATED = ("parameters", "gradients", "optimizer", "activations")  # of memory, as the JSON contract has them
PART_NAMES = NAMES["parts"]
MEMORY_KINDS = NAMES["memory_colours"]
GROUP_NAMES = NAMES["groups"]
# What usually makes a part smaller.
REMEDIES = NAMES["remedies"]
OPERATOR_NAMES, OPERATOR_COLOURS = NAMES["operators"], NAMES["operator_colours"]
MOST_OPERATORS = 12
MOST_DOTS = 80
MOST_LINKS = 10
# Sharing links costs so much of a step that it is worth a look.
COSTLY = 0.01


def step_view(
    facts: Facts,
    timeline: "Timeline | None" = None,
    roofline: RooflineFacts | None = None,
    changes: Sequence[ChangeFacts] = (),
    explain_memory: bool = False,
) -> ui.View:
    """Return the view of a StepReport.

    *changes* are predictions with one option changed; *explain_memory* adds the memory of each stage
    to the text.
    """
    memory, run = facts["memory_bytes"], facts["run"]
    shares = [ui.Share(part, PART_NAMES[part], seconds) for part, seconds in split_launch_overhead(facts).items()]
    groups = facts["communication_s"]
    group, worst = max(groups.items(), key=lambda item: item[1]["exposed"], default=("", {}))
    costliest = phrase("costliest", worst, name=GROUP_NAMES.get(group, group).capitalize()) if groups else ""
    lead = "Only exposed communication counts; the parts sum to the step."
    # The head of the page states the run, unless neither a model nor a workload is named.
    stated = [] if facts.get("model") or facts.get("workload") else plain_pairs(run)
    jittered = []
    if known := facts.get("jitter"):
        ranks = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in known["percentiles_s"].items())
        jittered = [{**known, "ranks": ranks}]
    savings = _savings(facts)
    left_out = [facts] if "remedies_left_out" in facts else []
    has_samples = run.get("seq") == 1  # of captured programs, such as images
    view = build_view(
        "step",
        facts,
        subject=subject(facts),
        unit="samples" if has_samples else "tokens",
        has_samples=has_samples,
        has_sequences=not has_samples,
        degrees=layout_words(run),
        made_with=" · ".join(str(run[name]) for name in ("precision", "framework") if run.get(name)),
        band=step_band(facts, facts["step_s"]),
        fits=bool(memory) and memory["verdict"] == "fits",
        verdict=str(memory["verdict"]).capitalize() if memory else None,
        memory=memory_words(memory) if memory else None,
        worst={**worst, "name": GROUP_NAMES.get(group, group)},
        interval=read_interval(facts).words,
        interval_source=interval_source(facts),
        to_fit=[ui.text_line(name, words) for name, words in remedy_pairs(facts)] if memory else [],
        largest=max(shares, key=lambda share: share.amount)._asdict(),
        has_stages=len(facts["stages"]) > 1,
        has_one_stage=len(facts["stages"]) == 1,
        Change=lambda remedy: ui.Cell(remedy["options"], code=True),
        no_remedies=[] if facts.get("remedies", True) or left_out else [{"why": remedy_pairs(facts)[0][1]}],
        left_out=left_out,
        breakdown=ui.breakdown("Time breakdown (mean over stages)", shares, facts["step_s"], lead=lead),
        changes=_changes(facts["step_s"], changes) if changes else None,
        savings=[] if changes else savings,
        computing=[] if changes or savings else [facts],
        communication=ui.bars_of_exposure("Communication", groups, names=GROUP_NAMES, lead=costliest),
        **_stage_values(facts),
        memory_bars=_memory(facts, explain_memory),
        share=lambda row: format_percent(row["seconds"] / facts["step_s"]),
        jittered=jittered,
        all_sources=[*stated, *facts["sources"].items()],
        timeline=ui.timeline_chart(timeline),
        roofline=_roofline(roofline) if roofline is not None else None,
    )
    return ui.replace(view, config=config_notes(facts["config"]) if facts.get("config") else ())


def subject(facts: Facts) -> str:
    """Return what the step is of, in a line."""
    run = facts.get("run") or {}
    model = run.get("model") or facts.get("model") or facts.get("workload") or "workload"
    where = run.get("cluster") or facts.get("cluster")
    gpus = "1 GPU" if facts["gpus"] == 1 else f"{facts['gpus']:,} GPUs"
    return f"{model} on {gpus}" + (f", {where}" if where else "")


def layout_words(run: Facts) -> str:
    """Return the degrees of parallelism above one."""
    return " · ".join(f"{name} {run[name]}" for name in LAYOUT if run.get(name, 1) not in (0, 1)) or "one GPU"


def step_band(facts: Facts, step_s: float) -> ui.HeadlineInterval:
    """Return the interval of a step time."""
    known = read_interval(facts)
    ends = format_seconds(known.low_s), format_seconds(known.high_s)
    return ui.HeadlineInterval(known.low_s, step_s, known.high_s, *ends, known.words)


def interval_source(facts: Facts) -> str | None:
    """Return what the interval of a step was learnt from; None where nothing is estimated."""
    band = facts["uncertainty"]
    if band["low_s"] == band["high_s"]:
        return None
    if band["of"] == "prices" and "recorded" in facts["sources"]:
        return "of communication alone: compute times are those of the file"
    if band["of"] == "prices":
        return "from the intervals of all cost estimates"
    wider = f"; widened for {' and '.join(band['widened'])}" if band["widened"] else ""
    return f"from {band['rows']} measured runs, {band['of']}{wider}"


def memory_words(memory: Facts) -> str:
    """Return the memory verdict of a step: bytes used, bytes available, whether it fits, and the interval."""
    verdict = memory["verdict"] if memory["fits"] else memory["verdict"].upper()
    return phrase("memory", memory, shown=verdict, uncertain=memory["low"] != memory["high"])


def remedy_pairs(facts: Facts) -> list[tuple[str, str]]:
    """Return the changes that make the step fit, the fastest first."""
    if "remedies" not in facts:
        return []
    left_out = [("left out", facts["remedies_left_out"])] if "remedies_left_out" in facts else []
    if not facts["remedies"] and not left_out:
        why = "no recomputation, sharding, smaller micro-batch or split of these GPUs does: give more of them"
        return [("to fit", f"{why}, or let 'stepcast search' look")]
    remedies = [
        (
            "or" if index else "to fit",
            f"{remedy['options']}: {format_seconds(remedy['step_s'])} ({format_change(remedy['slower'], 0)}), "
            f"{format_bytes(remedy['memory_bytes'])}" + (", tight" if remedy["verdict"] == "tight" else ""),
        )
        for index, remedy in enumerate(facts["remedies"])
    ]
    return remedies + left_out


def split_launch_overhead(facts: Facts) -> dict[str, float]:
    """Return the parts of a predicted step with CPU launch overhead apart from the other overheads."""
    parts, stages = dict(facts["breakdown_s"]), facts.get("stages") or ()
    rest_s = parts.pop("other", 0.0)
    host_s = min(rest_s, sum(stage.get("host_s", 0.0) for stage in stages) / max(1, len(stages)))
    return {**parts, "host": host_s, "other": rest_s - host_s}


def _first_and_last(stages: Sequence[Facts], most: int) -> Sequence[Facts]:
    return stages if len(stages) <= most else [*stages[: most - 1], stages[-1]]


def _stage_values(facts: Facts) -> FactDict:
    """Return the stages that bars and table show, and which of them is the busiest; nothing for a single stage."""
    stages, step_s = facts["stages"], facts["step_s"]
    if len(stages) < 2:
        return {}
    has_host = any(stage["host_s"] > LEAST_SHOWN * step_s for stage in stages)
    rows = [{**row, "shown_host_s": row["host_s"] if has_host else None, "whole_s": step_s} for row in stages]
    busiest = max(stages, key=lambda stage: stage["busy_s"])
    mean_s = sum(stage["busy_s"] for stage in stages) / len(stages)
    above = busiest["busy_s"] / mean_s - 1 if mean_s else 0.0
    lead = f"Stage {busiest['stage']} is the busiest, {format_percent(above)} above the mean."
    if above < LEAST_SHOWN:
        lead = "All stages are equally busy."
    if (left_out := len(stages) - MOST_STAGES) > 0:
        lead += f" {left_out} stages in the middle are left out."
    most = {"charted_stages": MOST_STAGES, "listed_stages": MOST_LINES}
    return {"stage_lead": lead, **{name: _first_and_last(rows, count) for name, count in most.items()}}


def _memory(facts: Facts, explain: bool) -> ui.Bars | None:
    memory = facts["memory_bytes"]
    if memory is None:
        return None
    stages, capacity = memory["stages"], memory["capacity"]
    kinds, bars = {f"mem-{name}": words for name, words in MEMORY_KINDS.items()}, []
    for stage in _first_and_last(stages, MOST_STAGES):
        parts = {name: value for name, value in stage.items() if name in MEMORY_KINDS}
        parts["rest"] = stage["total"] - sum(parts.values())
        amounts = {f"mem-{name}": parts[name] / GIB for name in MEMORY_KINDS if parts.get(name, 0) > 1}
        label = f"stage {stage['stage']}" if len(stages) > 1 else "each GPU"
        share = format_percent(stage["total"] / capacity)
        bars.append(ui.stack(label, amounts, kinds, format_bytes(stage["total"]), share, show="{:.3g} GiB".format))
    lead = phrase(
        "memory-of-stages",
        memory,
        lacking=str(memory["verdict"]).capitalize() if memory["verdict"] != "fits" else None,
        left_bytes=abs(capacity - memory["total"]),
        what="free" if memory["fits"] else "missing",
        uncertain=memory["low"] < memory["high"],
    )
    most = max(capacity, memory["total"])
    marks = [("capacity", capacity / GIB, f"capacity {format_bytes(capacity)}")]
    texts: Facts = {"show": "{:.3g} GiB".format, "table": _memory_table(memory) if explain else None, "lead": lead}
    return ui.Bars("Memory", bars, kinds, most / GIB * 1.02, marks=marks, **texts)


def _memory_table(memory: Facts) -> ui.Table:
    """Return what fills the GPUs of each stage; on a narrow terminal the small parts are summed."""
    stages = memory["stages"]
    names = [name for name in stages[0] if name not in ("stage", "total")]
    used = [name for name in names if any(stage[name] for stage in stages)]
    small = [name for name in used if name not in STATED]
    note = f"GiB per GPU at the peak; capacity {memory['capacity'] / GIB:.2f}"

    def list_stages(groups: Mapping[str, Sequence[str]], narrow: ui.Table | None) -> ui.Table:
        rows = []
        for stage in _first_and_last(stages, MOST_LINES):
            sizes = [*(sum(stage[name] for name in group) for group in groups.values()), stage["total"]]
            rows.append((stage["stage"], *(f"{size / GIB:.2f}" for size in sizes)))
        return ui.plain_table("Memory", ("stage", *groups, "total"), rows, note=note, narrow=narrow)

    summed = list_stages({**{name: [name] for name in used if name in STATED}, "other": small}, None)
    return list_stages({name: [name] for name in used}, summed)


def _savings(facts: Facts) -> list[FactDict]:
    """Return what the largest parts could save at most, and how."""
    step_s = facts["step_s"] or 1.0
    largest_first = sorted(facts["breakdown_s"].items(), key=lambda item: -item[1])
    large = [(part, seconds / step_s) for part, seconds in largest_first if seconds >= 0.01 * step_s]
    return [
        {"most": share, "part": PART_NAMES[part], "remedy": REMEDIES[part]} for part, share in large if part in REMEDIES
    ][:4]


def _changes(step_s: float, changes: Sequence[ChangeFacts]) -> ui.Bars:
    ordered = sorted(changes, key=lambda change: (not change["fits"], change["step_s"]))
    own = format_seconds(step_s)
    bars = [ui.Bar("this run", [ui.BarPiece("band", step_s, own)], own, strong=True)]
    for change in ordered:
        kind = "bad" if not change["fits"] else "good" if change["step_s"] < step_s else "hidden"
        more: Facts = {**change, "slower": change["step_s"] / step_s - 1, "misfit": not change["fits"]}
        note = ui.say("{slower:+%}[, {memory_bytes}][{misfit:!}, does not fit]", more)
        piece = ui.BarPiece(kind, change["step_s"], change["command"])
        bars.append(ui.Bar(change["change"], [piece], format_seconds(change["step_s"]), note or ""))
    verdict = "None of these is faster and fits."
    if best := next((change for change in ordered if change["fits"] and change["step_s"] < step_s), None):
        verdict = f"Best of these: {best['change']}, {ui.signed_seconds(best['step_s'] - step_s)}."
    kinds = {"good": "faster, and fits", "hidden": "slower", "bad": "does not fit"}
    most_s, commands = max(step_s, *(change["step_s"] for change in ordered)), [row["command"] for row in ordered]
    lead = f"{verdict} Each row is a prediction of its own, with one option changed."
    on_page: Facts = {"marks": [("capacity", step_s, "this run")], "lead": lead, "shown": ui.Shown.PAGE}
    return ui.Bars("What to change", bars, kinds, most_s, commands=commands, **on_page)


# ---- operators against what the GPU could do -----------------------------------------------------------


def _roofline(facts: RooflineFacts) -> ui.Columns:
    """Return a dot for each operator, as large as the time it takes, below the roof of its GPU."""
    operators = facts["operators"][:MOST_DOTS]
    total_s = sum(operator["seconds"] for operator in facts["operators"])
    peak, rate = facts["peak_flops"], facts["bytes_per_s"]
    ridge = peak / rate
    intensities = [operator["flops"] / operator["bytes"] for operator in operators]
    reached = [operator["flops"] / operator["seconds"] for operator in operators]
    low, high = min([0.1, *intensities]) / 2, max([ridge * 4, *intensities]) * 2
    x = ui.Axis(low, high, lambda value: f"{value:g}", "FLOP for each byte moved")
    y = ui.Axis(min([peak / 1e3, *reached]) / 2, peak * 2, lambda value: f"{value / TFLOPS:g}", "TFLOP/s reached")
    dots = []
    for intensity, speed, operator in zip(intensities, reached, operators, strict=True):
        kind = OPERATOR_COLOURS.get(operator["kind"], "other")
        radius = 3 + 15 * (operator["seconds"] / total_s) ** 0.5
        dots.append(ui.Dot(intensity, speed, kind, phrase("operator", operator, total_s=total_s, rate=speed), radius))
    kinds = dict.fromkeys(operator["kind"] for operator in operators)
    roof = ui.Line(((x.low, x.low * rate), (ridge, peak), (x.high, peak)), "roof")
    label = f"Roofline of {len(operators)} operators on {facts['gpu']}"
    legend = [(OPERATOR_COLOURS[kind], OPERATOR_NAMES[kind]) for kind in kinds if kind in OPERATOR_NAMES]
    chart = ui.Scatter("Roofline", x, y, [roof, *dots], label, legend=legend, log=True)
    shown = facts["operators"][:MOST_OPERATORS]
    rows = [{**operator, "reached_flops": operator["flops"] / operator["seconds"]} for operator in shown]
    columns = ui.columns(
        "operator=name time=seconds:s of_computing count=count:,.0f TFLOP/s=reached_flops/TFLOPS:,.1f bound_by=bound",
        of_computing=("seconds", lambda row: format_percent(row["seconds"] / total_s)),
    )
    caption = f"The {len(shown)} operators that take longest, of {len(facts['operators'])}; on an average GPU"
    table = ui.table_of("Operators", rows, columns, caption=caption, sortable=True)
    return ui.Columns("Operators", [chart], [table], lead=phrase("roofline", facts), wide=True, shown=ui.Shown.PAGE)


def network_view(facts: Facts) -> ui.View:
    """Return the view of a step whose communication shares links."""
    step_s, hottest = facts["step_s"], facts["hottest"]
    tiers = [tier for tier in facts["tiers"] if tier["bytes"] > 0]
    sharing_cost = step_s / facts["alone_step_s"] - 1 if facts["alone_step_s"] else 0.0
    busiest = hottest[0] if hottest else {}
    full = busiest["full_s"] / step_s if busiest and step_s else 0.0
    lead = "Use of the busiest link of each tier, from the start of the step to its end."
    of_tiers = [(tier["tier"], tier["busiest_over_time"]) for tier in tiers]
    of_links = [(_link_name(tier), tier["share_over_time"]) for tier in hottest[:MOST_LINKS]]
    darker = "A line for each link, the busiest first. Darker is more use; red is more than 94 %."
    on_page: Facts = {"lead": darker, "wide": True, "shown": ui.Shown.PAGE}
    use, use_of_links = "use of the busiest link of each tier over time", "use of each link over time"
    return build_view(
        "network",
        facts,
        costs=f"sharing links costs {format_percent(sharing_cost)}",
        unused=not tiers,
        busiest={**busiest, "equal": busiest.get("alike") if busiest.get("alike", 1) > 1 else None},
        at_capacity=(format_percent(full) if full else "0 %") if busiest else None,
        mood=ui.Mood.BAD if sharing_cost >= COSTLY else ui.Mood.NEUTRAL,
        used_tiers=tiers,
        tiers_over_time=ui.HeatMap("Tiers over time", of_tiers, step_s, use, lead=lead, wide=True),
        links_over_time=ui.HeatMap("The busiest links over time", of_links, step_s, use_of_links, **on_page),
        busiest_links=_busiest_links(hottest, step_s) if tiers else None,
        slowed=_slowed_groups(facts["operations"]),
    )


def _link_name(link: Facts) -> str:
    others = link["alike"] - 1
    return f"{link['link']}, and {others:,} equal ones" if others else str(link["link"])


def _busiest_links(links: Sequence[Facts], step_s: float) -> ui.Bars | None:
    if not links:
        return None
    groups = sorted({name for link in links for name in link["users"]})
    bars = []
    for link in links[:MOST_LINKS]:
        total = sum(link["users"].values()) or 1.0
        users = [(group, size) for group, size in sorted(link["users"].items()) if size]
        amounts = sum_by_key((_group_colour(group), size / total * link["share"]) for group, size in users)
        tips = ", ".join(f"{group} {format_bytes(size)}" for group, size in users)
        at_capacity = f"at capacity {format_percent(link['full_s'] / step_s)}" if step_s else ""
        share, tip = format_percent(link["share"]), f"{link['link']}: {tips}"
        pieces = [ui.BarPiece(kind, amount, tip) for kind, amount in amounts.items()]
        bars.append(ui.Bar(_link_name(link), pieces, share, at_capacity))
    columns = ui.columns(
        "busiest_links=link links=alike, mean_use=share at_capacity used_by",
        at_capacity=lambda link: format_percent(link["full_s"] / step_s) if step_s else "-",
        used_by=lambda link: _users_words(link["users"]),
    )
    named = group_by_key((_group_colour(group), group) for group in groups)
    kinds = {kind: ", ".join(names) for kind, names in named.items()}
    most, listed = max(link["share"] for link in links), ui.table_of("Busiest links", links[:MOST_LINKS], columns)
    lead = "Mean use of each link by the groups that use it, and the share of the step at capacity."
    shares: Facts = {"show": format_percent, "unit": 0.01, "table": listed, "lead": lead, "wide": True}
    return ui.Bars("Who uses the busiest links", bars, kinds, most, **shares)


def _users_words(users: Mapping[str, float]) -> str:
    """Return the groups whose bytes a link carries, most first: ``dp 80 %, pp 20 %``."""
    total = sum(users.values()) or 1.0
    shares = {name: size / total for name, size in users.items()}
    return ", ".join(f"{name} {format_percent(share, 0)}" for name, share in shares.items() if share >= 0.005)


def _group_colour(group: str) -> str:
    """Return the colour of a group; those of its family share one."""
    return next((kind for kind in ("tp", "cp", "ep", "pp", "dp") if kind in group), "other")


def _slowed_groups(operations: Sequence[Facts]) -> list[FactDict]:
    """Return each kind and group of communication, summed over stages, the most slowed first."""
    rows: list[FactDict] = []
    for (kind, group), same in group_by_key(((row["operation"], row["group"]), row) for row in operations).items():
        runs, alone_s, took_s = (sum(row[name] for row in same) for name in ("count", "alone_s", "took_s"))
        times = {"alone_s": alone_s, "took_s": took_s, "slowdown": took_s / alone_s if alone_s > 0 else 1.0}
        slowest = max(1.0, *(row["slowest"] for row in same))
        rows.append({"operation": kind, "group": group, "runs": runs, "slowest": slowest, **times})
    return sorted(rows, key=lambda row: row["alone_s"] - row["took_s"])
