"""A simulated step as text: the answer first, then where the time went, then stage by stage."""

from collections.abc import Mapping
from typing import Any

from stepcast.ir.facts import band_of
from stepcast.report.asked import asked_pairs, config_notes
from stepcast.report.cells import cells
from stepcast.report.text import GAP, bullet, facts, parts_table, table
from stepcast.units import GIB, format_bytes, format_money, format_percent, format_seconds, format_short_count

Facts = Mapping[str, Any]
MOST_STAGES = 16
LEAST_SHOWN = 0.001  # of the step, for a column of its own
STATED = ("parameters", "gradients", "optimizer", "activations")  # of memory, as the JSON contract has them
PART_NAMES = {
    "compute": "compute",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "expert parallel, exposed",
    "dp": "data parallel, exposed",
    "pp": "pipeline messages, exposed",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "host": "waiting for the host",
    "other": "other",
}


def step_text(found: Facts, width: int) -> str:
    """The facts of a StepReport, for a person."""
    asked = asked_pairs(found)
    parts = [facts(asked, width)] if asked else []
    parts += [facts(_headline(found), width), _breakdown(found, width)]
    if len(found["stages"]) > 1:
        parts.append(_stages(found, width))
    if found["assumptions"]:
        parts.append("\n".join(bullet(note, "assumed: ", width) for note in found["assumptions"]))
    if found.get("config"):
        notes = config_notes(found["config"])
        parts.append("\n".join(bullet(note, "config: ", width) for note in notes))
    return "\n\n".join(parts)


def micro_batches(count: int) -> str:
    """As words."""
    return "1 micro-batch" if count == 1 else f"{count:,} micro-batches"


def _headline(found: Facts) -> list[tuple[str, object]]:
    band = found["uncertainty"]
    pairs: list[tuple[str, object]] = [
        ("step", format_seconds(found["step_s"])),
        (
            band_of(found).words,
            f"{format_seconds(band['low_s'])} to {format_seconds(band['high_s'])} ({likely(band)})",
        ),
        ("GPUs", f"{found['gpus']:,}"),
        ("schedule", f"{found['schedule']}, {micro_batches(found['micro_batches'])}"),
    ]
    if found["tokens_per_s"] is not None:
        pairs += [
            ("throughput", f"{found['tokens_per_s']:,.0f} tokens/s"),
            (
                "model FLOP/s",
                f"{found['tflops_per_gpu']:.1f} TFLOP/s per GPU, MFU {format_percent(found['mfu'])}",
            ),
        ]
    memory = found["memory_bytes"]
    if memory is not None:
        counts = f"{format_bytes(memory['allocated'])} allocated, {format_bytes(memory['reserved'])} reserved"
        pairs += [("memory", memory_words(memory)), ("allocator", counts)]
        pairs += remedy_pairs(found)
        if host := memory.get("host"):
            node, capacity = format_bytes(host["node"]), format_bytes(host["capacity"])
            pairs.append(("host memory", f"{node} of {capacity} per node"))
    if training := found.get("training"):
        cost = "" if training["cost"] is None else f", {format_money(training['cost'], training['currency'])}"
        pairs.append(
            (
                f"{format_short_count(training['tokens'])} tokens",
                f"{training['days']:,.1f} days, {training['gpu_hours']:,.0f} GPU-hours{cost}",
            )
        )
    return pairs


def memory_words(memory: Facts) -> str:
    """Return the memory verdict of a step: bytes used, bytes available, whether it fits, and the interval."""
    verdict = memory["verdict"] if memory["fits"] else memory["verdict"].upper()
    words = f"{format_bytes(memory['total'])} of {format_bytes(memory['capacity'])}: {verdict}"
    if memory["low"] == memory["high"]:
        return words
    ends = f"{format_bytes(memory['low'])} to {format_bytes(memory['high'])}"
    return f"{words} ({memory['level'] * 100:.0f} % interval {ends})"


