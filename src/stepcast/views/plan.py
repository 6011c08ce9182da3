"""The view of a planned run: how long, how much, and where the time goes."""

from collections.abc import Mapping, Sequence
from math import sqrt

from stepcast import units
from stepcast.ir.types import Facts
from stepcast.views import view as ui
from stepcast.views.declared import build_view
from stepcast.views.step import memory_words
from stepcast.views.view import NAMES

NOT_CHECKED = "not checked: --step-s gives a step without a model"
PART_NAMES, PART_COLOURS = NAMES["plan_parts"], NAMES["plan_colours"]
POINTS = 41


def plan_view(facts: Facts) -> ui.View:
    """Return the view of a Plan."""
    last, days, stages = facts["phases"][-1], facts["days"], len(facts["phases"])
    ends = {name: units.format_duration(days[name] * units.DAY) for name in ("p10", "p90")}
    hours, lead = facts["gpu_hours"], "From the first step of the run to its last."
    money = [units.format_money(facts["cost"] or 0.0, facts["currency"], short=short) for short in (True, False)]
    timed = _time_phases(facts)
    # The best interval with each number of spares, and other intervals with those that were asked for.
    best = [row for row in facts["choices"] if row["times_best"] == 1 or row["spares"] == facts["spares"]]
    spares = facts["spares"] or 0
    with_spares = f", with {spares:,} spare node{'s' if spares > 1 else ''}" if spares else ""
    view = build_view(
        "plan",
        facts,
        last=last,
        each=f"in {stages} stages" if stages > 1 else f"of {units.format_seconds(last['step_s'])}",
        band=_band(facts),
        spread=ends if len(set(ends.values())) > 1 else {},
        memory=[_memory(facts)],
        large=_large("GPU-hours", units.format_short_count(hours), units.format_amount(hours), with_spares),
        paid=[] if facts["cost"] is None else _large("cost", *money),
        energy_mwh=facts["energy_mwh"] or None,
        interval_s=last["interval_s"] or None,
        between_s=last["between_interruptions_s"] or None,
        breakdown=_split("Time breakdown (mean run)", facts["split_s"], "run", lead),
        lost=_lost_time_bars(facts),
        progress=_progress(facts),
        chart=_gantt(timed) if timed else None,
        timed=timed,
        spare_nodes=("spares", lambda row: "any" if row["spares"] is None else row["spares"]),
        best_choices=best if any(row["interval_s"] for row in facts["choices"]) else None,
    )
    return ui.replace(view, warnings=list(dict.fromkeys(facts["warnings"])))


def _band(facts: Facts) -> ui.HeadlineInterval:
    days = facts["days"]
    low, high, words = days["p10"], days["p90"], "80 % of runs end within"
    if step := facts["step_band_days"]:
        low, high, words = step["low"], step["high"], "from the step-time interval"
    ends = units.format_duration(low * units.DAY), units.format_duration(high * units.DAY)
    return ui.HeadlineInterval(low, days["median"], high, *ends, words)


def _large(name: str, short: str, full: str, note: str = "") -> list[ui.Figure]:
    """Return a figure in short with all its digits below, where it has more than six, and a *note*."""
    if len(full) < len("$100,000"):
        return [ui.Figure(name, full, note, line=f"{full}{note}")]
    return [ui.Figure(name, short, f"{full}{note}", line=f"{full}{note}")]


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


def _lost_time_bars(facts: Facts) -> ui.Bars | None:
    lost = {part: seconds for part, seconds in facts["split_s"].items() if part != "steps" and seconds > 0}
    total_s = sum(lost.values())
    if not total_s:
        return None
    share = units.format_percent(1 - facts["goodput"])
    lead = f"{units.format_duration(total_s)}, {share} of the run, is not spent in steps that count."
    return _split("What is lost", lost, "lost time", lead, ui.Shown.PAGE)


def _split(
    title: str, parts_s: Mapping[str, float], whole: str, lead: str, shown: ui.Shown = ui.Shown.ALWAYS
) -> ui.Bars:
    shares = [ui.Share(PART_COLOURS[part], PART_NAMES[part], seconds) for part, seconds in parts_s.items()]
    total_s = sum(parts_s.values())
    unit = units.DAY if total_s > 2 * units.DAY else units.HOUR
    show = units.format_duration
    return ui.breakdown(title, shares, total_s, whole=whole, show=show, unit=unit, lead=lead, shown=shown)


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


def _time_phases(facts: Facts) -> list[Facts]:
    """Return the stages of the run with the days at which they begin and end; none where there is one alone."""
    rows, day = list[Facts](), 0.0
    for number, phase in enumerate(facts["phases"], 1):
        begin, day = day, day + phase["days"]
        memory = memory_words(phase["memory_bytes"]) if phase["memory_bytes"] else "not checked"
        rows.append({**phase, "stage": number, "begin": begin, "end": day, "memory": memory})
    return rows if len(rows) > 1 else []


def _gantt(phases: Sequence[Facts]) -> ui.Bars:
    bars = []
    for phase in phases:
        piece = ui.BarPiece("compute", phase["days"], f"stage {phase['stage']}: {phase['days']:g} d")
        bars.append(ui.Bar(f"stage {phase['stage']}", [piece], f"{phase['days']:.1f} days", start=phase["begin"]))
    on_page: Facts = {"lead": "Mean run, with everything that is lost.", "wide": True, "shown": ui.Shown.PAGE}
    return ui.Bars("Gantt chart", bars[: ui.MOST_TIMES], {}, phases[-1]["end"], show="{:g} d".format, **on_page)
