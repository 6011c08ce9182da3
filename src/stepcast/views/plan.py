"""The view of a planned run: how long, how much, and where the time goes."""

from collections.abc import Mapping
from itertools import accumulate
from math import sqrt

from stepcast import units
from stepcast.ir.facts import Facts
from stepcast.views import view as ui
from stepcast.views.declared import asked_pairs
from stepcast.views.step import memory_words
from stepcast.views.view import NAMES

NOT_CHECKED = "not checked: --step-s gives a step without a model"
PART_NAMES, PART_COLOURS = NAMES["plan_parts"], NAMES["plan_colours"]
POINTS = 41


def plan_view(facts: Facts) -> ui.View:
    """Return the view of a Plan."""
    days, last = facts["days"], facts["phases"][-1]
    median = units.format_duration(days["median"] * units.DAY)
    number, _, unit = median.partition(" ")
    return ui.View(
        f"{median} on {last['gpus']:,} GPUs",
        ui.Headline(number, f"{unit}, the median of {facts['runs']:,} simulated runs", _about(facts), _band(facts)),
        _figures(facts),
        [
            _split("Time breakdown (mean run)", facts["split_s"], "run", "From the first step of the run to its last."),
            _lost(facts),
            _progress(facts),
            _phases(facts, ui.Shown.PAGE),
            _phases(facts, ui.Shown.ALWAYS),
            _choices(facts),
        ],
        facts,
        asked=asked_pairs(facts),
        warnings=list(dict.fromkeys(facts["warnings"])),
    )


def _about(facts: Facts) -> list[str]:
    last = facts["phases"][-1]
    tokens = f"{units.format_short_count(facts['tokens'])} tokens, " if facts["tokens"] else ""
    stages = len(facts["phases"])
    steps = f"in {stages} stages" if stages > 1 else f"of {units.format_seconds(last['step_s'])}"
    words = f"{tokens}{facts['steps']:,} steps {steps} on {last['gpus']:,} GPUs"
    until = [f"until {facts['until']}"] if facts.get("until") else []
    return [words, f"failures: {facts['failures']}", *until]


def _band(facts: Facts) -> ui.HeadlineInterval:
    days = facts["days"]
    low, high, words = days["p10"], days["p90"], "80 % of runs end within"
    if step := facts["step_band_days"]:
        low, high, words = step["low"], step["high"], "from the step-time interval"
    ends = units.format_duration(low * units.DAY), units.format_duration(high * units.DAY)
    return ui.HeadlineInterval(low, days["median"], high, *ends, words)


def _figures(facts: Facts) -> list[ui.Figure]:
    days, last = facts["days"], facts["phases"][-1]
    median, low, high = (units.format_duration(days[name] * units.DAY) for name in ("median", "p10", "p90"))
    figures = [ui.text_line("until", facts["until"])] if facts.get("until") else []
    figures.append(ui.text_line("takes", median if low == high else f"{median}; 80 % of runs {low} to {high}"))
    if band := facts["step_band_days"]:
        low, high = (units.format_duration(band[name] * units.DAY) for name in ("low", "high"))
        figures.append(ui.text_line("90 % interval", f"{low} to {high}, from the step-time interval"))
    hours = units.format_amount(facts["gpu_hours"])
    figures += [_memory(facts), _large("GPU-hours", units.format_short_count(facts["gpu_hours"]), hours)]
    if facts["cost"] is not None:
        short, cost = (units.format_money(facts["cost"], facts["currency"], short=short) for short in (True, False))
        figures.append(_large("cost", short, cost))
    if facts["energy_mwh"]:
        figures.append(ui.Figure("energy", units.format_energy(facts["energy_mwh"])))
    if facts.get("carbon_t") is not None:
        figures.append(ui.Figure("CO2", f"{facts['carbon_t']:,.3g} t", "of electricity"))
    tokens = f", {units.format_short_count(facts['tokens'])} tokens" if facts["tokens"] else ""
    figures.append(ui.text_line("steps", f"{facts['steps']:,}{tokens}"))
    if facts["tokens"]:
        figures.append(ui.text_line("throughput", f"{facts['tokens_per_s']:,.0f} tokens/s over the whole run"))
    goodput = units.format_percent(facts["goodput"])
    figures.append(ui.Figure("goodput", goodput, "of the time in steps that count", line=goodput))
    if last["between_interruptions_s"]:
        every = f"about one every {units.format_duration(last['between_interruptions_s'])}"
        figures.append(ui.Figure("interruptions", f"{facts['interruptions']:,.0f}", every))
    if last["interval_s"]:
        size, every = units.format_bytes(facts["checkpoint_bytes"]), units.format_duration(last["interval_s"])
        pause, safe = f"{last['checkpoint_pause_s']:.1f} s", f"{last['checkpoint_write_s']:.1f} s"
        line = f"{size} every {every}: a pause of {pause}, safe after {safe}"
        figures.append(ui.Figure("checkpoints", f"every {every}", f"{size}, a pause of {pause}", line=line))
    return figures


def _large(name: str, short: str, full: str) -> ui.Figure:
    """Return a figure in short with all its digits below, where it has more than six."""
    return ui.Figure(name, full, line=full) if len(full) < len("$100,000") else ui.Figure(name, short, full, line=full)


