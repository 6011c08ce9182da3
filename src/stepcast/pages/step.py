"""The page of a simulated step: how long, where it goes, whether it fits, and what to change."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.facts import ChangeFacts, RooflineFacts, band_of
from stepcast.ir.timeline import Timeline
from stepcast.pages.advice import advice_section, remedies_section
from stepcast.pages.blocks import band, card, pairs, plain_pairs, stacked, timed_answer, waterfall
from stepcast.pages.communication import exposed_section
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Markup, join, tag
from stepcast.pages.roofline import roofline_section
from stepcast.pages.timeline import timeline_section
from stepcast.report.step import micro_batches, told_parts
from stepcast.units import GIB, format_bytes, format_money, format_percent, format_seconds, format_short_count

Facts = Mapping[str, Any]
MOST_STAGES = 64
STAGE_KINDS = {
    "compute": "busy",
    "exposed": "exposed communication",
    "host": "waiting for the host",
    "bubble": "bubble",
}
MEMORY_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "temporary": "temporary",
    "communication": "communication buffers",
    "fragmentation": "fragmentation",
    "framework": "framework",
    "rest": "other",
}
GROUP_NAMES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "dp": "data parallel",
    "pp": "pipeline messages",
    "expert-tp": "tensor parallel of experts",
    "expert-dp": "data parallel of experts",
    "expert-shard": "sharded experts",
    "expert-replica": "replicas of sharded experts",
    "mirror": "copies of layers",
    "world": "all GPUs",
    "embedding": "shared embedding",
    "shard": "sharded weights",
    "replica": "replicas of shards",
    "to-host": "to the host",
    "from-host": "from the host",
}


def step_page(
    found: Facts,
    about: About,
    timeline: Timeline | None = None,
    roofline: RooflineFacts | None = None,
    changes: Sequence[ChangeFacts] = (),
) -> Page:
    """Of the facts of a StepReport, as its text report has them."""
    sections = [
        remedies_section(found),
        _goes(found),
        advice_section(found, changes),
        _stages(found),
        _memory(found),
        _communication(found),
        _asked(found),
        timeline_section(timeline, about.links),
        roofline_section(roofline) if roofline is not None else None,
    ]
    title = f"{format_seconds(found['step_s'])} per step: {subject(found)}"
    return Page(
        title,
        _headline(found),
        sections,
        about,
        found,
        found["assumptions"],
        found["warnings"],
    )


def subject(found: Facts) -> str:
    """What the step is of, in a line."""
    run = found.get("run") or {}
    model = run.get("model") or found.get("model") or found.get("workload") or "workload"
    where = run.get("cluster") or found.get("cluster")
    return f"{model} on {found['gpus']:,} GPUs" + (f", {where}" if where else "")


def layout_words(run: Facts) -> str:
    names = ("tp", "cp", "ep", "pp", "vpp", "dp")
    return " · ".join(f"{name} {run[name]}" for name in names if run.get(name, 1) not in (0, 1)) or "one GPU"


def _headline(found: Facts) -> Markup:
    run, step_s = found["run"], found["step_s"]
    told = band_of(found)
    about = join(
        (
            tag("strong", subject(found)),
            tag("span", layout_words(run), class_="layout"),
            tag("span", _batch_words(found), class_="batch"),
        )
    )
    drawn = band(
        told.low_s, step_s, told.high_s, (format_seconds(told.low_s), format_seconds(told.high_s)), told.words
    )
    return timed_answer(step_s, "per step", about, drawn, _cards(found))


def _batch_words(found: Facts) -> str:
    run, words = found["run"], [f"{found['schedule']}, {micro_batches(found['micro_batches'])}"]
    if "global_batch" in run:
        words.insert(0, f"{run['global_batch']:,} sequences of {run['seq']:,} tokens")
    words += [str(run[name]) for name in ("precision", "framework") if run.get(name)]
    return " · ".join(words)


def _cards(found: Facts) -> list[Markup]:
    memory, step_s = found["memory_bytes"], found["step_s"] or 1.0
    cards = []
    if memory is not None:
        used, has = format_bytes(memory["total"]), format_bytes(memory["capacity"])
        share = format_percent(memory["total"] / memory["capacity"])
        cards.append(
            card(
                "Memory",
                str(memory["verdict"]).capitalize(),
                f"{used} of {has}, {share}",
                "good" if memory["verdict"] == "fits" else "bad",
            )
        )
    cards.append(card("Pipeline bubble", format_percent(found["bubble_fraction"]), "of the step"))
    hurts = max(found["communication_s"].items(), key=lambda each: each[1]["exposed"], default=None)
    if hurts:
        share = format_percent(hurts[1]["exposed"] / step_s)
        cards.append(
            card(
                "Costliest communication", GROUP_NAMES.get(hurts[0], hurts[0]), f"{share} of the step exposed"
            )
        )
    if found["mfu"] is not None:
        cards.append(
            card("MFU", format_percent(found["mfu"]), f"{found['tflops_per_gpu']:,.0f} TFLOP/s per GPU")
        )
        per_gpu = found["tokens_per_s"] / found["gpus"]
        cards.append(
            card(
                "Tokens a second",
                format_short_count(found["tokens_per_s"]),
                f"{per_gpu:,.0f} per GPU",
            )
        )
    if training := found.get("training"):
        cost = "" if training["cost"] is None else f", {format_money(training['cost'], training['currency'])}"
        cards.append(
            card(
                f"{format_short_count(training['tokens'])} tokens",
                f"{training['days']:,.1f} days",
                f"{training['gpu_hours']:,.0f} GPU-hours{cost}",
            )
        )
    return cards


def _goes(found: Facts) -> Section:
    lead = "Mean over stages. Communication counts where no computation hides it; the parts sum to the step."
    return Section("Where the step goes", waterfall(told_parts(found), found["step_s"]), lead)


def _stages(found: Facts) -> Section | None:
    stages = found["stages"]
    if len(stages) < 2:
        return None
    shown = stages if len(stages) <= MOST_STAGES else [*stages[: MOST_STAGES - 1], stages[-1]]
    rows = [
        (
            f"stage {each['stage']}",
            {
                "compute": each["busy_s"],
                "exposed": each["exposed_s"],
                "host": each["host_s"],
                "bubble": each["bubble_s"],
            },
            (
                format_seconds(each["busy_s"]),
                tag("small", f"bubble {format_percent(each['bubble_s'] / found['step_s'])}"),
            ),
        )
        for each in shown
    ]
    busiest = max(stages, key=lambda each: each["busy_s"])
    mean = sum(each["busy_s"] for each in stages) / len(stages)
    above = format_percent(busiest["busy_s"] / mean - 1) if mean else "0 %"
    lead = f"Stage {busiest['stage']} is the busiest, {above} above the mean."
    if len(shown) < len(stages):
        lead += f" {len(stages) - len(shown)} stages in the middle are left out."
    return Section("Stages", stacked(rows, STAGE_KINDS, found["step_s"], format_seconds), lead)


def _memory(found: Facts) -> Section | None:
    memory = found["memory_bytes"]
    if memory is None:
        return None
    stages = memory["stages"]
    shown = stages if len(stages) <= MOST_STAGES else [*stages[: MOST_STAGES - 1], stages[-1]]
    capacity = memory["capacity"]
    rows = []
    for each in shown:
        parts = {name: value for name, value in each.items() if name in MEMORY_KINDS}
        parts["rest"] = each["total"] - sum(parts.values())
        rows.append(
            (
                f"stage {each['stage']}" if len(stages) > 1 else "each GPU",
                {f"mem-{name}": value / GIB for name, value in parts.items() if value > 1},
                (format_bytes(each["total"]), tag("small", format_percent(each["total"] / capacity))),
            )
        )
    kinds = {f"mem-{name}": words for name, words in MEMORY_KINDS.items()}
    most = max(capacity, memory["total"]) / GIB * 1.02
    marks = [("capacity", capacity / GIB, f"capacity {format_bytes(capacity)}")]
    verdict = "free" if memory["fits"] else "missing"
    lead = (
        f"A GPU of each stage at its fullest moment, against {format_bytes(capacity)} (the line): "
        f"{format_bytes(abs(capacity - memory['total']))} {verdict} on stage {memory['stage']}."
    )
    if memory["low"] < memory["high"]:
        lead += (
            f" {memory['level'] * 100:.0f} % interval {format_bytes(memory['low'])} to "
            f"{format_bytes(memory['high'])}; PyTorch allocates {format_bytes(memory['allocated'])} and "
            f"reserves {format_bytes(memory['reserved'])}."
        )
    if memory["verdict"] != "fits":
        lead = f"{str(memory['verdict']).capitalize()}. {lead}"
    return Section("Memory", stacked(rows, kinds, most, _gib, marks), lead)


def _gib(size: float) -> str:
    return f"{size:.3g} GiB"


def _communication(found: Facts) -> Section | None:
    groups = sorted(found["communication_s"].items(), key=lambda each: -each[1]["exposed"])
    if not groups:
        return None
    name, worst = groups[0]
    lead = (
        f"{GROUP_NAMES.get(name, name).capitalize()} costs most: {format_seconds(worst['exposed'])} exposed "
        f"of {format_seconds(worst['total'])}."
    )
    return exposed_section(found["communication_s"], GROUP_NAMES, lead)


def _asked(found: Facts) -> Section:
    items = plain_pairs(found["run"])
    sources = ", ".join(f"{kind}: {source}" for kind, source in found["sources"].items())
    if sources:
        items.append(("prices", sources))
    return Section(
        "What was asked",
        pairs(items),
        "From measured to roofline: where each price comes from, the least trusted of its kind.",
    )
