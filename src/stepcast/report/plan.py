"""A planned run as text: how long, how much, and where the time goes."""

from collections.abc import Mapping
from typing import Any

from stepcast.report.text import bullet, facts, parts_table, table
from stepcast.units import (
    DAY,
    format_bytes,
    format_duration,
    format_money,
    format_percent,
    format_seconds,
    format_short_count,
)
from stepcast.views.step import memory_words

Facts = Mapping[str, Any]
NOT_CHECKED = "not checked: --step-s gives a step without a model"
PART_NAMES = {
    "steps": "steps",
    "stragglers": "slow nodes",
    "pauses": "planned pauses",
    "checkpoints": "checkpoints",
    "lost_work": "recomputed after failures",
    "restarts": "restarts",
    "waiting_for_repair": "waiting for a repair",
    "missing_replicas": "fewer replicas",
}


def plan_text(found: Facts, width: int) -> str:
    """The facts of a Plan, for a person."""
    parts = [facts(_headline(found), width), _split(found, width)]
    if len(found["phases"]) > 1:
        parts.append(_stages(found, width))
    if any(row["interval_s"] for row in found["choices"]):
        parts.append(_choices(found, width))
    if found["assumptions"]:
        parts.append("\n".join(bullet(note, "assumed: ", width) for note in found["assumptions"]))
    return "\n\n".join(parts)


def _headline(found: Facts) -> list[tuple[str, object]]:
    days, stage = found["days"], found["phases"][-1]
    median, low, high = (format_duration(days[name] * DAY) for name in ("median", "p10", "p90"))
    pairs: list[tuple[str, object]] = [
        ("takes", median if low == high else f"{median}; 80 % of runs {low} to {high}")
    ]
    band = found["step_band_days"]
    if band:
        low, high = (format_duration(band[name] * DAY) for name in ("low", "high"))
        pairs.append(("90 % interval", f"{low} to {high}, from the step-time interval"))
    pairs += [("memory", _memory(found)), ("GPU-hours", f"{found['gpu_hours']:,.0f}")]
    if found.get("until"):
        pairs.insert(0, ("until", found["until"]))
    if found["cost"] is not None:
        pairs.append(("cost", format_money(found["cost"], found["currency"])))
    if found["energy_mwh"]:
        pairs.append(("energy", f"{found['energy_mwh']:,.0f} MWh"))
    tokens = f", {format_short_count(found['tokens'])} tokens" if found["tokens"] else ""
    pairs.append(("steps", f"{found['steps']:,}{tokens}"))
    if found["tokens"]:
        pairs.append(("throughput", f"{found['tokens_per_s']:,.0f} tokens/s over the whole run"))
    pairs.append(("goodput", format_percent(found["goodput"])))
    between_s = stage["between_interruptions_s"]
    if between_s:
        pairs.append(
            (
                "interruptions",
                f"{found['interruptions']:,.0f}, about one every {format_duration(between_s)}",
            )
        )
    if stage["interval_s"]:
        pairs.append(
            (
                "checkpoints",
                f"{format_bytes(found['checkpoint_bytes'])} every {format_duration(stage['interval_s'])}: "
                f"a pause of {stage['checkpoint_pause_s']:.1f} s, "
                f"safe after {stage['checkpoint_write_s']:.1f} s",
            )
        )
    return pairs


def fullest_memory(found: Facts) -> Facts | None:
    """Return the memory verdict of the stage that leaves least memory free; None if one was measured."""
    verdicts = [phase["memory_bytes"] for phase in found["phases"]]
    if None in verdicts:
        return None
    fullest: Facts = max(verdicts, key=lambda memory: memory["total"] / memory["capacity"])
    return fullest


def _memory(found: Facts) -> str:
    memory = fullest_memory(found)
    return memory_words(memory) if memory else NOT_CHECKED


def _split(found: Facts, width: int) -> str:
    total_s = sum(found["split_s"].values()) or 1.0
    parts = [(PART_NAMES[name], seconds) for name, seconds in found["split_s"].items() if seconds > 0]
    return parts_table("the mean run spends", parts, total_s, format_duration, width)


STAGE_HEADS = ("stage", "GPUs", "steps", "step", "days", "interruptions", "memory")


def stage_rows(found: Facts) -> list[tuple[object, ...]]:
    """A run's stages under ``STAGE_HEADS``."""
    return [
        (
            at + 1,
            f"{each['gpus']:,}",
            f"{each['steps']:,}",
            format_seconds(each["step_s"]),
            f"{each['days']:.1f}",
            f"{each['interruptions']:,.0f}",
            memory_words(each["memory_bytes"]) if each["memory_bytes"] else "not checked",
        )
        for at, each in enumerate(found["phases"])
    ]


def _stages(found: Facts, width: int) -> str:
    return table(STAGE_HEADS, stage_rows(found), width)


CHOICE_HEADS = ("spare nodes", "checkpoint every", "goodput", "days")


def choice_row(row: Facts) -> tuple[object, ...]:
    """Another interval or number of spares under ``CHOICE_HEADS``."""
    return (
        "any" if row["spares"] is None else row["spares"],
        format_duration(row["interval_s"]) if row["interval_s"] else "-",
        format_percent(row["goodput"]),
        "-" if row["days"] is None else f"{row['days']:.1f}",
    )


def _choices(found: Facts, width: int) -> str:
    rows = [
        choice_row(row)
        for row in found["choices"]
        if row["times_best"] == 1 or row["spares"] == found["spares"]
    ]
    return table(CHOICE_HEADS, rows, width)
