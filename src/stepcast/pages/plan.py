"""The page of a whole run: how long, how much, and where the time goes."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from stepcast.pages.blocks import about_line, answer, band, card, table, waterfall
from stepcast.pages.charts import Frame, legend
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Child, Markup
from stepcast.report.plan import CHOICE_HEADS, PART_NAMES, STAGE_HEADS, choice_row, fullest_memory, stage_rows
from stepcast.units import (
    DAY,
    HOUR,
    format_bytes,
    format_duration,
    format_money,
    format_percent,
    format_seconds,
    format_short_count,
)
from stepcast.views.step import memory_words

Facts = Mapping[str, Any]
KINDS = {
    "steps": "compute",
    "stragglers": "cp",
    "pauses": "pp",
    "checkpoints": "optimizer",
    "lost_work": "ep",
    "restarts": "tp",
    "waiting_for_repair": "bubble",
    "missing_replicas": "other",
}
POINTS = 41


def plan_page(found: Facts, about: About) -> Page:
    """Of the facts of a Plan."""
    sections = [_split(found), _lost(found), _fan(found), _choices(found), _phases(found)]
    days = format_duration(found["days"]["median"] * DAY)
    title = f"{days} on {found['phases'][-1]['gpus']:,} GPUs"
    return Page(title, _headline(found), sections, about, found, found["assumptions"], found["warnings"])


def _headline(found: Facts) -> Markup:
    days, last = found["days"], found["phases"][-1]
    tokens = f"{format_short_count(found['tokens'])} tokens, " if found["tokens"] else ""
    words = f"{tokens}{found['steps']:,} steps of {format_seconds(last['step_s'])} on {last['gpus']:,} GPUs"
    until = [f"until {found['until']}"] if found.get("until") else []
    about = about_line(words, f"failures: {found['failures']}", *until)
    low, high, sure = days["p10"], days["p90"], "80 % of runs end within"
    if step := found["step_band_days"]:
        low, high, sure = step["low"], step["high"], "from the step-time interval"
    ends = (format_duration(low * DAY), format_duration(high * DAY))
    number, _, unit = format_duration(days["median"] * DAY).partition(" ")
    cards = [
        _memory_card(found),
        card("GPU-hours", format_short_count(found["gpu_hours"]), f"{found['gpu_hours']:,.0f}"),
    ]
    if found["cost"] is not None:
        cost, currency = found["cost"], found["currency"]
        cards.append(card("Cost", format_money(cost, currency, short=True), format_money(cost, currency)))
    if found["energy_mwh"]:
        cards.append(card("Energy", f"{found['energy_mwh']:,.0f} MWh"))
    cards.append(card("Goodput", format_percent(found["goodput"]), "of the time in steps that count"))
    if last["between_interruptions_s"]:
        cards.append(
            card(
                "Interruptions",
                f"{found['interruptions']:,.0f}",
                f"about one every {format_duration(last['between_interruptions_s'])}",
            )
        )
    if last["interval_s"]:
        cards.append(
            card(
                "Checkpoint every",
                format_duration(last["interval_s"]),
                f"{format_bytes(found['checkpoint_bytes'])}, a pause of {last['checkpoint_pause_s']:.1f} s",
            )
        )
    return answer(
        number,
        f"{unit}, the median of {found['runs']:,} simulated runs",
        about,
        band(low, days["median"], high, ends, sure),
        cards,
    )


def _memory_card(found: Facts) -> Markup:
    memory = fullest_memory(found)
    if memory is None:
        return card("Memory", "not checked", "the step was measured")
    used, _, verdict = memory_words(memory).partition(" of ")
    return card("Memory", used, f"of {verdict}", "good" if memory["fits"] else "bad")


def _split(found: Facts) -> Section:
    parts = [(KINDS[name], PART_NAMES[name], seconds) for name, seconds in found["split_s"].items()]
    total = sum(found["split_s"].values())
    return Section(
        "Where the time goes",
        waterfall(parts, total, "run", format_duration, _unit(total)),
        "The mean run, from its first step to its last.",
    )


def _lost(found: Facts) -> Section | None:
    lost = {name: seconds for name, seconds in found["split_s"].items() if name != "steps" and seconds > 0}
    total = sum(lost.values())
    if not total:
        return None
    parts = [(KINDS[name], PART_NAMES[name], seconds) for name, seconds in lost.items()]
    share = format_percent(1 - found["goodput"])
    lead = f"{format_duration(total)}, {share} of the run, is not spent in steps that count."
    return Section("What is lost", waterfall(parts, total, "lost time", format_duration, _unit(total)), lead)


def _unit(total_s: float) -> float:
    return DAY if total_s > 2 * DAY else HOUR


def _fan(found: Facts) -> Section:
    """Progress over days.

    Interruptions are independent, so the spread of the time that a share of the run takes grows with the root
    of that share.
    """
    days = found["days"]
    mean = days["mean"]
    shares = [at / (POINTS - 1) for at in range(POINTS)]

    def course(quantile: str) -> list[tuple[float, float]]:
        return [(share * mean + sqrt(share) * (days[quantile] - mean), 100 * share) for share in shares]

    step = found["step_band_days"]
    furthest = max(days["p90"], step["high"] if step else 0.0)
    frame = Frame(
        0.0,
        furthest * 1.02,
        0.0,
        100.0,
        lambda day: f"{day:g}",
        lambda share: f"{share:g} %",
        "days",
        "of the tokens" if found["tokens"] else "of the steps",
    )
    drawn: list[Child] = []
    entries = [("compute", "median"), ("band", "80 % of runs")]
    if step:
        drawn.append(
            frame.area(
                ((0, 0), (step["low"], 100), (step["high"], 100)), "outer", "from the step-time interval"
            )
        )
        entries.append(("hidden", "from the step-time interval"))
    drawn.append(frame.area((*course("p10"), *reversed(course("p90"))), "fan", "80 % of runs"))
    drawn.append(frame.line(((0, 0), (days["without_interruption"], 100)), "ideal"))
    drawn.append(frame.line(course("median"), "median"))
    lead = (
        f"Dashed: without an interruption, {format_duration(days['without_interruption'] * DAY)}. "
        "The narrow fan is chance, the wide one our error of the step."
    )
    return Section(
        "Progress",
        Markup(legend(entries) + frame.draw(*drawn, label="Progress of the run over days")),
        lead,
        wide=True,
    )


def _choices(found: Facts) -> Section | None:
    rows = [row for row in found["choices"] if row["interval_s"]]
    if not rows:
        return None
    cells = [choice_row(row) for row in rows]
    keys = [(row["spares"], row["interval_s"], row["goodput"], row["days"]) for row in rows]
    made = table(CHOICE_HEADS, cells, "In closed form", keys, sortable=True)
    return Section("Other intervals and spares", made)


def _phases(found: Facts) -> Section | None:
    if len(found["phases"]) < 2:
        return None
    return Section("Stages of the run", table(STAGE_HEADS, stage_rows(found), "One after the other"))