def remedy_pairs(found: Facts) -> list[tuple[str, str]]:
    """Return the changes that make the step fit, the fastest first."""
    if "remedies" not in found:
        return []
    if not found["remedies"]:
        why = "no recomputation, sharding, smaller micro-batch or split of these GPUs does: give more of them"
        return [("to fit", f"{why}, or let 'stepcast search' look")]
    return [
        (
            "to fit" if not at else "or",
            f"{each['options']}: {format_seconds(each['step_s'])} ({each['slower'] * 100:+.0f} %), "
            f"{format_bytes(each['memory_bytes'])}" + (", tight" if each["verdict"] == "tight" else ""),
        )
        for at, each in enumerate(found["remedies"])
    ]


def likely(band: Facts) -> str:
    """Return what the interval of a step was learnt from."""
    if band["of"] == "prices":
        return "from the intervals of all cost estimates"
    wider = f"; widened for {' and '.join(band['widened'])}" if band["widened"] else ""
    return f"from {band['rows']} measured runs, {band['of']}{wider}"


def _breakdown(found: Facts, width: int) -> str:
    """Parts of the step with a bar; communication also shows what was hidden behind computation."""
    parts = [(name, seconds) for _, name, seconds in told_parts(found) if seconds > 0]
    text = parts_table(
        "time breakdown (mean over stages)", parts, found["step_s"] or 1.0, format_seconds, width
    )
    hidden = [
        (group, format_seconds(each["total"]), format_seconds(each["exposed"]), _hidden(each))
        for group, each in found["communication_s"].items()
    ]
    if hidden:
        text += "\n\n" + table(("communication", "total", "exposed", "hidden"), hidden, width)
    return text


def told_parts(found: Facts) -> list[tuple[str, str, float]]:
    """Kind, words and seconds of each part of an average stage; of "other" the host stands apart."""
    parts = dict(found["breakdown_s"])
    stages, rest = found["stages"], parts.pop("other")
    host = min(rest, sum(each["host_s"] for each in stages) / max(1, len(stages)))
    parts |= {"host": host, "other": rest - host}
    return [(part, PART_NAMES[part], seconds) for part, seconds in parts.items()]


def _hidden(each: Mapping[str, float]) -> str:
    return format_percent(max(0.0, 1 - each["exposed"] / each["total"])) if each["total"] else "-"


def _stages(found: Facts, width: int) -> str:
    stages = found["stages"]
    shown = stages if len(stages) <= MOST_STAGES else [*stages[: MOST_STAGES - 1], stages[-1]]
    waits = any(each["host_s"] > LEAST_SHOWN * found["step_s"] for each in stages)
    parts = ("busy", "exposed", *(("host",) if waits else ()), "bubble")
    rows = cells(shown, "stage", *(f"{part}_s" for part in parts), "peak_in_flight")
    return table(("stage", *parts, "in flight"), rows, width)


def path_text(rows: list[tuple[str, int, float]], step_s: float, width: int) -> str:
    """The critical path by kind of op: name, how often, seconds."""
    listed = [
        (name, count, format_seconds(seconds), format_percent(seconds / step_s))
        for name, count, seconds in rows
    ]
    return table(("on the critical path", "count", "time", "share"), listed, width)


def memory_text(memory: Mapping[str, Any], width: int) -> str:
    """What fills the GPUs of each stage; on a narrow terminal the small parts stand together."""
    names = [name for name in memory["stages"][0] if name not in ("stage", "total")]
    used = [name for name in names if any(stage[name] for stage in memory["stages"])]
    parts = {name: (name,) for name in used}
    if sum(len(name) + len(GAP) for name in ("stage", *used, "total")) > width:
        parts = {name: (name,) for name in used if name in STATED}
        parts["other"] = tuple(name for name in used if name not in STATED)
    rows = [
        (
            stage["stage"],
            *(f"{sum(stage[name] for name in group) / GIB:.2f}" for group in parts.values()),
            f"{stage['total'] / GIB:.2f}",
        )
        for stage in memory["stages"]
    ]
    shown = rows if len(rows) <= MOST_STAGES else [*rows[: MOST_STAGES - 1], rows[-1]]
    capacity = f"GiB of each GPU at its fullest moment; it has {memory['capacity'] / GIB:.2f}"
    return table(("stage", *parts, "total"), shown, width) + "\n" + capacity