def _memory(facts: Facts) -> ui.Figure:
    """Return the memory verdict of the stage that leaves least memory free."""
    verdicts = [phase["memory_bytes"] for phase in facts["phases"]]
    if None in verdicts:
        return ui.Figure("memory", "not checked", "the step was measured", line=NOT_CHECKED)
    memory = max(verdicts, key=lambda verdict: verdict["total"] / verdict["capacity"])
    words = memory_words(memory)
    used, _, verdict = words.partition(" of ")
    mood = ui.Mood.GOOD if memory["fits"] else ui.Mood.BAD
    return ui.Figure("memory", used, f"of {verdict}", line=words, mood=mood)


def _lost(facts: Facts) -> ui.Breakdown | None:
    lost = {part: seconds for part, seconds in facts["split_s"].items() if part != "steps" and seconds > 0}
    total_s = sum(lost.values())
    if not total_s:
        return None
    share = units.format_percent(1 - facts["goodput"])
    lead = f"{units.format_duration(total_s)}, {share} of the run, is not spent in steps that count."
    return _split("What is lost", lost, "lost time", lead, ui.Shown.PAGE)


def _split(
    title: str, parts_s: Mapping[str, float], whole: str, lead: str, shown: ui.Shown = ui.Shown.ALWAYS
) -> ui.Breakdown:
    shares = [ui.Share(PART_COLOURS[part], PART_NAMES[part], seconds) for part, seconds in parts_s.items()]
    total_s = sum(parts_s.values())
    unit = units.DAY if total_s > 2 * units.DAY else units.HOUR
    show = units.format_duration
    return ui.Breakdown(title, shares, total_s, whole=whole, show=show, unit=unit, lead=lead, shown=shown)


def _progress(facts: Facts) -> ui.Scatter:
    """Return progress over days.

    Interruptions are independent, so the spread of the time that a share of the run takes grows with the root
    of that share.
    """
    days, step = facts["days"], facts["step_band_days"]
    mean = days["mean"]
    shares = [index / (POINTS - 1) for index in range(POINTS)]

    def course(quantile: str) -> list[tuple[float, float]]:
        return [(share * mean + sqrt(share) * (days[quantile] - mean), 100 * share) for share in shares]

    marks: list[ui.Dot | ui.Line] = []
    legend = [("compute", "median"), ("band", "80 % of runs")]
    if step:
        corners = ((0, 0), (step["low"], 100), (step["high"], 100))
        marks.append(ui.Line(corners, "outer", area=True, tip="from the step-time interval"))
        legend.append(("hidden", "from the step-time interval"))
    marks += [
        ui.Line((*course("p10"), *reversed(course("p90"))), "fan", area=True, tip="80 % of runs"),
        ui.Line(((0, 0), (days["without_interruption"], 100)), "ideal"),
        ui.Line(course("median"), "median"),
    ]
    lead = (
        f"Dashed: without an interruption, {units.format_duration(days['without_interruption'] * units.DAY)}. "
        "The narrow fan is chance, the wide one our error of the step."
    )
    furthest = max(days["p90"], step["high"] if step else 0.0)
    x = ui.Axis(0.0, furthest * 1.02, lambda day: f"{day:g}", "days")
    y = ui.Axis(0.0, 100.0, lambda share: f"{share:g} %", "of the tokens" if facts["tokens"] else "of the steps")
    on_page: Facts = {"legend": legend, "lead": lead, "wide": True, "shown": ui.Shown.PAGE}
    return ui.Scatter("Progress", x, y, marks, "Progress of the run over days", **on_page)


def _choices(facts: Facts) -> ui.Table | None:
    """Return the best interval with each number of spares, and other intervals with those that were asked for."""
    if not any(row["interval_s"] for row in facts["choices"]):
        return None
    rows = [row for row in facts["choices"] if row["times_best"] == 1 or row["spares"] == facts["spares"]]
    columns = ui.columns(
        "spare_nodes checkpoint_every=interval_s:duration goodput days=days:.1f",
        spare_nodes=("spares", lambda row: "any" if row["spares"] is None else row["spares"]),
    )
    return ui.table_of("Other intervals and spares", rows, columns, caption="In closed form", sortable=True)


def _phases(facts: Facts, shown: ui.Shown) -> ui.Part | None:
    """Return the stages of the run: a Gantt chart on the page, a table everywhere."""
    phases = facts["phases"]
    if len(phases) < 2:
        return None
    ends = list(accumulate(phase["days"] for phase in phases))
    begins = [end - phase["days"] for end, phase in zip(ends, phases, strict=True)]
    if shown is ui.Shown.PAGE:
        bars = [
            ui.Bar(f"stage {number}", {"compute": phase["days"]}, f"{phase['days']:.1f} days", start=begin)
            for number, (begin, phase) in enumerate(zip(begins, phases, strict=True), 1)
        ]
        lead = "Mean run, with everything that is lost."
        return ui.Bars("Gantt chart", bars, {}, ends[-1], show="{:g} d".format, lead=lead, wide=True, shown=shown)
    rows = [
        {**phase, "stage": number, "begin": begin, "end": end}
        for number, (begin, end, phase) in enumerate(zip(begins, ends, phases, strict=True), 1)
    ]
    columns = ui.columns(
        "stage GPUs=gpus:, steps=steps:, step=step_s from_day=begin:.1f to_day=end:.1f "
        "interruptions=interruptions:,.0f memory",
        memory=lambda row: memory_words(row["memory_bytes"]) if row["memory_bytes"] else "not checked",
    )
    return ui.table_of("Stages of the run", rows, columns, caption="One after the other, mean run", wide=True)
